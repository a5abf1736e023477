"""Every reason that an answer can give has plain words."""

import pytest

from cli.report.reasons import WORDS, bare_name, words_of
from kvblend.v1 import common_pb2 as pb


@pytest.mark.parametrize("name", pb.Reason.keys())
def test_case_67_every_reason_has_words(name: str) -> None:
    words = WORDS[bare_name(name)]
    assert words.sentence.endswith(".")
    assert not words.advice or words.advice.endswith(".")
    assert words_of(name) == words_of(bare_name(name)) == words


def test_no_words_for_reasons_that_do_not_exist() -> None:
    assert set(WORDS) == {bare_name(name) for name in pb.Reason.keys()}  # noqa: SIM118


def test_a_reason_of_a_newer_release_is_named() -> None:
    assert "FROM_THE_FUTURE" in words_of("REASON_FROM_THE_FUTURE").sentence

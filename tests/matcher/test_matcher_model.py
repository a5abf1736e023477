"""Histories of every kind against the slow model; and matchers that are broken, which must not pass for whole ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from broken_matchers import FAULTS, SNAPSHOT_FAULTS
from fold_machine import HASHINGS, FoldMachine, SnapshotMachine
from history import History, history_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test
from matcher_kit import CHUNK, Removed, document_chunks
from reference_matcher import reachable_tokens, worth_covering

LIMITS = settings(max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))
FoldMachine.TestCase.settings = LIMITS
TestMatcherAgainstTheModel = FoldMachine.TestCase


SnapshotMachine.TestCase.settings = settings(LIMITS, max_examples=30)
TestSnapshotsAgainstTheModel = SnapshotMachine.TestCase

# Enough for every fault; most show in the first few examples.
SEARCH = settings(LIMITS, max_examples=1500, derandomize=True, database=None, phases=[Phase.generate])


def is_noticed(machine: Any, fault: Callable[[], AbstractContextManager[None]]) -> None:
    class Broken(machine):
        pass

    Broken.fault = staticmethod(fault)
    # A LookupError: of a chunk that the model does not offer. What the hash's base decides may not happen twice: Flaky.
    with pytest.raises((AssertionError, LookupError, Flaky)):
        run_state_machine_as_test(Broken, settings=SEARCH)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_the_model_notices_a_broken_matcher(fault: Callable[[], AbstractContextManager[None]]) -> None:
    is_noticed(FoldMachine, fault)


@pytest.mark.parametrize("fault", SNAPSHOT_FAULTS.values(), ids=SNAPSHOT_FAULTS)
def test_the_model_notices_a_broken_snapshot(fault: Callable[[], AbstractContextManager[None]]) -> None:
    is_noticed(SnapshotMachine, fault)


# Few symbols and few documents: chunks repeat, overlap, share beginnings and collide.
documents_of_bits = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60), min_size=1, max_size=4)


@given(documents_of_bits, st.data(), st.integers(0, 40), st.sampled_from(list(HASHINGS)), st.sets(st.integers(0, 15)))
@settings(deadline=None)
def test_every_cover_is_true_and_complete(
    documents: list[list[int]], data: st.DataObject, skip: int, keep: int, dropped: set[int]
) -> None:
    """Against a second reference, which only knows which tokens can be reached at all."""
    chunks = [chunk for n, tokens in enumerate(documents) for chunk in document_chunks(tokens, f"d{n}")]
    history: History = history_of(*chunks, hashing=HASHINGS[keep])
    gone = [chunks[number] for number in sorted(dropped) if number < len(chunks)]
    if gone:
        history.publish("a", Removed(gone))
    left = [chunk for chunk in chunks if chunk not in gone]
    parts = data.draw(st.lists(st.sampled_from([*documents, [2, 0, 1]]), min_size=1, max_size=5))
    query = [token for part in parts for token in part]
    skip = min(skip, len(query))
    got = history.covered(history.ask(query, skip_tokens=skip), left)
    want = worth_covering(reachable_tokens(query, left, skip, CHUNK))
    assert got <= want
    # Short pieces between longer ones may be lost, never a piece that is worth a segment by itself.
    assert worth_covering(want - got) == set()

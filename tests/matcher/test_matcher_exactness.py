"""No false match, for any input: what is served was compared token by token, and no collision hides anything."""

import json
from pathlib import Path
from typing import Any

import pytest
from history import History, history_of
from matcher_kit import ALL_BITS, TIER, Chunk, Removed, document_chunks, segments_of, text
from matcher_service_kit import running

from services.matcher.kernels.hashing import PRIME, random_hashing
from services.matcher.log.memory import MemoryLog
from services.matcher.snapshot import parts_of

PAIRS = Path(__file__).resolve().parents[3] / "shared" / "data" / "collision_pair.json"
# Bits of the fingerprint that are kept: all, few (a shared bucket), none (every fingerprint is the same).
KEPT = {"all bits": ALL_BITS, "one bit": 1, "no bit": 0}
keeps = pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)


def both_are_found(one: list[int], other: list[int], keep: int) -> None:
    """Whichever is stored first, and whichever of them goes."""
    size = len(one)
    assert one != other
    chunks = {name: document_chunks(tokens, name, chunk_tokens=size) for name, tokens in (("1", one), ("2", other))}
    for first, second in (("1", "2"), ("2", "1")):
        history = history_of(*chunks[first], hashing=random_hashing(keep))
        tokens = {"1": one, "2": other}
        assert not segments_of(history.match(history.ask(tokens[second])))
        history.add(*chunks[second])
        for name in ("1", "2"):
            (segment,) = segments_of(history.match(history.ask(text(9, 3) + tokens[name])))
            assert (segment.document, segment.query_position, segment.length) == (name, 3, size)
        history.publish("a", Removed(chunks[first]))
        assert not segments_of(history.match(history.ask(tokens[first])))
        assert len(segments_of(history.match(history.ask(tokens[second])))) == 1


@keeps
@pytest.mark.skipif(not PAIRS.exists(), reason="the shared data folder is absent")
@pytest.mark.parametrize("pair", ["one base", "every odd base"])
def test_chunks_that_collide_modulo_a_power_of_two_are_told_apart(pair: str, keep: int) -> None:
    data = json.loads(PAIRS.read_text())
    found = data if pair == "one base" else data["any_odd_base_pair"]
    both_are_found(found["a"], found["b"], keep)


def thue_morse(length: int) -> list[int]:
    return [bin(n).count("1") & 1 for n in range(length)]


PATTERNS = {
    # The two collide modulo 2^64 for every odd base.
    "Thue-Morse": (thue_morse(1024), [1 - bit for bit in thue_morse(1024)]),
    "a rotated period": ([1, 2, 3, 5] * 64, [2, 3, 5, 1] * 64),
    "zeros before the end": ([0] * 255 + [1], [0] * 254 + [1, 0]),
    "reversed": (list(range(64)), list(range(64))[::-1]),
    "congruent modulo the prime": ([PRIME, *range(31)], [0, *range(31)]),
    "the largest tokens": ([0xFFFF_FFFF] * 32, [0xFFFF_FFFE] * 32),
}


@keeps
@pytest.mark.parametrize("name", PATTERNS)
def test_algebraic_patterns_are_told_apart(name: str, keep: int) -> None:
    both_are_found(*PATTERNS[name], keep)


@keeps
def test_chunks_that_differ_in_one_token_are_told_apart(keep: int) -> None:
    original = text(1, 128)
    variants = [[*original[:at], original[at] ^ 1, *original[at + 1 :]] for at in range(128)]
    history = history_of(*document_chunks(original, "original", chunk_tokens=128), hashing=random_hashing(keep))
    for variant in variants:
        assert not segments_of(history.match(history.ask(variant)))
    for number, variant in enumerate(variants):
        history.add(*document_chunks(variant, f"variant {number}", chunk_tokens=128))
    for number in range(0, 128, 9):
        (segment,) = segments_of(history.match(history.ask(variants[number])))
        assert segment.document == f"variant {number}"


def test_a_copy_under_another_name_is_never_lost_however_many_there_are() -> None:
    tokens = text(1, 16)
    copies = [chunk for number in range(300) for chunk in document_chunks(tokens, f"copy {number}")]
    history = history_of(*copies, hashing=random_hashing(1))
    for copy in copies[:-1]:
        history.publish("a", Removed([copy]))
        assert len(segments_of(history.match(history.ask(tokens)))) == 1
    (segment,) = segments_of(history.match(history.ask(tokens)))
    assert segment.chain_hashes == [copies[-1].chain_hash]


def _contains(data: bytes, secret: int) -> bool:
    forms = (str(secret).encode(), f"{secret:x}".encode(), secret.to_bytes(4, "little"), secret.to_bytes(4, "big"))
    return any(form in data for form in forms)


def _said_of(history: History, chunks: list[Chunk]) -> list[bytes]:
    answer = history.match(history.ask(text(1, 100), l2_id=TIER))
    assert len(segments_of(answer)) == 1
    fold = history.fold
    things: list[Any] = [fold, fold.table, fold.table.spaces, fold.table.owners, vars(fold), chunks]
    return [
        answer.SerializeToString(),
        *parts_of(fold, fold.applied()),
        *(record for record, _ in history.records),
        *(repr(thing).encode() for thing in things),
        fold.digest(),
    ]


def test_the_base_stays_in_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    """It is in no answer, no log, no snapshot, and nothing that is printed."""
    chunks = document_chunks(text(1, 100), l2=TIER)
    history = history_of(*chunks)
    secrets = [int(powers[1]) for powers in (history.table.hashing.powers, history.table.hashing.inverses)]
    said = _said_of(history, chunks)
    log = MemoryLog()
    with running(log, hashing=history.table.hashing) as matcher:
        matcher.add(*chunks)
        said += [matcher.match(history.ask(text(1, 100))).SerializeToString(), matcher.stats.SerializeToString()]
        said += [repr(matcher.replica).encode(), repr(vars(matcher.replica)).encode()]
    captured = capfd.readouterr()
    said += [captured.out.encode(), captured.err.encode()]
    for data in said:
        assert not any(_contains(data, secret) for secret in secrets)


def test_every_process_has_a_base_of_its_own() -> None:
    assert len({int(random_hashing().powers[1]) for _ in range(8)}) == 8

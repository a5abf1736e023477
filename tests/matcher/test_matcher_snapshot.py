"""Snapshots: what one fold knows, read by another; written while it goes on, in parts that every log takes."""

import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from history import LIMIT, History, history_of
from matcher_kit import TIER, Added, Change, Chunk, Cleared, Removed, document_chunks, segments_of, text

from kvblend.v1 import matcher_pb2
from services.matcher import capture
from services.matcher.capture import TooMuchChanged
from services.matcher.fold import Fold
from services.matcher.log.base import PART_BYTES, LogGap, Position
from services.matcher.pages import store_owner, tier_owner
from services.matcher.snapshot import parts_of, restore
from services.matcher.table import Table

Said = tuple[str, Change]


def through_a_snapshot(history: History, meanwhile: list[Said], limit: int = LIMIT) -> Fold:
    """A snapshot begins, then these changes come, then all of its parts but the first are written; and a new fold reads
    it and what was logged behind its position."""
    parts = parts_of(history.fold, history.fold.applied())
    taken, at = [next(parts)], history.position
    digest = history.fold.digest()
    for store, change in meanwhile:
        history.publish(store, change)
    fold = restore([*taken, *parts], at, Table(limit))
    # Exactly as it was; and then as it is now.
    assert fold.digest() == digest
    history.replay(fold, behind=at.number)
    return fold


def town(documents: int = 40) -> History:
    """Texts of all kinds: several spaces, tenants, owners, documents, classes; short, blended, not matchable."""
    history = History(limit=16 << 20)
    for number in range(documents):
        facts: dict[str, Any] = {
            "space": bytes([number % 3]) * 16,
            "tenant": f"t{number % 3}",
            "domain": 1 + number % 3,
            "context_class": 1 + number % 2,
            "matchable": number % 5 > 0,
            "l2": TIER if number % 4 == 1 else "",
            "chunk_tokens": (16, 256, 1024)[number % 3],
        }
        chunks = document_chunks(text(number, 30 + 97 * number), f"d{number % 9}", **facts)
        history.add(*chunks, store=f"s{number % 4}")
        history.add(*chunks[:2], store=f"s{number % 7}")
    history.restart("s2", Added(document_chunks(text(99, 100), "again")))
    return history


def test_what_is_read_is_what_was_written() -> None:
    history = town()
    fold = through_a_snapshot(history, [])
    assert fold.digest() == history.fold.digest()
    assert fold.applied() == history.fold.applied()
    assert fold.table.chunks == len(history.model.held)
    for number in range(40):
        tokens = text(number, 30 + 97 * number)
        for store in ("s0", "s1"):
            request = history.ask(
                tokens, store, space_id=bytes([number % 3]) * 16, l2_id=TIER, context_classes=[1, 2, 3]
            )
            assert segments_of(history.match(request, fold)) == segments_of(history.match(request))


def test_what_comes_meanwhile_is_in_it_once() -> None:
    history = town(10)
    before = text(3, 30 + 97 * 3)
    meanwhile: list[Said] = [
        ("s0", Added(document_chunks(text(200, 500), "new"))),
        ("s0", Added(document_chunks(text(200, 500), "new", l2=TIER))),
        ("s1", Added(document_chunks(before, "copy"))),
        ("s3", Cleared(document="d3")),
        ("s1", Removed(document_chunks(before, "copy")[:3])),
    ]
    fold = through_a_snapshot(history, meanwhile)
    assert fold.digest() == history.fold.digest()


def variants(facts_differ: Callable[[Chunk], Chunk]) -> tuple[bytes, bytes]:
    chunks = document_chunks(text(1, 100))
    one, other = history_of(*chunks), History()
    other.add(*chunks[:-1], facts_differ(chunks[-1]))
    return one.fold.digest(), other.fold.digest()


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("chain_hash", b"x" * 32),
        ("previous_hash", b"x" * 32),
        ("tokens", (1, 2, 3, 4)),
        ("tokens", (1, 2, 3, 5, 6)),
        ("stored_position", 7),
        ("space", b"x" * 16),
        ("domain", 1),
        ("context_class", 2),
        ("document", "other"),
        ("matchable", False),
        ("l2", TIER),
    ],
)
def test_digests_differ_when_a_single_fact_differs(fact: str, value: object) -> None:
    one, other = variants(lambda chunk: Chunk(**(vars(chunk) | {fact: value})))
    assert one != other


def test_digests_tell_owners_epochs_tenants_and_claims_apart() -> None:
    chunks, claimed = document_chunks(text(1, 100)), document_chunks(text(1, 100), l2=TIER)
    said: list[list[Said]] = [
        [("a", Added(chunks))],
        [("b", Added(chunks))],
        [("a", Added(chunks)), ("b", Added(chunks))],
        [("a", Added(chunks)), ("b", Added(chunks[1:]))],
        [("a", Added(claimed))],
        # Claimed at another position; and by a stream that is further.
        [("a", Added(claimed)), ("a", Added(claimed))],
        [("a", Added([*claimed, *claimed]))],
        [("a", Added(document_chunks(text(1, 100), l2="disk")))],
        [("a", Added(document_chunks(text(1, 100), tenant="t")))],
        [("a", Added(document_chunks(text(1, 100), chunk_tokens=32)))],
    ]
    digests = set()
    for changes in said:
        history = History()
        for store, change in changes:
            history.publish(store, change)
        digests.add(history.fold.digest())
    history.restart("a", Added(chunks))
    digests.add(history.fold.digest())
    assert len(digests) == len(said) + 1


def test_digests_do_not_depend_on_the_order_of_what_is_the_same_in_the_end() -> None:
    documents = [document_chunks(text(seed, 200), f"{seed}") for seed in range(6)]
    digests = set()
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        history = History()
        history.add(*document_chunks(text(9, 300), "goes"))
        for number in order:
            history.add(*documents[number])
        history.publish("a", Cleared(document="goes"), reset=False)
        history.publish("a", Removed(documents[0]))
        history.add(*documents[0])
        digests.add(history.fold.digest())
    assert len(digests) == 1


def test_parts_are_never_larger_than_a_log_takes_however_many_own_each_chunk() -> None:
    history = History(limit=64 << 20)
    chunks = document_chunks(text(1, 16 * 2000))
    history.add(*chunks)
    table = history.table
    with table.lock:
        entries = np.arange(len(chunks), dtype=np.int64)
        for number in range(1500):
            table.own(entries, store_owner(f"s{number}"))
        table.own(entries, tier_owner(TIER), 7)
    parts = list(parts_of(history.fold, []))
    assert max(map(len, parts)) <= PART_BYTES
    fold = restore(parts, history.position, Table(64 << 20))
    fold.streams = dict(history.fold.streams)
    assert fold.digest() == history.fold.digest()


def test_long_chunks_make_parts_that_every_log_takes() -> None:
    history = History(limit=64 << 20)
    history.add(*document_chunks(text(1, 1024 * 2000), chunk_tokens=1024))
    parts = list(parts_of(history.fold, []))
    assert max(map(len, parts)) <= PART_BYTES
    assert len(parts) >= 3


def test_a_snapshot_larger_than_this_replicas_memory_is_taken_as_far_as_it_fits() -> None:
    history = History(limit=16 << 20)
    history.add(*document_chunks(text(1, 16 * 8000)))
    small = restore(parts_of(history.fold, history.fold.applied()), history.position, Table(1 << 20))
    assert small.table.size <= 1 << 20
    assert small.table.evicted > 0
    assert small.table.chunks + small.table.evicted == 8000


def test_a_snapshot_of_another_version_is_refused() -> None:
    part = matcher_pb2.TablePart(format_version=99)
    with pytest.raises(LogGap, match="99"):
        restore([part.SerializeToString()], history_of(*document_chunks(text(1, 16))).position, Table(LIMIT))


ONE = document_chunks(text(1, 16), "text", document="one", context_class=1)
TWO = document_chunks(text(1, 16), "text", document="two", context_class=3)
CLAIM = document_chunks(text(1, 16), "text", document="one", l2=TIER)
OTHER = document_chunks(text(2, 16), "other")


@pytest.mark.parametrize(
    ("before", "meanwhile"),
    [
        ([("a", Added(OTHER))], [("a", Added(ONE)), ("a", Removed(ONE)), ("b", Added(TWO))]),
        ([("b", Added(OTHER))], [("a", Added(ONE)), ("a", Cleared(document="one")), ("b", Added(TWO))]),
        ([("a", Added(ONE)), ("b", Added(ONE))], [("b", Cleared()), ("b", Added(TWO)), ("a", Removed(ONE))]),
        (
            [("a", Added(CLAIM)), ("a", Added(ONE)), ("b", Added(ONE)), ("a", Removed(CLAIM))],
            [("b", Cleared()), ("b", Added(ONE)), ("a", Removed(ONE))],
        ),
    ],
    ids=["better class kept", "cleared owner comes back", "dies in the replay", "stale claim"],
)
def test_a_chunk_that_goes_and_comes_again_while_a_snapshot_is_written(
    before: list[Said], meanwhile: list[Said]
) -> None:
    history = History()
    for store, change in before:
        history.publish(store, change)
    fold = through_a_snapshot(history, meanwhile)
    assert fold.digest() == history.fold.digest()


def test_snapshots_written_by_another_thread_show_their_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower begins one between two records and goes on at once."""
    monkeypatch.setattr(capture, "_ENTRIES", 7)
    monkeypatch.setattr(capture, "_LOOK_AT", 50)
    history = town(12)
    found: list[tuple[bytes, bytes]] = []

    def write(parts: Iterator[bytes], at: Position, digest: bytes) -> None:
        found.append((restore(parts, at, Table(LIMIT)).digest(), digest))

    for number in range(12):
        parts, at = parts_of(history.fold, history.fold.applied()), history.position
        first, digest = next(parts), history.fold.digest()
        writer = threading.Thread(target=write, args=(chain([first], parts), at, digest))
        writer.start()
        for more in range(8):
            which = (number + 5 * more) % 12
            history.add(*document_chunks(text(which, 30 + 97 * which), f"d{which}"), store="s1")
            history.publish(f"s{more % 4}", Cleared(document=f"d{which % 5}"))
            history.table.sweep()
        writer.join(60)
        assert not writer.is_alive()
    assert len(found) == 12
    assert all(restored == digest for restored, digest in found)
    assert history.table.watcher is None


def test_a_snapshot_that_nobody_finishes_or_that_takes_too_much_memory_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    history = town(12)
    for end in ("closed", "too much"):
        parts = parts_of(history.fold, history.fold.applied())
        next(parts)
        if end == "closed":
            parts.close()
        else:
            monkeypatch.setattr(capture, "_MOST_AHEAD_BYTES", 100)
            history.publish("s0", Cleared())
            history.publish("s1", Cleared())
            with pytest.raises(TooMuchChanged):
                list(parts)
            monkeypatch.undo()
        assert history.table.watcher is None
    fold = restore(parts_of(history.fold, history.fold.applied()), history.position, Table(LIMIT))
    assert fold.digest() == history.fold.digest()

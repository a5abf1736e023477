"""Receiving objects: however a server's replies are cut on the way, and whatever they are."""

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import AskError, MovedError, ResponseError
from scripted_redis import scripted

from services.common.checksums import Checksum, checksum_of
from services.common.redis_connection import BoundedConnection, LinkError
from services.store.tiers.redis_receiving import Incoming, MissingPart, WrongLength, receive

REFUSALS = {
    b"MOVED 3999 127.0.0.1:6381": MovedError,
    b"ASK 3999 127.0.0.1:6381": AskError,
    b"WRONGTYPE Operation against a key holding the wrong kind of value": ResponseError,
}
# By object, its parts.
Parts = list[list[bytes]]
Outcomes = list[list[bytes | None]]


def replied(outcome: bytes | None, part: bytes) -> bytes:
    if outcome is None:
        return b"$%d\r\n%b\r\n" % (len(part), part)
    return b"$0\r\n\r\n" if outcome == b"" else b"-%b\r\n" % outcome


def receive_all(
    objects: Parts,
    replies: dict[bytes, bytes],
    cuts: Sequence[int],
    lanes: int,
    *,
    buffered: bool = False,
    incoming: type[Incoming] = Incoming,
) -> tuple[list[Incoming], list[bytearray], list[BoundedConnection]]:
    """Names are `object/part`."""
    targets = [bytearray(sum(map(len, parts))) for parts in objects]
    made = [
        incoming([b"%d/%d" % (number, part) for part in range(len(parts))], memoryview(target))
        for number, (parts, target) in enumerate(zip(objects, targets, strict=True))
    ]
    for whole, parts in zip(made, objects, strict=True):
        assert list(map(len, whole.places)) == list(map(len, parts))
    with scripted(lambda words: replies[words[1]], cuts, lanes, buffered=buffered) as connections:
        receive(made, connections, time.monotonic() + 10)
    return made, targets, connections


def named(objects: Parts, outcomes: Outcomes | None = None) -> dict[bytes, bytes]:
    return {
        b"%d/%d" % (number, place): replied(outcomes[number][place] if outcomes else None, part)
        for number, parts in enumerate(objects)
        for place, part in enumerate(parts)
    }


@st.composite
def some_objects(draw: st.DrawFn) -> Parts:
    """Parts of equal length, but for what does not divide."""
    objects = []
    for size in draw(st.lists(st.integers(1, 90), min_size=1, max_size=6)):
        data, count = draw(st.binary(min_size=size, max_size=size)), draw(st.integers(1, min(size, 5)))
        bounds = [size * place // count for place in range(count + 1)]
        objects.append([data[start:end] for start, end in pairwise(bounds)])
    return objects


CUTS = st.lists(st.integers(0, 70), min_size=1, max_size=8).filter(any)
LANES = st.integers(1, 4)


@given(some_objects(), CUTS, LANES, st.booleans())
def test_whole_objects_arrive_whole_however_they_are_cut(
    objects: Parts, cuts: list[int], lanes: int, buffered: bool
) -> None:
    made, targets, connections = receive_all(objects, named(objects), cuts, lanes, buffered=buffered)
    for whole, target, parts in zip(made, targets, objects, strict=True):
        assert whole.landed
        assert whole.failures == {}
        assert target == b"".join(parts)
        assert whole.checksum.value() == checksum_of(target)
    assert all(connection.is_usable() for connection in connections)


@given(some_objects(), CUTS, LANES, st.data())
def test_what_is_missing_or_refused_costs_its_object_alone(
    objects: Parts, cuts: list[int], lanes: int, data: st.DataObject
) -> None:
    kinds = st.sampled_from([None, None, None, b"", *REFUSALS])
    outcomes = [data.draw(st.lists(kinds, min_size=len(parts), max_size=len(parts))) for parts in objects]
    made, targets, connections = receive_all(objects, named(objects, outcomes), cuts, lanes)
    for whole, target, parts, expected in zip(made, targets, objects, outcomes, strict=True):
        for place, failure in whole.failures.items():
            assert expected[place] is not None
            assert type(failure) is (REFUSALS[expected[place]] if expected[place] else MissingPart)
        assert bool(whole.failures) == any(outcome is not None for outcome in expected)
        assert whole.landed == (not whole.failures)
        if whole.landed:
            assert target == b"".join(parts)
    assert all(connection.is_usable() for connection in connections), "a refusal is an answer"


@given(some_objects(), CUTS, LANES, st.data())
def test_a_part_of_another_length_is_never_taken(
    objects: Parts, cuts: list[int], lanes: int, data: st.DataObject
) -> None:
    number = data.draw(st.integers(0, len(objects) - 1))
    place = data.draw(st.integers(0, len(objects[number]) - 1))
    part = objects[number][place]
    other = data.draw(st.binary(min_size=1, max_size=120).filter(lambda value: len(value) != len(part)))
    made, targets, connections = receive_all(
        objects, {**named(objects), b"%d/%d" % (number, place): replied(None, other)}, cuts, lanes
    )
    assert isinstance(made[number].failures[place], WrongLength)
    assert sum(not connection.is_usable() for connection in connections) == 1
    for whole, target, parts in zip(made[:number] + made[number + 1 :], targets[:number] + targets[number + 1 :],
                                    objects[:number] + objects[number + 1 :], strict=True):  # fmt: skip
        assert not whole.failures
        assert not whole.landed or target == b"".join(parts)


def test_a_reply_without_its_end_is_never_taken() -> None:
    (whole,), _, _ = receive_all([[b"abcdef"]], {b"0/0": b"$6\r\nabcdefgh"}, [3], 1)
    assert isinstance(whole.failures[0], WrongLength)


def test_a_refusal_without_an_end_is_never_waited_for() -> None:
    (whole,), _, _ = receive_all([[b"abcdef"]], {b"0/0": b"-ERR " + b"x" * 1000}, [7], 1)
    assert isinstance(whole.failures[0], WrongLength)


def test_a_server_that_falls_silent_is_left_at_the_deadline_with_what_had_come() -> None:
    parts = [b"first object", b"second"]
    made = [Incoming([b"%d" % number], memoryview(bytearray(len(part)))) for number, part in enumerate(parts)]
    replies = {b"0": replied(None, parts[0]), b"1": replied(None, parts[1])[:-4]}
    with scripted(lambda words: replies[words[1]], [5], 1) as connections:
        with pytest.raises(LinkError):
            receive(made, connections, time.monotonic() + 0.05)
        assert not connections[0].is_usable()
    assert [whole.landed for whole in made] == [True, False]


class HashesPartsAlone(Incoming):
    """Broken: the checksum is the last part's."""

    def slices(self) -> Iterator[object]:  # type: ignore[override]
        for piece in super().slices():
            self.checksum = Checksum()
            yield piece


class ForgetsFailures(Incoming):
    """Broken: what is missing looks like what is there."""

    def failed(self, part: int, failure: Exception) -> None:
        del failure
        self._left -= len(self.places[part])


@pytest.mark.parametrize("broken", [HashesPartsAlone, ForgetsFailures])
def test_broken_receivers_are_found_out(broken: type[Incoming]) -> None:
    parts = [b"first part", b"second one", b"third part"]
    replies = named([parts])
    if broken is ForgetsFailures:
        replies[b"0/2"] = replied(b"", parts[2])
    (whole,), _, _ = receive_all([parts], replies, [3], 1, incoming=broken)
    hashed = whole.checksum.value() == checksum_of(b"".join(parts))
    assert (whole.landed, whole.failures, hashed) == (True, {}, False)

"""Receiving parts: however a server's replies are cut on the way, and whatever they are."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import AskError, MovedError, ResponseError

from services.common.checksums import checksum_of
from services.common.redis_connection import BoundedConnection, LinkError
from services.common.redis_socket import BoundedSocket
from services.store.tiers.redis_parts import MissingPart, PartReader, WrongLength

REFUSALS = {
    b"MOVED 3999 127.0.0.1:6381": MovedError,
    b"ASK 3999 127.0.0.1:6381": AskError,
    b"WRONGTYPE Operation against a key holding the wrong kind of value": ResponseError,
}


class ScriptedSocket:
    """A server's end: answers GETRANGEs from `values`, in pieces of the given lengths. Always readable, poll thinks."""

    def __init__(self, values: dict[bytes, bytes], cuts: Sequence[int], pipe: int) -> None:
        self._values = values
        self._cuts = cuts
        self._turn = 0
        self._pipe = pipe
        self._waiting = bytearray()

    def sendall(self, data: bytes) -> None:
        for command in data.split(b"*4\r\n")[1:]:
            self._waiting += self._values[command.split(b"\r\n")[3]]

    def receive_now(self, view: memoryview) -> int:
        self._turn += 1
        cut = self._cuts[self._turn % len(self._cuts)]
        piece = bytes(self._waiting[: min(cut, len(view))])
        view[: len(piece)] = piece
        del self._waiting[: len(piece)]
        return len(piece)

    def fileno(self) -> int:
        return self._pipe


@contextmanager
def scripted(values: dict[bytes, bytes], cuts: Sequence[int], lanes: int) -> Iterator[list[BoundedConnection]]:
    pipes = [os.pipe() for _ in range(lanes)]
    try:
        for _, writing in pipes:
            os.write(writing, b"!")
        sockets = [ScriptedSocket(values, cuts, reading) for reading, _ in pipes]
        yield [BoundedConnection(SimpleNamespace(bounded=cast(BoundedSocket, socket))) for socket in sockets]
    finally:
        for pipe in pipes:
            for end in pipe:
                os.close(end)


def replied(outcome: bytes | None, part: bytes) -> bytes:
    if outcome is None:
        return b"$%d\r\n%b\r\n" % (len(part), part)
    return b"$0\r\n\r\n" if outcome == b"" else b"-%b\r\n" % outcome


def receive(
    reader_class: type[PartReader], parts: Sequence[bytes], replies: Sequence[bytes], cuts: Sequence[int], lanes: int
) -> tuple[PartReader, bytearray]:
    target = bytearray(sum(map(len, parts)))
    view, places = memoryview(target), []
    for part in parts:
        places.append(view[: len(part)])
        view = view[len(part) :]
    names = [b"part%d" % index for index in range(len(parts))]
    reader = reader_class(names, places)
    with scripted(dict(zip(names, replies, strict=True)), cuts, lanes) as connections:
        reader.run(connections, time.monotonic() + 10)
    return reader, target


PARTS = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8)
CUTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@given(PARTS, CUTS, st.integers(1, 3))
def test_whole_parts_arrive_whole_however_they_are_cut(parts: list[bytes], cuts: list[int], lanes: int) -> None:
    reader, target = receive(PartReader, parts, [replied(None, part) for part in parts], cuts, lanes)
    assert target == b"".join(parts)
    assert reader.outcomes == [None] * len(parts)
    assert reader.checksum.value() == checksum_of(b"".join(parts))


@given(PARTS, CUTS, st.integers(1, 3), st.data())
def test_what_is_missing_or_refused_is_told(
    parts: list[bytes], cuts: list[int], lanes: int, data: st.DataObject
) -> None:
    kinds = st.sampled_from([None, None, b"", *REFUSALS])
    outcomes = data.draw(st.lists(kinds, min_size=len(parts), max_size=len(parts)))
    replies = [replied(outcome, part) for outcome, part in zip(outcomes, parts, strict=True)]
    reader, _ = receive(PartReader, parts, replies, cuts, lanes)
    for told, outcome in zip(reader.outcomes, outcomes, strict=True):
        if told is not None:
            assert outcome is not None
            assert type(told) is (REFUSALS[outcome] if outcome else MissingPart)
    assert any(reader.outcomes) == any(outcome is not None for outcome in outcomes)


@given(PARTS, CUTS, st.integers(1, 3), st.data())
def test_a_part_of_another_length_is_never_taken(
    parts: list[bytes], cuts: list[int], lanes: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(st.binary(min_size=1, max_size=40).filter(lambda value: len(value) != len(parts[index])))
    replies = [replied(None, other if place == index else part) for place, part in enumerate(parts)]
    with pytest.raises(WrongLength):
        receive(PartReader, parts, replies, cuts, lanes)


def test_a_reply_without_its_end_is_never_taken() -> None:
    with pytest.raises(WrongLength):
        receive(PartReader, [b"abcdef"], [b"$6\r\nabcdefgh"], [3], 1)


def test_a_refusal_without_an_end_is_never_waited_for() -> None:
    with pytest.raises(WrongLength):
        receive(PartReader, [b"abcdef"], [b"-ERR " + b"x" * 1000], [7], 1)


def test_a_server_that_falls_silent_is_left_at_the_deadline() -> None:
    names, place = [b"part0"], memoryview(bytearray(6))
    with scripted({b"part0": b"$6\r\nabc"}, [2], 1) as connections:
        with pytest.raises(LinkError):
            PartReader(names, [place]).run(connections, time.monotonic() + 0.05)
        assert not connections[0].is_usable()


class HashesAsItComes(PartReader):
    """Broken: in the order of arrival."""

    def _arrived(self, index: int, count: int) -> None:
        start = self._filled[index]
        self._filled[index] += count
        self.checksum.update(self._slices[index].place[start : start + count])


class ForgetsFailures(PartReader):
    """Broken: what is missing looks like what is there."""

    def _fail(self, index: int, outcome: Exception) -> None:
        del index, outcome


@pytest.mark.parametrize("broken", [HashesAsItComes, ForgetsFailures])
def test_broken_readers_are_found_out(broken: type[PartReader]) -> None:
    parts = [b"first part", b"second one", b"third"]
    replies = [
        replied(None, parts[0]),
        replied(None, parts[1]),
        replied(b"" if broken is ForgetsFailures else None, parts[2]),
    ]
    reader, _ = receive(broken, parts, replies, [3], 2)
    good = all(outcome is None for outcome in reader.outcomes)
    hashed = reader.checksum.value() == checksum_of(b"".join(parts))
    assert (good, hashed) == (True, False)

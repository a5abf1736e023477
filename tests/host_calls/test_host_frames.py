"""Frames arrive as they were sent, however the bytes are cut; what is no frame is refused."""

import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvblend.host_calls.frames import (
    MOST_BYTES,
    Frames,
    FrameTooLarge,
    pack_metadata,
    unpack_metadata,
)

SECONDS = 20.0
NOTHING = socket.socket(socket.AF_UNIX)
some_bytes = st.binary(max_size=300)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    with closing(ends[0]), closing(ends[1]):
        yield ends


def on_wire(*sent: tuple[bytes, bytes]) -> bytes:
    """The slow obvious way."""
    return b"".join(
        len(head).to_bytes(4, "little") + len(body).to_bytes(4, "little") + head + body for head, body in sent
    )


class Cut:
    """A socket that gives at most so many bytes at a time."""

    fileno = NOTHING.fileno

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data, self._sizes = memoryview(data), sizes

    def recv_into(self, room: memoryview) -> int:
        size = min(len(room), len(self._data), self._sizes.pop() if self._sizes else len(room))
        room[:size], self._data = self._data[:size], self._data[size:]
        return size


@given(
    sent=st.lists(st.tuples(some_bytes, some_bytes), max_size=5),
    sizes=st.lists(st.integers(1, 50)),
    room=st.sampled_from([1, 8, 30, 1 << 14]),
    kept=st.sampled_from([1, 40, 1 << 20]),
)
def test_frames_arrive_however_they_are_cut(
    sent: list[tuple[bytes, bytes]], sizes: list[int], room: int, kept: int
) -> None:
    with mock.patch.multiple("kvblend.host_calls.frames", _ROOM_BYTES=room, _KEPT_BYTES=kept):
        frames = Frames(Cut(on_wire(*sent), sizes))
        assert [frames.receive() for _ in sent] == sent
        with pytest.raises(EOFError):
            frames.receive()


def test_no_memory_of_a_very_large_frame_is_kept() -> None:
    large = b"", bytes(4 << 20)
    frames = Frames(Cut(on_wire(large, (b"", b"small"), large), []))
    tracemalloc.start()
    try:
        assert frames.receive() == large
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
        assert frames.receive() == (b"", b"small")
        assert frames.receive() == large
    finally:
        tracemalloc.stop()


@given(head=some_bytes, body=some_bytes, data=st.data())
def test_a_part_of_a_frame_is_none(head: bytes, body: bytes, data: st.DataObject) -> None:
    whole = on_wire((head, body))
    end = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(EOFError):
        Frames(Cut(whole[:end], data.draw(st.lists(st.integers(1, 50))))).receive()


@given(data=st.binary(max_size=40))
def test_any_bytes_are_a_frame_or_an_error(data: bytes) -> None:
    try:
        head, body = Frames(Cut(data, [])).receive()
    except (EOFError, FrameTooLarge):
        return
    assert data.startswith(on_wire((head, body)))


@pytest.mark.parametrize("sizes", [(0, 0), (5, 0), (0, 1 << 14), (7, (1 << 14) + 1), (100, 3 << 20), (0, MOST_BYTES)])
@pytest.mark.parametrize("deadline", [True, False])
def test_both_ways_of_sending_give_the_same_bytes(
    pair: tuple[socket.socket, socket.socket], sizes: tuple[int, int], deadline: bool
) -> None:
    head, body = (bytes([size % 251]) * size for size in sizes)
    until = time.monotonic() + SECONDS if deadline else None
    sender = threading.Thread(target=Frames(pair[0]).send, args=(head, body, until))
    sender.start()
    assert Frames(pair[1]).receive(until) == (head, body)
    sender.join()


def test_what_is_too_large_is_not_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(FrameTooLarge):
        Frames(pair[0]).send(b"h", bytes(MOST_BYTES))
    pair[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1)


@pytest.mark.parametrize("lengths", [(1, MOST_BYTES), (MOST_BYTES + 1, 0), (2**32 - 1, 2**32 - 1)])
def test_what_is_too_large_is_not_read(lengths: tuple[int, int]) -> None:
    with pytest.raises(FrameTooLarge):
        Frames(Cut(b"".join(length.to_bytes(4, "little") for length in lengths), [])).receive()


def test_a_peer_that_drips_does_not_outlast_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    """Each byte is in time, all of them are not."""
    gone = threading.Event()

    def drip() -> None:
        for byte in on_wire((b"", bytes(1000))):
            pair[0].send(bytes([byte]))
            if gone.wait(0.01):
                return

    thread = threading.Thread(target=drip)
    thread.start()
    with pytest.raises(TimeoutError):
        Frames(pair[1]).receive(time.monotonic() + 0.1)
    gone.set()
    thread.join()


def test_a_peer_that_does_not_read_does_not_outlast_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:

    def send_many(body: bytes) -> None:
        for _ in range(10_000):
            Frames(pair[0]).send(b"", body, time.monotonic() + 0.05)

    for body in (bytes(8 << 20), bytes(1 << 14)):
        with pytest.raises(TimeoutError):
            send_many(body)
    with pytest.raises(TimeoutError):
        Frames(pair[0]).send(b"", b"", time.monotonic() - 1)


@given(st.lists(st.one_of(st.tuples(st.just("a"), st.text()), st.tuples(st.just("a-bin"), st.binary()))))
def test_metadata_travel(metadata: list[tuple[str, str | bytes]]) -> None:
    assert list(unpack_metadata(pack_metadata(metadata))) == metadata


def test_a_sender_is_not_killed_by_the_end_of_the_other_side(pair: tuple[socket.socket, socket.socket]) -> None:
    """Whatever its process does with SIGPIPE."""
    signals: list[int] = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: signals.append(number))
    try:
        pair[1].close()
        for deadline in (None, time.monotonic() + SECONDS):
            with pytest.raises(BrokenPipeError):
                Frames(pair[0]).send(b"head", b"body", deadline)
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not signals


def test_what_comes_behind_a_frame_is_the_next(pair: tuple[socket.socket, socket.socket]) -> None:
    frames = Frames(pair[0])
    assert frames.is_quiet()
    pair[1].sendall(on_wire((b"a", b"b"), (b"", b""), (b"c", b"")))
    for expected in ((b"a", b"b"), (b"", b"")):
        assert frames.receive() == expected
        assert not frames.is_quiet()
    assert frames.receive(time.monotonic() + SECONDS) == (b"c", b"")
    assert frames.is_quiet()
    pair[1].close()
    assert not frames.is_quiet()

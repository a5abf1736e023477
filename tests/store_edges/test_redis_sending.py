"""Sending objects: however much a server takes at once and whatever it answers, a header never precedes its parts."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import AskError, MovedError, OutOfMemoryError
from scripted_redis import scripted

from services.common.redis_connection import LinkError
from services.store.tiers import redis_sending
from services.store.tiers.redis_sending import Outgoing, send

REFUSALS = {
    b"MOVED 3999 127.0.0.1:6381": MovedError,
    b"ASK 3999 127.0.0.1:6381": AskError,
    b"OOM command not allowed when used memory > 'maxmemory'": OutOfMemoryError,
}
# By object: what is said to each of its parts, and to its header; None: it is stored.
Refused = list[tuple[list[bytes | None], bytes | None]]


class Server:
    """Keeps what it is told, refuses what it shall, and sees that no header comes too early."""

    def __init__(self, refused: Refused, sizes: Sequence[int]) -> None:
        self.values: dict[bytes, bytes] = {}
        self.early: list[bytes] = []
        self._refused = refused
        self._sizes = sizes

    def answer(self, words: list[bytes]) -> bytes:
        name, value = words[1], words[-1]
        number, _, part = name.partition(b"/")
        parts, header = self._refused[int(number)]
        refusal = header if part == b"h" else parts[int(part)]
        if part == b"h" and any(b"%b/%d" % (number, place) not in self.values for place in range(len(parts))):
            self.early.append(number)
        if refusal is not None:
            return b"-%b\r\n" % refusal
        self.values[name] = value
        return b"$8\r\nprevious\r\n" if part == b"h" else b"+OK\r\n"


def send_all(refused: Refused, size: int, cuts: Sequence[int], lanes: int, *, buffered: bool = False) -> tuple[
    list[Outgoing], Server, bool
]:  # fmt: skip
    server = Server(refused, [size])
    made = []
    for number, (parts, _) in enumerate(refused):
        names = [b"%d/%d" % (number, place) for place in range(len(parts))]
        commands = [("SET", name, memoryview(name * size)) for name in names]
        made.append(Outgoing(names, commands, ("SET", b"%d/h" % number, b"header")))
    with scripted(server.answer, cuts, lanes, buffered=buffered) as connections:
        send(made, connections, time.monotonic() + 10)
        broken = any(connection._broken for connection in connections)
    return made, server, broken


SAID = st.sampled_from([None, None, None, None, *REFUSALS])
OBJECTS = st.lists(st.tuples(st.lists(SAID, min_size=1, max_size=5), SAID), min_size=1, max_size=6)
CUTS = st.lists(st.integers(0, 90), min_size=1, max_size=8).filter(any)


@given(OBJECTS, st.integers(1, 60), CUTS, st.integers(1, 4), st.booleans())
def test_a_header_follows_its_parts_and_refusals_cost_their_object_alone(
    refused: Refused, size: int, cuts: list[int], lanes: int, buffered: bool
) -> None:
    made, server, broken = send_all(refused, size, cuts, lanes, buffered=buffered)
    assert server.early == []
    assert not broken
    for number, (whole, (parts, header)) in enumerate(zip(made, refused, strict=True)):
        taken = all(part is None for part in parts)
        assert whole.header_replied == taken
        assert (b"%d/h" % number in server.values) == (taken and header is None)
        for place, refusal in whole.refusals.items():
            assert type(refusal) is REFUSALS[parts[place]]  # type: ignore[index]
        assert bool(whole.refusals) != taken
        if taken and header is None:
            assert whole.header_reply == b"previous"
            assert whole.refusal is None
            stored = [server.values[name] for name in whole.names]
            assert stored == [name * size for name in whole.names]
        else:
            assert whole.refusal is not None
        # One that another server has is asked of that one, whatever else was said.
        known = [*whole.refusals.values(), whole.header_reply]
        assert isinstance(whole.refusal, MovedError) == any(isinstance(said, MovedError) for said in known)


@pytest.mark.parametrize("said", [b"+OK\r\n+OK\r\n", b"-LOADING Redis is loading the dataset in memory\r\n"])
def test_answers_that_make_no_sense_end_the_link(said: bytes) -> None:
    whole = Outgoing([b"0/0"], [("SET", b"0/0", b"value")], ("SET", b"0/h", b"header"))
    with scripted(lambda _: said, [100], 1) as connections:
        with pytest.raises(LinkError):
            send([whole], connections, time.monotonic() + 10)
        assert not connections[0].is_usable()


def test_a_server_that_takes_nothing_is_left_at_the_deadline() -> None:
    whole = Outgoing([b"0/0"], [("SET", b"0/0", b"value")], ("SET", b"0/h", b"header"))
    with scripted(lambda _: b"", [100], 2) as connections:
        with pytest.raises(LinkError):
            send([whole], connections, time.monotonic() + 0.05)
    assert not whole.header_replied


def test_a_sender_that_does_not_wait_for_every_part_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(redis_sending._Queue):
        def answered(self, sent: tuple[Outgoing, int | None], reply: object) -> None:
            sent[0].unacknowledged = 1
            super().answered(sent, reply)

    monkeypatch.setattr(redis_sending, "_Queue", Hasty)
    _, server, _ = send_all([([None] * 5, None)], 10, [100], 1)
    assert server.early

"""Which fetch runs next: the scheduler against an obvious model, and its promises one by one."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from l2_kit import until

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.store.catalog import Chunk
from services.store.l2.fetching import Fetches, Flow, Order
from services.store.l2.found import L2Chunk
from services.store.l2.speed import Speed
from services.store.leasing.leases import HolderKey
from services.store.objects import ChunkKey, ObjectKey

# Longer than a busy machine needs; Hypothesis waits for it many times while it looks for the smallest failure.
_SECONDS = 5.0
STREAMS = 3
MAX_BYTES = 60


def l2_chunk(number: int, size: int = 10) -> L2Chunk:
    key = ChunkKey(b"s" * 16, pb.DOMAIN_EXACT, number.to_bytes(32, "big"))
    return L2Chunk(key, {ObjectKey(key, 0, 0): object_pb2.ObjectMeta(payload_bytes=size)}, 0)


def number_of(chunk: L2Chunk) -> int:
    return int.from_bytes(chunk.key.chain_hash, "big")


class FixedSpeed(Speed):
    def __init__(self, streams: int, together: int) -> None:
        super().__init__(streams)
        self._fixed = streams
        self._together = together

    def streams(self, size: int) -> int:
        del size
        return self._fixed

    @property
    def together(self) -> int:
        return self._together


class Wire:
    """Transfers that end when the test says so, and what was released of what landed."""

    def __init__(self, streams: int = STREAMS, max_bytes: int = MAX_BYTES, together: int = 0) -> None:
        self.lock = threading.Lock()
        self.calls: list[list[int]] = []
        self.started: list[int] = []
        self.running: dict[int, tuple[threading.Event, Callable[[], bool]]] = {}
        self.outcomes: dict[int, bool] = {}
        self.landed: list[tuple[int, object]] = []
        self.released: list[object] = []
        self.fetches = Fetches(
            self.transfer, self.released.append, FixedSpeed(streams, together), threads=streams, max_bytes=max_bytes
        )
        self.fetches.start()

    def transfer(self, chunks: Sequence[L2Chunk], wanted: Callable[[L2Chunk], bool]) -> list[Chunk | None]:
        with self.lock:
            self.calls.append([number_of(chunk) for chunk in chunks])
            gates = {number_of(chunk): threading.Event() for chunk in chunks}
            for chunk in chunks:
                number = number_of(chunk)
                self.started.append(number)
                self.running[number] = gates[number], lambda chunk=chunk: wanted(chunk)  # type: ignore[misc]
        return [self.outcome(number, gate) for number, gate in gates.items()]

    def outcome(self, number: int, gate: threading.Event) -> Chunk | None:
        gate.wait()
        with self.lock:
            del self.running[number]
            if not self.outcomes.pop(number):
                return None
            landed = object()
            self.landed.append((number, landed))
            return cast(Any, landed)

    def end(self, number: int, landed: bool = True) -> None:
        self.outcomes[number] = landed
        self.running[number][0].set()
        until(lambda: number not in self.outcomes)

    def until_running(self, *numbers: int) -> None:
        until(lambda: set(self.running) == set(numbers), _SECONDS)

    def close(self) -> None:
        closing = threading.Thread(target=self.fetches.close)
        closing.start()
        while closing.is_alive():
            for number in list(self.running):
                self.outcomes[number] = False
                self.running[number][0].set()
            time.sleep(0.001)
        closing.join()

    def order(self, *numbers: int, session: int = 0, request: str = "r") -> Order:
        holder = HolderKey(bytes([session]), request, 1, 0)
        order = self.fetches.order(holder, ("t", bytes([session])))
        assert not self.fetches.add(order, [l2_chunk(number) for number in numbers])
        return order


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_the_first_chunk_has_the_way_to_itself_then_more_run_as_they_land(wire: Wire) -> None:
    wire.order(1, 2, 3, 4, 5)
    wire.until_running(1)
    wire.end(1)
    wire.until_running(2, 3)
    wire.end(2)
    wire.until_running(3, 4, 5)


def test_what_may_run_at_once_and_takes_a_moment_is_one_transfer() -> None:
    wire = Wire(streams=2, max_bytes=200, together=30)
    order = wire.order(*range(1, 13))
    wire.until_running(1)
    wire.end(1)
    wire.until_running(2, 3)
    wire.end(2)
    wire.end(3)
    wire.until_running(4, 5, 6, 7)
    assert wire.calls == [[1], [2, 3], [4, 5, 6], [7]]
    for number in (4, 5, 6):
        wire.end(number, landed=number != 5)
    wire.until_running(7, 8, 9, 10)
    assert [wire.fetches.outcomes(order)[l2_chunk(number).key] for number in (4, 5, 6)] == [True, False, True]
    wire.close()


def test_one_of_a_transfer_that_nobody_wants_any_more_is_released() -> None:
    wire = Wire(together=30)
    first = wire.order(1, 2, 3)
    wire.until_running(1)
    wire.end(1)
    wire.until_running(2, 3)
    second = wire.order(3, session=1)
    wire.fetches.drop(first)
    assert [wire.running[number][1]() for number in (2, 3)] == [False, True]
    wire.end(2)
    wire.end(3)
    assert wire.fetches.wait(second, 0, 10.0) == 1
    until(lambda: len(wire.released) == 2)
    assert {number for number, landed in wire.landed if landed in wire.released} == {1, 2}
    wire.close()


def test_what_is_waited_for_goes_before_what_is_kept(wire: Wire) -> None:
    kept = wire.order(1, 2)
    wire.until_running(1)
    wire.fetches.keep(kept)
    wire.order(3, session=1)
    wire.order(4, session=2)
    wire.until_running(1, 3, 4)
    wire.end(1)
    wire.until_running(2, 3, 4)


def test_sessions_take_turns_by_bytes() -> None:
    """One asked for much first; another's single chunk does not wait for all of it."""
    narrow = Wire(streams=1, max_bytes=100)
    narrow.order(1, 2, 3, 4, 5)
    narrow.until_running(1)
    narrow.order(11, 12, session=1)
    for number in (1, 2, 11, 3, 12, 4):
        narrow.until_running(number)
        narrow.end(number)
    narrow.close()


def test_equal_fetches_are_joined_and_one_that_leaves_does_not_end_them(wire: Wire) -> None:
    """Case 51: cancelled while it runs, and another lookup wants it."""
    first = wire.order(1, 2)
    second = wire.order(1, session=1)
    wire.until_running(1)
    wire.fetches.drop(first)
    wire.end(1)
    assert wire.fetches.wait(second, 0, 10.0) == 1
    assert wire.fetches.outcomes(second) == {l2_chunk(1).key: True}
    assert wire.started == [1], "what only the first wanted never began"
    assert wire.released == []
    wire.fetches.drop(second)
    assert wire.released == [landed for _, landed in wire.landed]


def test_case_51_a_lookup_that_ends_gives_its_places_up_at_every_step(wire: Wire) -> None:
    order = wire.order(1, 2, 3)
    wire.until_running(1)
    wire.end(1)
    wire.until_running(2, 3)
    wire.fetches.drop_request(bytes([0]), "r")
    assert not any(wanted() for _, wanted in wire.running.values()), "they may stop between two objects"
    assert wire.fetches.wait(order, 1, 10.0) == 1, "who waits is told at once"
    wire.end(2)
    wire.end(3, landed=False)
    until(lambda: wire.fetches.wanted_bytes == 0)
    until(lambda: len(wire.released) == 2)
    assert wire.started == [1, 2, 3]


def test_a_call_that_is_gone_gives_up_only_what_it_waits_for(wire: Wire) -> None:
    kept, other = wire.order(1), wire.order(2, request="other")
    wire.fetches.keep(kept)
    wire.fetches.give_up(HolderKey(bytes([0]), "r", 1, 0))
    wire.fetches.give_up(HolderKey(bytes([0]), "other", 1, 0))
    assert kept.open
    assert not other.open


def test_there_is_an_end_to_what_may_be_on_its_way(wire: Wire) -> None:
    order = wire.order(*range(6))
    assert [number_of(chunk) for chunk in wire.fetches.add(order, [l2_chunk(9), l2_chunk(3)])] == [9]
    assert wire.fetches.wanted_bytes == MAX_BYTES
    wire.fetches.keep(order)
    wire.until_running(0)
    wire.order(20, 21, session=1)
    assert wire.fetches.wanted_bytes == 30, "what is merely kept made way, but for what runs"


def test_who_has_much_on_its_way_makes_room_for_who_has_little(wire: Wire) -> None:
    much = wire.order(*range(6))
    little = wire.order(10, 11, session=1)
    assert list(much.fetches) == [l2_chunk(number).key for number in range(4)], "its last chunks made way"
    assert len(wire.fetches.add(little, [l2_chunk(12), l2_chunk(13)])) == 1, "until both have as much"
    wire.until_running(0, 10)


def test_a_chunk_larger_than_the_limit_comes_alone(wire: Wire) -> None:
    order = wire.fetches.order(None, ("t", b""))
    assert wire.fetches.add(order, [l2_chunk(1, 10 * MAX_BYTES)]) == []
    assert len(wire.fetches.add(order, [l2_chunk(2)])) == 1


def test_what_lies_ahead_is_shared_with_others(wire: Wire) -> None:
    wire.order(1, 2, 3, session=1)
    wire.order(4, session=2)
    assert wire.fetches.ahead(("t", bytes([3])), 20) == 20 + 10
    assert wire.fetches.ahead(("t", bytes([1])), 20) == 30 + 10


def test_writes_give_way_while_a_lookup_waits(wire: Wire) -> None:
    wire.fetches.wait_quiet(30.0)
    order = wire.order(1)
    begun = time.monotonic()
    wire.fetches.wait_quiet(0.05)
    assert time.monotonic() - begun >= 0.05
    wire.fetches.keep(order)
    wire.fetches.wait_quiet(30.0)


def test_a_transfer_that_raises_is_a_fetch_that_failed() -> None:
    def fail(chunks: Sequence[L2Chunk], wanted: Callable[[L2Chunk], bool]) -> list[Chunk | None]:
        raise RuntimeError(f"{chunks} {wanted}")

    fetches = Fetches(fail, lambda _: None, Speed(1), threads=1, max_bytes=100)
    fetches.start()
    order = fetches.order(None, ("t", b""))
    fetches.add(order, [l2_chunk(1), l2_chunk(2)])
    until(lambda: fetches.wait(order, 1, 0.1) == 2)
    assert not any(fetches.outcomes(order).values())
    fetches.drop(order)
    fetches.close()


# The model.


@dataclass
class ModelOrder:
    flow: Flow
    waiting: bool = True
    wanted: list[int] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    ended: dict[int, bool] = field(default_factory=dict)
    landed: int = 0


class Model:
    """Everything worked out anew at each step."""

    def __init__(self) -> None:
        self.orders: list[ModelOrder] = []
        self.served: dict[Flow, float] = {}
        self.running: list[int] = []
        self.held: dict[int, set[int]] = {}

    def active(self) -> set[int]:
        """Wanted or running, and not ended."""
        return {number for order in self.orders for number in order.wanted if number not in order.ended} | set(
            self.running
        )

    def new(self, flow: Flow) -> ModelOrder:
        order = ModelOrder(flow)
        self.orders.append(order)
        self.served.setdefault(flow, min(self.served.values(), default=0.0))
        return order

    def add(self, order: ModelOrder, numbers: list[int]) -> list[int]:
        refused = []
        for number in numbers:
            if number in order.wanted:
                continue
            if number not in self.active() and not self.make_room(order.flow):
                refused.append(number)
                continue
            order.wanted.append(number)
            order.queue.append(number)
        self.start()
        return refused

    def make_room(self, flow: Flow) -> bool:
        while self.active() and 10 * len(self.active()) + 10 > MAX_BYTES:
            if not self.drop_kept() and not self.drop_from_largest(flow):
                return False
        return True

    def drop_kept(self) -> bool:
        for order in self.orders:
            if not order.waiting and order.queue:
                order.wanted = [
                    number for number in order.wanted if number in self.running or number not in order.queue
                ]
                order.queue = []
                self.tidy()
                return True
        return False

    def drop_from_largest(self, flow: Flow) -> bool:
        held: dict[Flow, int] = {}
        for number in self.active():
            users = [order for order in self.orders if number in order.wanted and number not in order.ended]
            for user in {order.flow for order in users if order.waiting or number in self.running}:
                held[user] = held.get(user, 0) + 10
        most = max(held.values(), default=0)
        if most <= held.get(flow, 0) + 10:
            return False
        for order in [order for order in reversed(self.orders) if order.waiting and held.get(order.flow) == most]:
            for number in reversed(order.queue):
                users = [other for other in self.orders if number in other.wanted and number not in other.ended]
                if number not in self.running and len(users) == 1:
                    order.wanted.remove(number)
                    order.queue.remove(number)
                    return True
        return False

    def start(self) -> None:
        while len(self.running) < STREAMS and (pair := self.next()) is not None:
            order, number = pair
            self.running.append(number)
            self.served[order.flow] += 10

    def next(self) -> tuple[ModelOrder, int] | None:
        for order in sorted(self.orders, key=lambda order: (not order.waiting, self.served[order.flow])):
            pending = [number for number in order.queue if number not in self.running and number not in order.ended]
            own = sum(number in self.running and number not in order.ended for number in order.wanted)
            if pending and own <= order.landed:
                return order, pending[0]
        return None

    def end(self, number: int, landed: bool) -> None:
        self.running.remove(number)
        for order in self.orders:
            if number in order.wanted and number not in order.ended:
                order.ended[number] = landed
                order.landed += landed
                order.queue = [other for other in order.queue if other != number]
                if not order.waiting:
                    order.wanted.remove(number)
                    del order.ended[number]
        self.tidy()
        self.start()

    def close(self, order: ModelOrder, *, keep: bool) -> None:
        order.waiting = False
        order.wanted = [number for number in order.wanted if keep and number not in order.ended]
        order.queue = [number for number in order.queue if number in order.wanted]
        order.ended = {}
        self.tidy()
        self.start()

    def tidy(self) -> None:
        self.orders = [order for order in self.orders if order.waiting or order.wanted]
        flows = {order.flow for order in self.orders}
        self.served = {flow: served for flow, served in self.served.items() if flow in flows}


class FetchingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire()
        self.model = Model()
        self.orders: list[tuple[Order, ModelOrder]] = []

    def teardown(self) -> None:
        for order, _ in self.orders:
            self.wire.fetches.drop(order)

        def ended() -> bool:
            for number in list(self.wire.running):
                self.wire.end(number)
            return self.wire.fetches.wanted_bytes == 0

        until(ended, _SECONDS)
        until(lambda: len(self.wire.released) == len(self.wire.landed))
        assert sorted(map(id, self.wire.released)) == sorted(id(landed) for _, landed in self.wire.landed)
        self.wire.close()

    @rule(session=st.integers(0, 2), numbers=st.lists(st.integers(0, 11), max_size=6, unique=True))
    def ask(self, session: int, numbers: list[int]) -> None:
        flow = ("t", bytes([session]))
        self.orders.append((self.wire.fetches.order(None, flow), self.model.new(flow)))
        self.add(len(self.orders) - 1, numbers)

    @precondition(lambda self: self.orders)
    @rule(index=st.integers(0, 20), numbers=st.lists(st.integers(0, 11), max_size=3, unique=True))
    def add(self, index: int, numbers: list[int]) -> None:
        order, model = self.orders[index % len(self.orders)]
        refused = self.wire.fetches.add(order, [l2_chunk(number) for number in numbers])
        assert [number_of(chunk) for chunk in refused] == self.model.add(model, numbers)

    @precondition(lambda self: self.wire.running)
    @rule(index=st.integers(0, 20), landed=st.booleans())
    def end(self, index: int, landed: bool) -> None:
        number = sorted(self.model.running)[index % len(self.model.running)]
        self.wire.end(number, landed)
        self.model.end(number, landed)

    @precondition(lambda self: self.orders)
    @rule(index=st.integers(0, 20), keep=st.booleans())
    def close(self, index: int, keep: bool) -> None:
        order, model = self.orders.pop(index % len(self.orders))
        (self.wire.fetches.keep if keep else self.wire.fetches.drop)(order)
        self.model.close(model, keep=keep)

    @invariant()
    def runs_what_the_model_runs(self) -> None:
        self.wire.until_running(*self.model.running)
        until(lambda: self.wire.fetches.wanted_bytes == 10 * len(self.model.active()))
        for order, model in self.orders:
            until(
                lambda order=order, model=model: (
                    {
                        int.from_bytes(key.chain_hash, "big"): landed
                        for key, landed in self.wire.fetches.outcomes(order).items()
                    }
                    == model.ended
                )
            )

    @invariant()
    def holds_what_somebody_waits_for(self) -> None:
        held = len(self.wire.landed) - len(self.wire.released)
        assert held <= sum(sum(model.ended.values()) for _, model in self.orders)


FetchingMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_the_scheduler_does_what_the_model_does = FetchingMachine.TestCase

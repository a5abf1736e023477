"""Everything of the cuda device but CUDA itself: tables, batches, lanes, on a GPU that runs as late as it may."""

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_round_trip as round_trip
from engine_memory import DTYPES, EngineMemory, make_rope, model_space, same_bits
from fake_gpu import FakeDevice, FakeEvent, FakeGpu, FakeStream
from hypothesis import given, settings
from hypothesis import strategies as st
from test_round_trip import Case, cases

from kvblend.layouts import KvShape
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of
from services.common.errors import KvblendError
from services.gpu_agent.devices import cpu
from services.gpu_agent.devices.base import Hung, Piece, Steps, Stopped
from services.gpu_agent.devices.cuda.batches import MAX_FRAGMENTS, MAX_TOKENS, TILE, Batches, pack, table_bytes
from services.gpu_agent.devices.cuda.driver import CudaError
from services.gpu_agent.engines.layouts import GroupShape, check_layout
from services.gpu_agent.engines.rope import RopeSpec, rope_spec

SEEDS = count()
NEOX = make_rope(common.ROPE_STYLE_NEOX, 8)


@contextmanager
def fake_devices(slot_bytes: int) -> Iterator[None]:
    """The round trips of test_round_trip.py run on the cuda device's parts."""
    with mock.patch.object(cpu, "CpuDevice", side_effect=lambda *_: FakeDevice(next(SEEDS), slot_bytes)):
        yield


def row_bytes(case: Case) -> int:
    return case.heads * case.head_size * DTYPES[case.dtype].itemsize


@given(cases(), st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_any_text_arrives_anywhere_in_any_arrangement(case: Case, rows: int) -> None:
    with fake_devices(rows * row_bytes(case)):
        round_trip.check_round_trip(case)


@pytest.mark.parametrize("rope", sorted(round_trip.ROPES))
def test_every_rope_through_small_slots(rope: str) -> None:
    case = Case(rope=rope, dtype=common.DTYPE_BFLOAT16)
    with fake_devices(5 * row_bytes(case)):
        round_trip.check_round_trip(case)


def check_often(case: Case) -> None:
    for _ in range(20):
        round_trip.check_round_trip(case)


def no_wait(self: FakeStream, event: FakeEvent) -> None:
    pass


def done_too_early(self: FakeEvent) -> bool:
    self.gpu.step()
    return True


@pytest.mark.parametrize(
    ("broken", "name", "replacement"), [(FakeStream, "wait_event", no_wait), (FakeEvent, "query", done_too_early)]
)
def test_a_missing_wait_is_noticed(broken: type, name: str, replacement: Any) -> None:
    case = Case(tokens=40, moves=((0, 40, 9),))
    with fake_devices(8 * row_bytes(case)), mock.patch.object(broken, name, replacement):
        # Whether it shows depends on the order that the GPU chooses.
        with pytest.raises((AssertionError, RuntimeError)):
            check_often(case)


class Transfer:
    """One engine's memory opened by a fake device, and an object of its first 64 tokens."""

    def __init__(self, stack: ExitStack, hang_seconds: float = 60.0) -> None:
        shape = KvShape(2, 2, 8, 16, 4, common.DTYPE_FLOAT32)
        self.engine = EngineMemory("paged_nhd", shape, next(SEEDS))
        stack.callback(self.engine.close)
        layout = check_layout(self.engine.layout, self.engine.handles, model_space(shape, NEOX), common.Rank())
        self.device = FakeDevice(next(SEEDS), 1024, hang_seconds)
        self.memory = self.device.open(self.engine.handles, layout)
        stack.callback(self.memory.close)
        self.slots = np.random.default_rng(1).permutation(64).astype(np.int64)
        self.block = np.zeros(64 * layout.groups[0].token_bytes, np.uint8)
        self.piece = Piece(self.block, 64, 0, self.slots, checked=True)

    def gather(self, watch: Any = lambda: None) -> None:
        self.memory.gather(0, [self.piece], watch)

    def arrived(self) -> bool:
        stored = self.block.view("<f4").reshape(2, 2, 64, 2, 8)
        return bool((stored == self.engine.read(self.slots.tolist()).numpy()).all())


@pytest.fixture
def transfer() -> Iterator[Transfer]:
    with ExitStack() as stack:
        yield Transfer(stack)


def test_a_stopped_transfer_has_nothing_in_flight(transfer: Transfer) -> None:
    for patience in range(12):
        looks = iter(range(patience))

        def watch(looks: Iterator[int] = looks) -> None:
            if next(looks, None) is None:
                raise Stopped(common.REASON_DEADLINE)

        with pytest.raises(Stopped):
            transfer.gather(watch)
        assert not transfer.device.gpu.in_flight
    transfer.gather()
    assert transfer.arrived()


def test_a_refused_copy_leaves_nothing_in_flight(transfer: Transfer) -> None:
    right, calls = transfer.device.gpu.to_host, count()

    def refuse(*arguments: Any) -> None:
        if next(calls) == 3:
            raise CudaError("cuMemcpyDtoHAsync_v2", 1, "CUDA_ERROR_INVALID_VALUE")
        right(*arguments)

    with mock.patch.object(transfer.device.gpu, "to_host", refuse), pytest.raises(CudaError, match="INVALID_VALUE"):
        transfer.gather()
    assert not transfer.device.gpu.in_flight
    transfer.gather()
    assert transfer.arrived()


def test_a_copy_that_hangs_is_given_up_and_shuts_its_lane_until_it_ends() -> None:
    with ExitStack() as stack:
        transfer = Transfer(stack, hang_seconds=0.05)
        transfer.device.gpu.stuck = True
        with pytest.raises(Hung) as caught:
            transfer.gather()
        ended, held = threading.Event(), ExitStack()
        held.callback(ended.set)
        caught.value.keep(held)
        with pytest.raises(Stopped):
            transfer.gather(_give_up)
        assert not ended.is_set()
        transfer.device.gpu.stuck = False
        assert ended.wait(10)
        transfer.gather()
        assert transfer.arrived()


def test_a_kernel_that_hangs_while_it_is_prepared_is_said_and_shuts_its_lane_until_it_ends() -> None:
    with ExitStack() as stack:
        transfer = Transfer(stack, hang_seconds=0.05)
        transfer.device.gpu.stuck = True
        for why in ("does not end", "hold the GPU"):
            with pytest.raises(KvblendError, match=why):
                transfer.memory.prepare([rope_spec(NEOX)])
        transfer.device.gpu.stuck = False
        give_up_at = time.monotonic() + 10

        def watch() -> None:
            assert time.monotonic() < give_up_at, "the lane stays shut"

        with transfer.device.inbound._turn.taken(watch):
            pass
        transfer.memory.prepare([rope_spec(NEOX)])
        transfer.gather()
        assert transfer.arrived()


@pytest.mark.parametrize("way", ["to_device", "to_host"])
def test_what_is_damaged_on_the_link_does_not_fit_its_checksum(transfer: Transfer, way: str) -> None:
    transfer.gather()
    gpu, right = transfer.device.gpu, FakeGpu._copy

    def damage(self: FakeGpu, target: int, *rest: int) -> None:
        right(self, target, *rest)
        if rest[-1] * rest[-2] >= 1024:
            ctypes.memset(target + 100, 0xFF, 1)

    with mock.patch.object(FakeGpu, "_copy", damage):
        if way == "to_host":
            (found,) = transfer.memory.gather(0, [transfer.piece], lambda: None)
        else:
            (found,) = transfer.memory.scatter(0, [transfer.piece], rope_spec(NEOX), lambda: None)
    assert gpu.in_flight == 0
    assert found is not None
    assert found != checksum_of(transfer.block.data)
    (found,) = transfer.memory.scatter(0, [transfer.piece], rope_spec(NEOX), lambda: None)
    assert found == checksum_of(transfer.block.data)


def _give_up() -> None:
    raise Stopped(common.REASON_DEADLINE)


def test_both_directions_run_side_by_side(transfer: Transfer) -> None:
    """A store that cannot go on does not stop a retrieve."""
    transfer.gather()
    original = transfer.engine.read(transfer.slots.tolist())
    with transfer.device.outbound._turn.taken(_give_up):
        transfer.engine.write(transfer.slots.tolist(), original * 0)
        transfer.memory.scatter(0, [transfer.piece], rope_spec(NEOX), lambda: None)
    assert same_bits(transfer.engine.read(transfer.slots.tolist()), original)


def test_only_wanted_tokens_cross_the_link(transfer: Transfer) -> None:
    transfer.gather()
    before = transfer.device.gpu.bytes_copied
    few = Piece(transfer.block, 64, 17, transfer.slots[17:20])
    transfer.memory.scatter(0, [few], rope_spec(NEOX), lambda: None)
    kv = 3 * 2 * 2 * 2 * 8 * 4
    assert kv <= transfer.device.gpu.bytes_copied - before < kv + 1024


@given(st.lists(st.tuples(st.integers(1, 70_000), st.integers(-3, 3)), min_size=1, max_size=3), st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_batches_are_bounded(sizes: list[tuple[int, int]], tile_tokens: int) -> None:
    """By the slot and by the tables' buffers; nothing is left out and nothing is moved twice."""
    shape, slot_bytes = GroupShape(2, 2, 1, 4, 2), 1 << 16
    rope = RopeSpec(common.ROPE_STYLE_NEOX, 0, np.array([1.0, 0.1]))
    block = np.zeros(1, np.uint8)
    pieces = [Piece(block, tokens, 0, np.arange(tokens), delta) for tokens, delta in sizes]
    moved = 0
    for batch in Batches(shape, rope, slot_bytes, tile_tokens, pieces).of():
        tables = batch.tables
        assert len(tables.slots) <= MAX_TOKENS
        assert len(batch.fragments) <= MAX_FRAGMENTS
        ends = [fragment.start + fragment.nbytes for fragment in batch.fragments]
        assert ends[-1] <= slot_bytes
        assert [fragment.start for fragment in batch.fragments] == [0, *ends[:-1]]
        buffer = np.zeros(table_bytes(len(rope.inv_freq)), np.uint8)
        assert pack(batch, buffer).nbytes <= len(buffer)
        assert int((tables.tiles[:, 3] * tables.tiles[:, 6]).sum()) * 8 == ends[-1]
        moved += ends[-1]
    assert moved == sum(tokens for tokens, _ in sizes) * shape.token_bytes


def test_many_small_pieces_fit_as_well() -> None:
    shape = GroupShape(1, 2, 1, 4, 2)
    rope = RopeSpec(common.ROPE_STYLE_NEOX, 0, np.linspace(1, 0.1, 256))
    block = np.zeros(64, np.uint8)
    pieces = [Piece(block, 4, 1, np.array([number]), number) for number in range(3000)]
    batches = list(Batches(shape, rope, 1 << 20, 16, pieces).of())
    assert len(batches) == 3
    for batch in batches:
        pack(batch, np.zeros(table_bytes(256), np.uint8))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_layers_at_a_time_are_the_same_work_as_all_at_once(
    layers: int, steps: int, slot_rows: int, sizes: list[int]
) -> None:
    """Tables that several steps share still name every row of every layer, once, with its own words."""
    shape = GroupShape(layers, 2, 1, 4, 2)
    rope = RopeSpec(common.ROPE_STYLE_NEOX, 0, np.array([1.0, 0.1]))
    firsts = np.cumsum([0, *sizes])
    pieces = [
        Piece(np.zeros(size * shape.token_bytes, np.uint8), size, 0, np.arange(size) + first, size, checked=True)
        for size, first in zip(sizes, firsts, strict=False)
    ]

    def rows(some: list[range | None]) -> list[tuple[int, int, int]]:
        """(plane, slot, number of its first word) of each row that is moved."""
        cut, found = Batches(shape, rope, 8 * slot_rows, 2, pieces), []
        for layer_range in some:
            for batch in cut.of(layer_range):
                for tile in batch.tables.tiles.tolist():
                    fact = dict(zip(TILE, tile, strict=True))
                    for plane in range(
                        batch.base + fact["first_plane"], batch.base + fact["first_plane"] + fact["planes"]
                    ):
                        word = fact["first_word"] + (plane - fact["first_plane"]) * fact["plane_words"]
                        slots = batch.tables.slots[fact["row"] : fact["row"] + fact["tokens"]].tolist()
                        found += [(plane, slot, word + number) for number, slot in enumerate(slots)]
        return sorted(found)

    cuts = Steps(steps, 0, 1)
    whole = rows([None])
    assert len(whole) == len(set(whole)) == 2 * layers * sum(sizes)
    assert rows([cuts.layers(step, layers) for step in range(steps)]) == whole

"""KV that the GPU has yet to write when the agent is asked: engine and agent in any place, order by semaphores."""

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count

import numpy as np
import pytest
import torch
from agent_rig import INSTANCE, CallFailed, blocks, outcomes, ranges, slots_of
from containers import PLACES
from engine_memory import make_rope
from gpu_rig import GpuRig, GpuStack, gpu_stack, needs_gpu

from kvblend.cuda_memory import cuda_event
from kvblend.cuda_semaphores import CudaSemaphores
from kvblend.layouts import KvShape
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of

pytestmark = needs_gpu

SHAPE = KvShape(3, 2, 16, 24, 4, common.DTYPE_BFLOAT16)
ROPE = make_rope(common.ROPE_STYLE_NEOX, 16)
ALL = blocks(*range(24))
SLOTS = slots_of(ALL, range(64))
TEXTS = count(1)
EARLIER, LATER = 1.0, 3.0
# Cycles of the GPU's clock: half a second or more, where a call takes some milliseconds.
LONG = 1_000_000_000


@pytest.fixture(scope="module", params=PLACES)
def stack(request: pytest.FixtureRequest) -> Iterator[GpuStack]:
    with gpu_stack(64, "--staging-mib", "1", matcher=False, place=request.param) as running:
        yield running


class OrderedRig(GpuRig):
    """With semaphores, the last of which the test itself sets."""

    def __init__(self, stack: GpuStack, instance: str = INSTANCE) -> None:
        super().__init__(stack.target("agent"), "paged_nhd", SHAPE, ROPE, next(TEXTS))
        self.words = torch.full((4,), -1, dtype=torch.int64, device="cuda")
        self.semaphores = CudaSemaphores(self.words.data_ptr(), 4, steps=1)
        self.register(instance_id=instance, semaphores=self.semaphores.handle)
        self.text = [1000 * next(TEXTS) + token for token in range(64)]
        # Their first use loads kernels, which waits for everything else.
        self.fill(EARLIER)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()

    def fill(self, value: float) -> None:
        for tensor in self.engine.tensors:
            tensor.fill_(value)

    def fill_later(self, value: float) -> None:
        """On the current stream, which is far from done when this returns."""
        torch.cuda._sleep(LONG)
        self.fill(value)

    def event(self) -> pb.Event:
        return self.semaphores.event(torch.cuda.current_stream().cuda_stream)

    def proves(self, value: float, tokens: int, event: pb.Event) -> bool:
        """Whether the agent finds this value everywhere in the first slots."""
        pattern = torch.full((3, 2, tokens, 2, 16), value, dtype=torch.bfloat16).view(torch.uint8).numpy()
        expected = np.array([checksum_of(pattern.tobytes())], "<u8").tobytes()
        request = pb.ProveLayoutRequest(
            instance_id=INSTANCE, slots=ALL, tokens=tokens, event=event, expected_checksums=expected
        )
        return bool(self.call("ProveLayout", request).proven)

    def stored(self) -> torch.Tensor:
        """KV of the text as the store has it."""
        torch.cuda.synchronize()
        self.fill(0.0)
        torch.cuda.synchronize()
        name = f"r{next(TEXTS)}"
        assert self.lookup([*self.text, 1], name).prefix_tokens == 64
        assert ranges(self.retrieve(ALL, name).written) == [(0, 64)]
        return self.engine.read(SLOTS)


@pytest.fixture
def rig(stack: GpuStack) -> Iterator[OrderedRig]:
    with closing(OrderedRig(stack)) as made:
        yield made


def store(rig: OrderedRig, event: pb.Event) -> None:
    assert {name for name, _ in outcomes(rig.store(rig.text, ALL, event=event))} == {"STORED"}


@pytest.mark.parametrize("which", ["the default stream", "a stream of its own"])
def test_case_19_a_store_waits_for_the_engine_s_kernels(rig: OrderedRig, which: str) -> None:
    stream = torch.cuda.Stream() if which == "a stream of its own" else torch.cuda.default_stream()
    with torch.cuda.stream(stream):
        rig.fill_later(LATER)
        event = rig.event()
        assert not stream.query()
        store(rig, event)
        assert stream.query()
    assert (rig.stored() == LATER).all()


def test_without_the_wait_the_bytes_would_be_the_earlier_ones(rig: OrderedRig) -> None:
    """So the test above sees whether there is one."""
    rig.fill_later(LATER)
    store(rig, pb.Event(kind=pb.EVENT_KIND_COMPLETE))
    assert not torch.cuda.current_stream().query(), "the GPU was done before the store: nothing was tested"
    assert (rig.stored() == EARLIER).all()


def test_a_retrieve_waits_until_the_engine_has_left_its_slots(rig: OrderedRig) -> None:
    rig.fill(LATER)
    store(rig, rig.event())
    assert rig.lookup([*rig.text, 1], "slots").prefix_tokens == 64
    rig.fill_later(EARLIER)
    assert ranges(rig.retrieve(ALL, "slots", event=rig.event()).written) == [(0, 64)]
    torch.cuda.synchronize()
    assert (rig.engine.read(SLOTS) == LATER).all()


def test_a_proof_waits_for_its_pattern(rig: OrderedRig) -> None:
    rig.fill_later(LATER)
    assert rig.proves(LATER, 64, rig.event())


def test_case_19_what_kernels_wrote_is_read_a_thousand_times(rig: OrderedRig) -> None:
    for number in range(1000):
        # Whole numbers up to 256 are exact in bf16.
        value = float(1 + number % 256)
        torch.cuda._sleep(1_000_000)
        rig.fill(value)
        assert rig.proves(value, 16, rig.event()), f"run {number}: it was read too early"


def test_a_call_may_be_made_before_its_semaphore_is_written_at_all(rig: OrderedRig) -> None:
    event = pb.Event(kind=pb.EVENT_KIND_SEMAPHORE, semaphore=3, value=5)
    caller = threading.Thread(target=lambda: store(rig, event))
    caller.start()
    for value in (3, 4):
        rig.words[3] = value
        torch.cuda.synchronize()
        caller.join(0.1)
        assert caller.is_alive(), "it did not wait"
    rig.fill(LATER)
    rig.words[3] = 5
    caller.join(10)
    assert not caller.is_alive()
    assert (rig.stored() == LATER).all()


def test_case_62_a_semaphore_that_never_comes_holds_nobody_else_up(stack: GpuStack, rig: OrderedRig) -> None:
    """And nothing is left of the call: the instance can be closed at once, and store the text later."""
    never = pb.Event(kind=pb.EVENT_KIND_SEMAPHORE, semaphore=3, value=9)
    request = pb.StoreKvRequest(
        instance_id=INSTANCE, kind=1, tokens=np.array(rig.text, "<u4").tobytes(), slots=ALL, event=never
    )
    request.request.request_id = "never"
    answers: list[str] = []

    def wait() -> None:
        with pytest.raises(CallFailed) as caught:
            rig.call("StoreKv", request, timeout=2.0)
        answers.append(str(caught.value))

    caller = threading.Thread(target=wait)
    with closing(OrderedRig(stack, "other")) as other:
        caller.start()
        call = other.store(other.text, ALL, instance_id="other", event=other.event())
        assert {name for name, _ in outcomes(call)} == {"STORED"}
        assert other.lookup([*other.text, 1], "other", instance_id="other").prefix_tokens == 64
        assert not other.retrieve(ALL, "other", instance_id="other", event=other.event()).failed
        assert caller.is_alive(), "the others had to wait for it"
        caller.join(10)
        other.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id="other"))
    assert "DEADLINE_EXCEEDED" in answers[0]
    assert stack.stats().reserved_objects == 0
    assert rig.lookup([*rig.text, 1], "never").prefix_tokens == 0
    rig.register(semaphores=rig.semaphores.handle)
    store(rig, rig.event())
    assert rig.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id=INSTANCE)).existed


def test_an_event_by_its_handle_is_waited_for_as_well(stack: GpuStack, rig: OrderedRig) -> None:
    if not stack.shares_shm:
        pytest.skip("test_gpu_containers.py has what is said where /dev/shm is not shared")
    event = torch.cuda.Event(interprocess=True)
    event.record()
    torch.cuda.synchronize()
    rig.fill_later(LATER)
    event.record()
    store(rig, cuda_event(event.ipc_handle()))
    assert (rig.stored() == LATER).all()


def test_every_pattern_is_proven_and_what_each_kind_of_event_costs(stack: GpuStack, rig: OrderedRig) -> None:
    """The smallest call that reads KV, right behind the kernels that write it."""
    handle = torch.cuda.Event(interprocess=True)

    def complete() -> pb.Event:
        torch.cuda.synchronize()
        return pb.Event(kind=pb.EVENT_KIND_COMPLETE)

    def recorded() -> pb.Event:
        handle.record()
        return cuda_event(handle.ipc_handle())

    kinds: dict[str, Callable[[], pb.Event]] = {"none": complete, "semaphore": rig.event}
    if stack.shares_shm:
        kinds["event handle"] = recorded
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(60):
        for number, (name, make) in enumerate(kinds.items()):
            # Whole numbers up to 256 are exact in bf16.
            value = float(1 + turn + 60 * number)
            began = time.perf_counter()
            rig.fill(value)
            assert rig.proves(value, 1, make()), f"{name}: it was read too early"
            seconds[name].append(time.perf_counter() - began)
    medians = {name: round(1000 * statistics.median(times[10:]), 3) for name, times in seconds.items()}
    print(f"ms from writing to the answer, {'shared' if stack.shares_shm else 'own'} /dev/shm:", medians)

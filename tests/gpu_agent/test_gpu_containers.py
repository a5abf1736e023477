"""What is refused between engine and agent in containers of their own. What works there: test_gpu_round_trip.py."""

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from agent_rig import CallFailed, blocks, outcomes, slots_of
from containers import needs_root
from engine_memory import make_rope, same_bits
from gpu_rig import GpuRig, GpuStack, gpu_stack, needs_gpu

from kvblend.cuda_memory import cuda_event
from kvblend.layouts import KvShape
from kvblend.v1 import common_pb2 as common

pytestmark = [*needs_gpu, needs_root]

SHAPE = KvShape(3, 2, 16, 24, 4, common.DTYPE_BFLOAT16)
ROPE = make_rope(common.ROPE_STYLE_NEOX, 16)
STORED, OTHER = blocks(*range(24)), blocks(*range(23, -1, -1))


@pytest.fixture(scope="module")
def stack() -> Iterator[GpuStack]:
    with gpu_stack(64, "--staging-mib", "1", matcher=False, place="container") as running:
        yield running


def check_round_trip(stack: GpuStack, text: list[int]) -> None:
    rig = stack.gpu_rig("paged_nhd", SHAPE, ROPE, 1)
    original = rig.engine.read(slots_of(STORED, range(len(text))))
    assert {name for name, _ in outcomes(rig.store(text, STORED))} == {"STORED"}
    assert rig.lookup([*text, 1], f"r{text[0]}").prefix_tokens == len(text)
    assert not rig.retrieve(OTHER, f"r{text[0]}").failed
    assert same_bits(rig.engine.read(slots_of(OTHER, range(len(text)))), original)


def test_case_15_containers_that_share_no_dev_shm_and_no_ipc_namespace(stack: GpuStack) -> None:
    check_round_trip(stack, list(range(100, 169)))


def refused(stack: GpuStack, change: str, value: object) -> str:
    rig = GpuRig(stack.target("agent"), "paged_nhd", SHAPE, ROPE, 2)
    with closing(rig):
        handles = rig.engine.handles
        setattr(handles[0], change, value)
        with pytest.raises(CallFailed) as caught:
            rig.register(handles=handles)
    return str(caught.value)


def test_two_containers_whose_process_is_number_1_are_told_what_to_do(stack: GpuStack) -> None:
    assert "docker run --init" in refused(stack, "exporter_pid", 1)


def test_memory_that_cannot_be_opened_is_refused(stack: GpuStack) -> None:
    assert "cuIpcOpenMemHandle" in refused(stack, "handle", b"h" * 64)
    assert "HANDLE_OUT_OF_BOUNDS" in refused(stack, "bytes", 8 << 20)
    assert "this agent serves GPU-" in refused(stack, "device_uuid", "GPU-0")
    # And it goes on.
    check_round_trip(stack, list(range(200, 269)))


def test_an_event_needs_a_shared_dev_shm_and_says_so(stack: GpuStack) -> None:
    rig = stack.gpu_rig("paged_nhd", SHAPE, ROPE, 3)
    event = torch.cuda.Event(interprocess=True)
    event.record()
    with pytest.raises(CallFailed, match=r"/dev/shm.*a semaphore does not"):
        rig.store(list(range(64)), STORED, event=cuda_event(event.ipc_handle()))
    # And it goes on.
    check_round_trip(stack, list(range(300, 369)))

"""What a registration's probes refuse, on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from gpu_rig import GpuRig, GpuStack, gpu_stack, needs_gpu
from misdeclarations import ARRANGEMENT, ROPE, Request, check_refused, of_each_dtype, of_each_kind, shape_of

from kvblend.v1 import common_pb2 as common

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def stack() -> Iterator[GpuStack]:
    with gpu_stack(64, "--staging-mib", "1", matcher=False) as running:
        yield running


@of_each_kind
@of_each_dtype
def test_an_engine_that_is_not_what_it_says_is_refused(
    stack: GpuStack, fault: Callable[[Request], None], true_dtype: common.Dtype
) -> None:
    with closing(GpuRig(stack.target("agent"), ARRANGEMENT, shape_of(true_dtype), ROPE, 3)) as rig:
        check_refused(rig, fault)

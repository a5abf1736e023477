"""What a registration's probes refuse, on the cpu device."""

from collections.abc import Callable
from contextlib import closing

from agent_rig import Rig
from engine_memory import EngineMemory, model_space
from misdeclarations import ARRANGEMENT, ROPE, Request, check_refused, of_each_dtype, of_each_kind, shape_of

from kvblend.v1 import common_pb2 as common


@of_each_kind
@of_each_dtype
def test_an_engine_that_is_not_what_it_says_is_refused(
    rig: Rig, fault: Callable[[Request], None], true_dtype: common.Dtype
) -> None:
    shape = shape_of(true_dtype)
    with closing(EngineMemory(ARRANGEMENT, shape, seed=3)) as memory:
        rig.engine.close()
        rig.engine, rig.space = memory, model_space(shape, ROPE)
        check_refused(rig, fault)

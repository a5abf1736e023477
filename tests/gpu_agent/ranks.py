"""One engine of two ranks, each with half of the heads on a device and an agent of its own, and one store for both."""

import numpy as np
import torch
from agent_rig import Rig, blocks, outcomes, ranges, slots_of
from engine_memory import rotate_slowly, rotated_elements, same_bits
from processes import Stack

from kvblend.results import Segments
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store

RANKS = 2
STORED, OTHER = blocks(*range(24)), blocks(*range(23, -1, -1))
# K moved in fp32, or in bf16.
TOLERANCE = {4: 1e-5, 2: 2e-2}


class Engine:
    """`rigs`, one a rank; nothing is registered yet."""

    def __init__(self, stack: Stack, rigs: list[Rig]) -> None:
        self._stack = stack
        self._rigs = rigs
        for rank, rig in enumerate(rigs):
            rig.space.tensor_parallel = RANKS
            rig.space.groups[0].kv_heads = RANKS * rig.engine.shape.heads
            rig.register(rank=common.Rank(tensor=rank))
            rig.hold_session()
            rig.prove_rope()

    def prefix(self, prompt: list[int], name: str) -> list[int]:
        """What each rank is told."""
        return [rig.lookup(prompt, name).prefix_tokens for rig in self._rigs]

    def check_halves(self) -> None:
        """A chunk is there when both ranks have stored their half of it, and for neither before."""
        text = list(range(1000, 1064))
        assert {name for name, _ in outcomes(self._rigs[0].store(text, STORED))} == {"STORED"}
        assert self.prefix([*text, 1], "half") == [0, 0]
        assert {name for name, _ in outcomes(self._rigs[1].store(text[:32], STORED))} == {"STORED"}
        assert self.prefix([*text, 1], "some") == [32, 32]
        self._rigs[1].store(text, STORED)
        assert self.prefix([*text, 1], "whole") == [64, 64]
        for name in ("half", "some", "whole"):
            self._end(name)

    def check_prefix(self) -> None:
        """Bit by bit, for each rank its own half."""
        text = np.random.default_rng(3).integers(0, 50_000, 69).tolist()
        originals = [rig.engine.read(slots_of(STORED, range(69))) for rig in self._rigs]
        assert not same_bits(*originals)
        for rig in self._rigs:
            assert {name for name, _ in outcomes(rig.store(text, STORED))} == {"STORED"}
        assert self.prefix([*text, 1], "prefix") == [69, 69]
        for rig, original in zip(self._rigs, originals, strict=True):
            assert ranges(rig.retrieve(OTHER, "prefix").written) == [(0, 69)]
            assert same_bits(rig.engine.read(slots_of(OTHER, range(69))), original)
            rig.engine.write(slots_of(STORED, range(69)), original)
        self._end("prefix")

    def check_segments(self) -> None:
        """Both ranks are told of the same segments, and each moves its own heads' K."""
        text = np.random.default_rng(4).integers(0, 50_000, 64).tolist()
        originals = [rig.engine.read(slots_of(STORED, range(64))) for rig in self._rigs]
        options = {"kind": store.STORE_KIND_DOCUMENT, "document": store.DocumentOptions(document="d")}
        answers = [rig.store(text, STORED, **options) for rig in self._rigs]
        prompt = [*range(60_000, 60_013), *text, 7]
        found = [rig.lookup(prompt, "moved", at_least=[answers[-1].position]) for rig in self._rigs]
        covered = [segments_of(answer) for answer in found]
        assert covered[0] == covered[1]
        assert sum(length for _, _, length in covered[0]) >= 48
        for rig, original in zip(self._rigs, originals, strict=True):
            assert not rig.retrieve(OTHER, "moved").failed
            for query, stored, length in covered[0]:
                kv = rig.engine.read(slots_of(OTHER, range(query, query + length)))
                check_moved(rig, kv, original[:, :, stored : stored + length], query - stored)
        self._end("moved")

    def check_nothing_is_left(self) -> None:
        stats = self._stack.stats
        self._rigs[0].wait_for(lambda: not any((stats().held_leases, stats().busy_leases, stats().reserved_objects)))

    def _end(self, name: str) -> None:
        for rig in self._rigs:
            rig.end(name)


def segments_of(answer: pb.LookupAnswer) -> list[tuple[int, int, int]]:
    return [(item.query_position, item.stored_position, item.length) for item in Segments(answer.segments)]


def check_moved(rig: Rig, found: torch.Tensor, original: torch.Tensor, delta: int) -> None:
    """V as it was; K by `delta` positions."""
    assert same_bits(found[:, 1], original[:, 1])
    rope = rig.space.groups[0].rope
    wanted = rotate_slowly(original[:, 0], rope, delta)
    moved = rotated_elements(rope)
    error = (found[:, 0].double() - wanted)[..., moved].abs().max() / wanted.abs().max()
    assert error < TOLERANCE[rig.engine.dtype.itemsize]

"""Moving K from one position to another: one rotation of the stored original, never of a rotated copy.

K made at position p and rotated by q - p is K made at q, as rotary embeddings are relative. A factor that
the engine's table puts on cos and sin is in the stored K already and is not applied again.

fp8 K is rotated as the number that its bits are, without its scale. A scale of the whole tensor or of a head is one
factor for both elements of every pair, and a rotation is linear: it commutes. It is the model's, not a token's: the
model space carries its digest. A scale for each block of elements would not commute, and one that is kept beside each
token would have to travel with it: the contract has no dtype and no plane for either, so they are refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.errors import KvblendError
from services.gpu_agent.engines.layouts import GroupShape

# Largest difference over the largest magnitude that an engine's own arithmetic explains: rounding of K, cos, sin and
# their products in the KV dtype at two positions (measured: 1.7e-4, 1.3e-3, 1.1e-2). A wrong frequency, style or
# width differs by about 1.
_TOLERANCE = {
    common.DTYPE_FLOAT32: 1e-3,
    common.DTYPE_FLOAT16: 4e-3,
    common.DTYPE_BFLOAT16: 1.5e-2,
    # A proof has K before it is quantised, as bf16 arithmetic makes it at worst.
    common.DTYPE_FLOAT8_E4M3: 1.5e-2,
    common.DTYPE_FLOAT8_E5M2: 1.5e-2,
}
# Engines compute angles in f32: half a unit in the last place at each of the two positions.
_ANGLE_ROUNDING = 2.0**-23
# Two positions must be this far apart, so that every fast pair turns.
_MIN_DISTANCE = 64
# A pair without energy would prove nothing about its frequency.
_MIN_ENERGY = 1e-3


@dataclass(frozen=True)
class RopeSpec:
    """How one layer group rotates K. `inv_freq` is [pairs] f64; without pairs K is not rotated."""

    style: common.RopeStyle
    offset: int
    inv_freq: npt.NDArray[np.float64]

    @property
    def relative(self) -> bool:
        """K can be moved to another position."""
        return self.style != common.ROPE_STYLE_NOT_RELATIVE

    @property
    def rotates(self) -> bool:
        return len(self.inv_freq) > 0

    def pairs(self) -> tuple[slice, slice]:
        """The two elements of each pair, as slices of a head."""
        size = 2 * len(self.inv_freq)
        first, end = self.offset, self.offset + size
        if self.style == common.ROPE_STYLE_GPTJ:
            return slice(first, end, 2), slice(first + 1, end, 2)
        return slice(first, first + size // 2), slice(first + size // 2, end)

    def tables(self, deltas: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """cos and sin of each delta's angles, [n, pairs] f32; angles in f64, as they may be thousands of turns."""
        angles = deltas[:, None].astype(np.float64) * self.inv_freq
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope_spec(rope: common.Rope) -> RopeSpec:
    """The spec of a validated model space's group."""
    rotates = rope.style in (common.ROPE_STYLE_NEOX, common.ROPE_STYLE_GPTJ)
    return RopeSpec(rope.style, rope.rotary_offset, np.frombuffer(rope.inv_freq if rotates else b"", "<f8"))


def check_ropes(declared: Sequence[common.Rope], space: common.ModelSpace) -> None:
    """Raises KvblendError ROPE_MISMATCH unless the engine names the ropes of its model space."""
    if len(declared) != len(space.groups):
        raise KvblendError("ROPE_MISMATCH", f"{len(declared)} ropes for {len(space.groups)} layer groups")
    for index, (rope, group) in enumerate(zip(declared, space.groups, strict=True)):
        if _normal(rope, group) != _normal(group.rope, group):
            raise KvblendError("ROPE_MISMATCH", f"the rope of layer group {index} is not what the model space declared")


def _normal(rope: common.Rope, group: common.LayerGroup) -> tuple[int, int, int, bytes, float]:
    size = rope.rotary_size or group.head_size
    return rope.style, size, rope.rotary_offset, rope.inv_freq, rope.magnitude or 1.0


def prove(proof: pb.RopeProof, rope: RopeSpec, shape: GroupShape, dtype: common.Dtype) -> float:
    """Largest difference, over the largest magnitude, of the engine's K at b and its K at a moved there.

    Raises:
        KvblendError: INVALID_ARGUMENT for a proof that can prove nothing, ROPE_MISMATCH for a wrong one.
    """
    key_a = _proof_key(proof.key_a, shape)
    key_b = _proof_key(proof.key_b, shape)
    delta = proof.position_b - proof.position_a
    if abs(delta) < _MIN_DISTANCE:
        raise KvblendError("INVALID_ARGUMENT", f"the proof's positions are less than {_MIN_DISTANCE} apart")
    largest = float(np.abs(key_b).max())
    if not np.isfinite(largest) or not np.isfinite(key_a).all() or _weakest(key_a, rope) <= _MIN_ENERGY * largest:
        raise KvblendError(
            "INVALID_ARGUMENT", "every rotated pair of the proof's K must differ from zero and be finite"
        )
    error = float(np.abs(_moved(key_a, rope, delta) - key_b).max()) / largest
    tolerance = _TOLERANCE[dtype] + max(proof.position_a, proof.position_b) * _ANGLE_ROUNDING
    if not error <= tolerance:
        raise KvblendError("ROPE_MISMATCH", f"K at two positions differs by {error:.3g}; {tolerance:.3g} is allowed")
    return error


def _proof_key(data: bytes, shape: GroupShape) -> npt.NDArray[np.float64]:
    if len(data) != shape.heads * shape.head_size * 4:
        raise KvblendError(
            "INVALID_ARGUMENT", f"a proof's K has {len(data)} bytes, not f32 [{shape.heads}, {shape.head_size}]"
        )
    return np.frombuffer(data, "<f4").astype(np.float64).reshape(shape.heads, shape.head_size)


def _weakest(key: npt.NDArray[np.float64], rope: RopeSpec) -> float:
    """Magnitude of the weakest pair (of the weakest head's element where nothing rotates)."""
    if not rope.rotates:
        return float(np.abs(key).max())
    one, two = rope.pairs()
    return float(np.hypot(key[:, one], key[:, two]).max(axis=0).min())


def _moved(key: npt.NDArray[np.float64], rope: RopeSpec, delta: int) -> npt.NDArray[np.float64]:
    moved = key.copy()
    if rope.rotates:
        angles = delta * rope.inv_freq
        one, two = rope.pairs()
        moved[:, one] = key[:, one] * np.cos(angles) - key[:, two] * np.sin(angles)
        moved[:, two] = key[:, two] * np.cos(angles) + key[:, one] * np.sin(angles)
    return moved

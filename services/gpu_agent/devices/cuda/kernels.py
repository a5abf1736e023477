"""The one kernel: tiles of a staging slot to the engine's planes, K rotated on its way, or the other way round.

It reads the tables of batches.py and planes.py. Elements that are not rotated are moved as they are, bit for
bit; those that are go through one rotation in fp32 and one rounding (rope.py says why fp8 needs no scale).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from services.common.checksums import MULTIPLIERS, SHIFTS, STEP, WORD_BYTES
from services.gpu_agent.devices.cuda.batches import TILE, Packed
from services.gpu_agent.devices.cuda.planes import GPTJ, NEOX, NO_ROPE, PLANE, Constants

_TILE = tl.constexpr(len(TILE))
_PLANE = tl.constexpr(len(PLANE))
_NO_ROPE = tl.constexpr(NO_ROPE)
_NEOX = tl.constexpr(NEOX)
_GPTJ = tl.constexpr(GPTJ)
_STEP = tl.constexpr(STEP)
_MULTIPLIER_1, _MULTIPLIER_2 = map(tl.constexpr, MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = map(tl.constexpr, SHIFTS)
_LARGEST_E4M3, _LARGEST_E5M2 = (
    tl.constexpr(torch.finfo(dtype).max) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
)
_WARPS = 8
_compiled: dict[tuple[torch.dtype, Constants, bool], Any] = {}


def start(
    staging: torch.Tensor,
    planes: torch.Tensor,
    tables: torch.Tensor,
    packed: Packed,
    grid: tuple[int, int],
    known: Constants,
    gather: bool,
) -> None:
    """Starts the kernel on the current stream. `staging` has the KV's dtype, `tables` begin with the tiles."""
    arguments = (
        staging,
        staging.data_ptr() // staging.itemsize,
        planes,
        tables,
        packed.slots,
        packed.cos,
        packed.sin,
        packed.sums,
        packed.base,
        gather,
        known.style,
        known.heads,
        known.size,
        known.rotary_offset,
        known.pairs,
        known.block_tokens,
        known.tile_rows,
        known.unit,
        known.vector,
    )
    # Triton looks at every argument again to choose what it compiled; here the constants say it all.
    key = staging.dtype, known, gather
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = move[grid](*arguments, num_warps=_WARPS)
    else:
        compiled[(*grid, 1)](*arguments)


@triton.jit(do_not_specialize=["home", "slots_at", "cos_at", "sin_at", "sums_at", "base_plane"])
def move(
    staging,
    home,
    planes,
    tables,
    slots_at,
    cos_at,
    sin_at,
    sums_at,
    base_plane,
    GATHER: tl.constexpr,
    STYLE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTARY_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Program (tile, plane of its fragment). `staging` has the KV's dtype and begins at element number `home`; the
    other tables begin so many bytes after the tiles, which are at `tables`, bytes as well. Tiles count planes from
    `base_plane` on."""
    slots = (tables + slots_at).to(tl.pointer_type(tl.int32))
    tile = tables.to(tl.pointer_type(tl.int64)) + tl.program_id(0) * _TILE
    index = tl.program_id(1).to(tl.int64)
    if index >= tl.load(tile + 6):
        return
    plane = planes + (tl.load(tile + 5) + base_plane + index) * _PLANE
    # No pointer made of an integer: the compiler would forget how it is aligned.
    base = staging + tl.multiple_of(tl.load(plane) - home, VECTOR)
    step = 1 if UNIT else tl.load(plane + 4)

    # A row is one head of one token.
    row = tl.arange(0, TILE_ROWS)
    live = row < tl.load(tile + 3) * HEADS
    slot = tl.load(slots + tl.load(tile + 2) + row // HEADS, mask=live, other=0).to(tl.int64)
    outside = (
        (slot // BLOCK_TOKENS) * tl.load(plane + 1)
        + (slot % BLOCK_TOKENS) * tl.load(plane + 2)
        + (row % HEADS) * tl.load(plane + 3)
    )
    inside = tl.load(tile) + index * tl.load(tile + 1) + (tl.load(tile + 4) * HEADS + row) * SIZE
    outside, inside = tl.multiple_of(outside, VECTOR)[:, None], tl.multiple_of(inside, VECTOR)[:, None]
    live = live[:, None]
    if not GATHER:
        _add_terms(staging, tile, index, base_plane, tables + sums_at, HEADS, SIZE, TILE_ROWS)
    rotation = tl.load(tile + 7)
    # Two conditions: the first is known when it is compiled, and then there is no such code.
    if STYLE != _NO_ROPE and not GATHER:  # noqa: SIM102
        if rotation >= 0 and tl.load(plane + 5) != 0:
            cos, sin = tables + cos_at, tables + sin_at
            _rotate(staging, base, inside, outside, live, cos, sin, rotation, step, STYLE, SIZE, ROTARY_OFFSET, PAIRS)
            return
    _copy(staging, base, inside, outside, live, step, GATHER, SIZE, 0, 0)
    if GATHER:
        # What other threads of this program have put into the slot is read.
        tl.debug_barrier()
        _add_terms(staging, tile, index, base_plane, tables + sums_at, HEADS, SIZE, TILE_ROWS)


@triton.jit
def _rotate(
    staging,
    base,
    inside,
    outside,
    live,
    cosines,
    sines,
    rotation,
    step,
    STYLE: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Scatters, the rotary part rotated by row `rotation` of the tables."""
    cos = cosines.to(tl.pointer_type(tl.float32)) + rotation * PAIRS
    sin = sines.to(tl.pointer_type(tl.float32)) + rotation * PAIRS
    if STYLE == _NEOX:
        _rotate_halves(staging, base, inside, outside, live, cos, sin, step, OFFSET, PAIRS)
    else:
        _rotate_pairs(staging, base, inside, outside, live, cos, sin, step, OFFSET, PAIRS)
    if 2 * PAIRS < SIZE:
        _copy(staging, base, inside, outside, live, step, False, SIZE, OFFSET, 2 * PAIRS)


@triton.jit
def _add_terms(
    staging,
    tile,
    index,
    base_plane,
    sums,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WORD: tl.constexpr = WORD_BYTES,
):
    """Adds the terms of a tile's words, as they lie in the slot, to the sum that it names."""
    ELEMENT: tl.constexpr = staging.dtype.element_ty.primitive_bitwidth // 8
    ROW: tl.constexpr = HEADS * SIZE * ELEMENT
    if ROW % WORD == 0:
        target = tl.load(tile + 8)
        if target >= 0:
            start = tl.load(tile) + index * tl.load(tile + 1) + tl.load(tile + 4) * (HEADS * SIZE)
            words = (staging + start).to(tl.pointer_type(tl.uint64))
            place = tl.arange(0, triton.next_power_of_2(TILE_ROWS * SIZE * ELEMENT // WORD))
            live = place < tl.load(tile + 3) * (ROW // WORD)
            number = (tl.load(tile + 9) + (base_plane + index) * tl.load(tile + 10) + place).to(tl.uint64)
            word = tl.load(words + place, mask=live, other=0) ^ (number * _STEP)
            word = (word ^ (word >> _SHIFT_1)) * _MULTIPLIER_1
            word = (word ^ (word >> _SHIFT_2)) * _MULTIPLIER_2
            terms = tl.where(live, word ^ (word >> _SHIFT_3), 0)
            tl.atomic_add(sums.to(tl.pointer_type(tl.uint64)) + target, tl.sum(terms), sem="relaxed")


@triton.jit
def _copy(
    staging,
    base,
    inside,
    outside,
    live,
    step,
    GATHER: tl.constexpr,
    SIZE: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Moves what is not among the `WIDTH` elements from `OFFSET` on."""
    part = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    mask = live & (part < SIZE) & ((part < OFFSET) | (part >= OFFSET + WIDTH))
    if GATHER:
        tl.store(staging + inside + part, tl.load(base + outside + part * step, mask=mask), mask=mask)
    else:
        tl.store(base + outside + part * step, tl.load(staging + inside + part, mask=mask), mask=mask)


@triton.jit
def _rotate_halves(staging, base, inside, outside, live, cos, sin, step, OFFSET: tl.constexpr, PAIRS: tl.constexpr):
    """NeoX: element i of a pair's first half belongs to element i of the second."""
    pair = tl.arange(0, triton.next_power_of_2(PAIRS))
    known = pair < PAIRS
    c = tl.load(cos + pair, mask=known, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=known, other=0.0)[None, :]
    one = OFFSET + pair[None, :]
    two = one + PAIRS
    mask = live & known[None, :]
    x = tl.load(staging + inside + one, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(staging + inside + two, mask=mask, other=0.0).to(tl.float32)
    tl.store(base + outside + one * step, _rounded(x * c - y * s, staging), mask=mask)
    tl.store(base + outside + two * step, _rounded(y * c + x * s, staging), mask=mask)


@triton.jit
def _rotate_pairs(staging, base, inside, outside, live, cos, sin, step, OFFSET: tl.constexpr, PAIRS: tl.constexpr):
    """GPT-J: the two elements of a pair are neighbours."""
    ROWS: tl.constexpr = inside.shape[0]
    WIDTH: tl.constexpr = triton.next_power_of_2(PAIRS)
    pair = tl.arange(0, WIDTH)
    known = pair < PAIRS
    c = tl.load(cos + pair, mask=known, other=1.0)[None, :]
    s = tl.load(sin + pair, mask=known, other=0.0)[None, :]
    part = tl.arange(0, 2 * WIDTH)[None, :]
    mask = live & (part < 2 * PAIRS)
    both = tl.load(staging + inside + OFFSET + part, mask=mask, other=0.0).to(tl.float32)
    x, y = tl.split(tl.reshape(both, [ROWS, WIDTH, 2]))
    moved = tl.interleave(x * c - y * s, y * c + x * s)
    tl.store(base + outside + (OFFSET + part) * step, _rounded(moved, staging), mask=mask)


@triton.jit
def _rounded(values, staging):
    """To the KV's dtype, to nearest even. fp8 saturates at its largest finite value; NaN stays NaN."""
    ELEMENT: tl.constexpr = staging.dtype.element_ty
    if ELEMENT.primitive_bitwidth == 8:
        LARGEST: tl.constexpr = _LARGEST_E4M3 if ELEMENT.is_fp8e4nv() else _LARGEST_E5M2
        values = tl.clamp(values, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return values.to(ELEMENT)

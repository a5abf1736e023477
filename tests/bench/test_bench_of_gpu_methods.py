"""What the GPU bench's other ways of copying move, and that wrong bytes would be seen; on a CPU."""

import ctypes
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.contents import ROW_BYTES, Contents
from benchmarks.gpu.plans import copies, placed
from benchmarks.gpu.shapes import CHUNK_BYTES, CHUNK_TOKENS, HEADS, SIZE, model_space
from services.gpu_agent.devices.base import Piece
from services.gpu_agent.devices.cuda.batches import MAX_TOKENS, Batches
from services.gpu_agent.engines.layouts import GroupShape
from services.gpu_agent.engines.rope import rope_spec

SHAPE = GroupShape(2, 2, 1, 4, 2)
ROW = 8
TOKENS, BLOCK_TOKENS, BLOCKS = 12, 4, 9
PLANES = SHAPE.layers * SHAPE.planes
ROPE = rope_spec(model_space().groups[0].rope)


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


@given(st.permutations(range(BLOCKS)), st.integers(0, TOKENS - 1), st.data())
def test_batched_copies_move_a_run_of_slots_at_a_time(table: list[int], first: int, data: st.DataObject) -> None:
    length = data.draw(st.integers(1, TOKENS - first))
    slots = (np.array(table)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).ravel()
    engine, objects = noise(PLANES, BLOCKS * BLOCK_TOKENS, ROW), noise(2, PLANES, TOKENS, ROW)
    planes = np.zeros((PLANES, 6), np.int64)
    planes[:, 0] = address(engine) // 2 + np.arange(PLANES) * engine[0].size // 2
    planes[:, 1:5] = BLOCK_TOKENS * 4, 4, 4, 1
    pieces = [
        Piece(objects[0].reshape(-1), TOKENS, 0, slots[:TOKENS]),
        Piece(objects[1].reshape(-1), TOKENS, first, slots[TOKENS : TOKENS + length]),
    ]
    expected = engine.copy()
    expected[:, pieces[0].slots], expected[:, pieces[1].slots] = objects[0], objects[1][:, first : first + length]
    made = copies(pieces, planes, BLOCK_TOKENS, SHAPE)
    for device, host, size in zip(*(column.tolist() for column in made), strict=True):
        ctypes.memmove(device, host, size)
    assert (engine == expected).all()
    runs = sum(1 + int((np.diff(piece.slots) != 1).sum()) for piece in pieces)
    assert len(made.sizes) == runs * PLANES


def test_slots_that_do_not_touch_are_no_runs() -> None:
    planes = np.array([[0, 4 * BLOCK_TOKENS + 4, 4, 4, 1, 1]])
    with pytest.raises(ValueError, match="do not touch"):
        copies([Piece(noise(8), 1, 0, np.zeros(1, np.int64))], planes, BLOCK_TOKENS, SHAPE)


def test_the_direct_kernel_finds_each_fragment_where_its_slot_would_have_it() -> None:
    tokens, chunks = 256, 2 * MAX_TOKENS // 256 + 1
    nbytes = SHAPE.token_bytes * tokens
    arena = np.zeros(nbytes * chunks, np.uint8)
    pieces = [
        Piece(arena[number * nbytes : (number + 1) * nbytes], tokens, 0, np.arange(tokens)) for number in range(chunks)
    ]
    moved, batches = 0, list(placed(Batches(SHAPE, ROPE, arena.nbytes, 16, pieces).of()))
    assert len(batches) == 3
    for start, batch in batches:
        for fragment in batch.fragments:
            assert address(arena) + start + fragment.start == address(fragment.piece.block) + fragment.host_start
            assert fragment.planes == PLANES
            moved += fragment.nbytes
    assert moved == arena.nbytes


def fetch(host: int, pitch: int, device: int, width: int, rows: int, stream: int) -> None:
    for row in range(rows):
        ctypes.memmove(device + row * width, host + row * pitch, width)


def rotated(keys: torch.Tensor, delta: int) -> torch.Tensor:
    """K [tokens, row bytes] of bf16, as complex numbers in f64."""
    values = keys.view(torch.bfloat16).view(-1, HEADS, SIZE).double()
    turn = torch.polar(torch.ones(SIZE // 2, dtype=torch.float64), torch.from_numpy(delta * ROPE.inv_freq))
    moved = torch.complex(values[..., : SIZE // 2], values[..., SIZE // 2 :]) * turn
    return torch.cat([moved.real, moved.imag], -1).bfloat16().view(torch.uint8).view(-1, ROW_BYTES)


@pytest.mark.parametrize(
    ("wrote", "wrong"),
    [
        (lambda keys: rotated(keys, 777), []),
        (lambda keys: keys, [0]),
        (lambda keys: rotated(keys, -777), [0]),
        (lambda keys: rotated(keys, 777).roll(1, 0), [0]),
    ],
    ids=["right", "not rotated", "back", "another token"],
)
def test_wrong_bytes_are_seen(wrote: Callable[[torch.Tensor], torch.Tensor], wrong: list[int]) -> None:
    chunks, tokens = 2, 2 * CHUNK_TOKENS
    arena = np.zeros(chunks * CHUNK_BYTES, np.uint8)
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    planes = [torch.zeros((tokens, ROW_BYTES), dtype=torch.uint8) for _ in range(2)]
    contents = Contents(planes, slots, address(arena), ROPE, fetch)
    contents.fill()
    text = [plane[slots].clone() for plane in planes]
    stored = arena.reshape(chunks, -1)[:, : 2 * CHUNK_TOKENS * ROW_BYTES].reshape(chunks, 2, CHUNK_TOKENS, ROW_BYTES)
    for number, plane in enumerate(text):
        stored[:, number] = plane.view(chunks, CHUNK_TOKENS, ROW_BYTES).numpy()
    assert contents.wrong_planes(chunks, 0) == []
    contents.clear()
    assert contents.wrong_planes(chunks, 0) == [0, 1]
    planes[0][slots], planes[1][slots] = wrote(text[0]), text[1]
    assert contents.wrong_planes(chunks, 777) == wrong
    planes[1][3, 5] ^= 1
    assert contents.wrong_planes(chunks, 777) == [*wrong, 1]

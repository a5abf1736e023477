"""The memory and layout helpers that engines use on their side."""

import gc
from pathlib import Path

import numpy as np
import pytest

from kvblend.layouts import ARRANGEMENTS, KvShape, buffer_bytes, build_layout
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

SHAPE = KvShape(layers=2, heads=3, head_size=4, blocks=5, block_tokens=6, dtype=common.DTYPE_BFLOAT16)


def test_a_buffer_is_a_reserved_file_and_its_array_is_the_memory(shm_dir: Path) -> None:
    with SharedBuffer(10_000, shm_dir) as buffer:
        path = shm_dir / buffer.name
        assert path.stat().st_blocks * 512 >= 10_000
        assert path.stat().st_mode & 0o777 == 0o600
        assert not buffer.array.any()
        buffer.array[-1] = 7
        assert path.read_bytes()[-1] == 7
        handle = buffer.handle()
        assert (handle.kind, handle.handle, handle.bytes) == (
            pb.HANDLE_KIND_SHARED_MEMORY,
            buffer.name.encode(),
            10_000,
        )
    assert not path.exists()
    buffer.close()


def test_a_view_outlives_its_buffer(shm_dir: Path) -> None:
    buffer = SharedBuffer(4096, shm_dir)
    view = buffer.array.view(np.float32)
    view[:] = 3
    buffer.close()
    assert view.sum() == 3 * 1024
    assert not list(shm_dir.iterdir())


def test_a_forgotten_buffer_leaves_no_file(shm_dir: Path) -> None:
    SharedBuffer(4096, shm_dir)
    gc.collect()
    assert not list(shm_dir.iterdir())


def test_two_buffers_have_two_names(shm_dir: Path) -> None:
    with SharedBuffer(1, shm_dir) as one, SharedBuffer(1, shm_dir) as two:
        assert one.name != two.name


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_buffer_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(ValueError, match="cannot be made"):
        SharedBuffer(nbytes)


def test_case_64_what_does_not_fit_is_refused_at_once_and_leaves_nothing(shm_dir: Path) -> None:
    with pytest.raises(OSError, match=str(1 << 60)):
        SharedBuffer(1 << 60, shm_dir)
    assert not list(shm_dir.iterdir())


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
def test_every_element_of_every_buffer_belongs_to_one_plane(arrangement: str) -> None:
    """Planes are apart from each other and together leave no hole."""
    sizes = buffer_bytes(arrangement, SHAPE)
    used = [np.zeros(size // 2, np.int64) for size in sizes]
    for plane in build_layout(arrangement, SHAPE).planes:
        block, token, head, element = np.ogrid[: SHAPE.blocks, : SHAPE.block_tokens, : SHAPE.heads, : SHAPE.head_size]
        offsets = (
            plane.byte_offset // 2
            + block * plane.block_stride
            + token * plane.token_stride
            + head * plane.head_stride
            + element * plane.element_stride
        )
        np.add.at(used[plane.handle], offsets.reshape(-1), 1)
    assert all((counts == 1).all() for counts in used)


def test_groups_and_handles_can_be_shifted() -> None:
    plain = build_layout("paged_nhd", SHAPE)
    shifted = build_layout("paged_nhd", SHAPE, group=1, first_handle=4)
    assert [plane.handle + 4 for plane in plain.planes] == [plane.handle for plane in shifted.planes]
    assert {plane.group for plane in shifted.planes} == {1}

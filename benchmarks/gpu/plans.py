"""What the methods beside the lanes move, as plain arrays."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.gpu_agent.devices.base import Piece
from services.gpu_agent.devices.cuda.batches import Batch
from services.gpu_agent.engines.layouts import GroupShape

Addresses = npt.NDArray[np.uint64]


class Copies(NamedTuple):
    """Equally long: copy i moves sizes[i] bytes between device[i] and host[i]."""

    device: Addresses
    host: Addresses
    sizes: Addresses


def placed(batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
    """Each batch behind the byte of the arena at which its slot would begin."""
    start = 0
    for batch in batches:
        yield start, batch
        start += sum(fragment.nbytes for fragment in batch.fragments)


def copies(pieces: list[Piece], planes: npt.NDArray[np.int64], block_tokens: int, shape: GroupShape) -> Copies:
    """One for each plane and run of neighbouring slots. Tokens of a plane must lie behind each other without gaps."""
    row = shape.heads * shape.head_size
    if not (planes[:, 1:5] == (block_tokens * row, row, shape.head_size, 1)).all():
        raise ValueError("a slot's heads, or the slots of two neighbouring blocks, do not touch")
    found = list(_of_pieces(pieces, planes[:, 0], row * shape.item_bytes, shape.item_bytes))
    return Copies(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _of_pieces(
    pieces: list[Piece], begins: npt.NDArray[np.int64], row_bytes: int, item_bytes: int
) -> Iterator[tuple[Addresses, Addresses, Addresses]]:
    for piece in pieces:
        starts = np.flatnonzero(np.diff(piece.slots, prepend=piece.slots[0] - 2) != 1)
        sizes = np.diff(starts, append=len(piece.slots)) * row_bytes
        device = begins[:, None] * item_bytes + piece.slots[starts] * row_bytes
        block = int(piece.block.ctypes.data) + piece.first * row_bytes
        host = block + (np.arange(len(begins)) * piece.tokens)[:, None] * row_bytes + starts * row_bytes
        yield (
            device.ravel().astype(np.uint64),
            host.ravel().astype(np.uint64),
            np.broadcast_to(sizes, device.shape).ravel().astype(np.uint64),
        )

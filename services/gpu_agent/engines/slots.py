"""Where the tokens of a request live in the engine's memory."""

import numpy as np
import numpy.typing as npt

from kvblend.v1 import agent_pb2 as pb
from services.common.errors import KvblendError
from services.common.tokens import decode_tokens
from services.gpu_agent.engines.layouts import Layout

Slots = npt.NDArray[np.int64]


class SlotTable:
    """Position p of a request -> slot of the engine's memory (block * block_tokens + place in the block).

    Raises:
        KvblendError: INVALID_ARGUMENT for a block id out of range or a missing block table.
    """

    def __init__(self, slots: pb.SlotMap, layout: Layout) -> None:
        self._first = slots.first_slot
        self._block_tokens = layout.block_tokens
        blocks = decode_tokens(slots.block_ids, field="block_ids", allow_empty=True).astype(np.int64)
        if not len(blocks):
            if layout.blocks > 1:
                raise KvblendError("INVALID_ARGUMENT", "block_ids is empty; only a contiguous buffer needs none")
            blocks = np.zeros(1, np.int64)
        if blocks.max() >= layout.blocks:
            raise KvblendError("INVALID_ARGUMENT", f"block id {blocks.max()} is not below {layout.blocks}")
        self._blocks = blocks

    def require(self, positions: int) -> None:
        """Raises PROMPT_TOO_LONG unless positions [0, positions) have slots."""
        room = len(self._blocks) * self._block_tokens - self._first
        if positions > room:
            raise KvblendError("PROMPT_TOO_LONG", f"{positions} tokens need slots; there are {max(room, 0)}")

    def of(self, positions: npt.NDArray[np.int64]) -> Slots:
        """The slot of each position, [n] int64; positions ascend.

        Raises:
            KvblendError: PROMPT_TOO_LONG; INVALID_ARGUMENT if two positions share a slot.
        """
        if not len(positions):
            return positions
        self.require(int(positions[-1]) + 1)
        index = positions + self._first
        places = np.arange(index[0] // self._block_tokens, index[-1] // self._block_tokens + 1)
        # How many of the positions lie in each of these blocks.
        counts = np.diff(np.searchsorted(index, places * self._block_tokens), append=0)
        counts[-1] += len(index)
        blocks = self._blocks[places]
        slots = index + np.repeat((blocks - places) * self._block_tokens, counts)
        used = blocks[counts > 0]
        # Blocks that differ have no slot in common; else all slots are looked at.
        if len(np.unique(used)) != len(used) and len(np.unique(slots)) != len(slots):
            raise KvblendError("INVALID_ARGUMENT", "block_ids names a block twice among those to be copied")
        return slots

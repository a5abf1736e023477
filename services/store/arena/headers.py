"""The dense table of block headers at the catalog's front (layout: services/common/arena_format.py).

State is written last, so that a table found after a kill says nothing that is not so.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from services.common.arena_format import HEADER, PAGE, BlockState
from services.common.failpoints import passage


class HeaderTable:
    """Headers by index; not thread-safe. Free ones are handed out by `take`."""

    def __init__(self, catalog: mmap.mmap, count: int) -> None:
        table = np.frombuffer(catalog, HEADER, count=count, offset=PAGE)
        self.count = count
        self._columns: dict[str, Any] = {name: table[name] for name in HEADER.names or ()}
        self._generation = self._columns["generation"]
        self._state = self._columns["state"]
        self._free: list[int] = []
        self.list_free_again()

    def get(self, header: int, column: str) -> int:
        return int(self._columns[column][header])

    def columns(self, headers: Sequence[int], *names: str) -> list[Any]:
        """Several columns of the given headers, each [n]."""
        index = np.array(headers, np.int64)
        return [self._columns[name][index] for name in names]

    def set(self, header: int, column: str, value: float) -> None:
        self._columns[column][header] = value

    def expires_at(self, header: int) -> float:
        return float(self._columns["expires_at"][header])

    def session(self, header: int) -> bytes:
        return bytes(self._columns["session"][header].tobytes())

    def generation(self, header: int) -> int:
        return int(self._generation[header])

    def state(self, header: int) -> BlockState:
        return BlockState(int(self._state[header]))

    def set_state(self, header: int, state: BlockState) -> None:
        self._state[header] = state

    def state_word(self, header: int) -> int:
        """As `state`, of a header that may be damaged."""
        return int(self._state[header])

    def in_use(self) -> list[int]:
        """Headers that are not free."""
        found: list[int] = np.flatnonzero(self._state != BlockState.FREE).tolist()
        return found

    def in_state(self, *states: BlockState) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self._state, states)).tolist()
        return found

    def is_current(self, header: int, generation: int) -> bool:
        return 0 <= header < self.count and self.generation(header) == generation

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, slab: int, offset: int, capacity: int, payload: int, session: bytes, reservation: int) -> int:
        """A free header, now RESERVED for a writer. Raises IndexError if there is none."""
        header = self._free.pop()
        for column, value in (
            ("slab", slab),
            ("offset", offset),
            ("capacity_bytes", capacity),
            ("payload_bytes", payload),
            ("meta_bytes", 0),
            ("flags", 0),
            ("expires_at", 0.0),
            ("reservation", reservation),
            ("session", np.void(session)),
        ):
            self._columns[column][header] = value
        passage("header.reserved")
        self._state[header] = BlockState.RESERVED
        return header

    def free_lists(self) -> tuple[list[int], list[int]]:
        """Free headers as `take` knows them, and as their states say: the same, in another order."""
        return list(self._free), np.flatnonzero(self._state == BlockState.FREE).tolist()

    def list_free_again(self) -> None:
        """From the states."""
        self._free = np.flatnonzero(self._state == BlockState.FREE)[::-1].tolist()

    def free(self, header: int) -> None:
        """The generation goes first: whoever still reads the block learns that it is no longer theirs."""
        self._generation[header] += 1
        passage("header.freed")
        self._state[header] = BlockState.FREE
        self._free.append(header)

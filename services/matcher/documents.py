"""Numbers for documents' names, counted, so that a name goes with its last entry."""

import numpy as np

from services.matcher.kernels.types import I32


class Documents:
    """Number 0 is no document. A name may be a document of several tenants: scopes are told by spaces, too."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        self._numbers: dict[str, int] = {"": 0}
        self._counts: list[int] = [1]
        self._free: list[int] = []
        self.bytes = 0

    def find(self, name: str) -> int | None:
        return self._numbers.get(name)

    def take(self, name: str, count: int) -> int:
        """Number of a name, for `count` more entries."""
        number = self._numbers.get(name)
        if number is None:
            if self._free:
                number = self._free.pop()
                self.names[number] = name
                self._counts[number] = 0
            else:
                number = len(self.names)
                self.names.append(name)
                self._counts.append(0)
            self._numbers[name] = number
            self.bytes += 2 * len(name)
        self._counts[number] += count
        return number

    def drop(self, numbers: I32) -> None:
        """So many entries fewer: one for each number."""
        for number, count in zip(*(part.tolist() for part in np.unique(numbers, return_counts=True)), strict=True):
            self._counts[number] -= count
            if not self._counts[number] and number:
                name = self.names[number]
                del self._numbers[name]
                self.bytes -= 2 * len(name)
                self._free.append(number)

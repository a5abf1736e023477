"""A small share of reads whose bytes are compared with their checksum: memory that goes bad is noticed in use."""

from itertools import count


class Sampler:
    """Thread-safe. Spreads its picks evenly: of any 1/share in a row one is picked."""

    def __init__(self, share: float) -> None:
        """`share` of the calls, 0 to 1."""
        self._share = share
        self._calls = count(1)

    def due(self) -> bool:
        """Whether this call is picked."""
        number = next(self._calls)
        return int(number * self._share) != int((number - 1) * self._share)

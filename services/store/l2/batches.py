"""Several objects in one call to the tier: as many as are moved in a moment, so that nobody waits long for the call."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

# However fast the tier is.
MOST_BYTES = 16 << 20

_T = TypeVar("_T")


def batches(items: Iterable[_T], size_of: Callable[[_T], int], limit: Callable[[], int]) -> Iterator[list[_T]]:
    """The items in order, of at most `limit()` bytes together as it then is, or one alone."""
    batch: list[_T] = []
    size = 0
    for item in items:
        if batch and size + size_of(item) > limit():
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch

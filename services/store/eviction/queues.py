"""Walking a queue whose members leave meanwhile."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice
from typing import TypeVar

_T = TypeVar("_T")
_FIRST_PAGE = 4


def in_order(queue: OrderedDict[_T, None]) -> Iterator[_T]:
    """The queue's members, oldest first; those that leave before their turn are left out.

    Read in pages that double, so that the members which were offered and stayed are passed over in linear time.
    """
    offered: set[_T] = set()
    size = _FIRST_PAGE
    while True:
        page = [item for item in islice(queue, 2 * size) if item not in offered]
        if not page:
            return
        for item in page:
            if item in queue:
                offered.add(item)
                yield item
        size *= 2


def touch(queue: OrderedDict[_T, None], item: _T) -> None:
    """Puts it at the queue's young end, whether it is there or not."""
    queue[item] = None
    queue.move_to_end(item)

"""Which NUMA nodes the slabs' memory comes from. With one node there is nothing to choose."""

import ctypes
import mmap
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PREFERRED, _INTERLEAVE = 1, 3
# Python has no mbind(2).
_MBIND = {"x86_64": 237, "aarch64": 235}
_NODES = Path("/sys/devices/system/node/has_memory")


@dataclass(frozen=True)
class Placement:
    """One node: from there while it has room, so that a full one is no reason to be killed. Several: pages in turn."""

    nodes: tuple[int, ...]


def placements(slabs: int, nodes: Sequence[int]) -> list[Placement | None]:
    """One for each slab: slabs are dealt out to the nodes in equal numbers, and the rest is interleaved.

    Engines on every node then find the same share of the arena near them. None: the system's own choice.
    """
    if len(nodes) < 2:
        return [None] * slabs
    dealt = slabs // len(nodes) * len(nodes)
    return [Placement((nodes[slab % len(nodes)],) if slab < dealt else tuple(nodes)) for slab in range(slabs)]


def memory_nodes(path: Path = _NODES) -> list[int]:
    """Nodes that have memory, by number; one unknown node if the system does not say."""
    try:
        return parse_nodes(path.read_text())
    except (OSError, ValueError):
        return [0]


def parse_nodes(text: str) -> list[int]:
    """The kernel's lists, such as `0-1,3`. Raises ValueError."""
    nodes: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def place(memory: mmap.mmap, placement: Placement) -> None:
    """Before the first touch. Raises OSError where the system does not allow it."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"mbind is not known on {platform.machine()}")
    mode = _INTERLEAVE if len(placement.nodes) > 1 else _PREFERRED
    mask = sum(1 << node for node in placement.nodes)
    words = (ctypes.c_ulong * (mask.bit_length() // 64 + 1))()
    for index in range(len(words)):
        words[index] = mask >> 64 * index & (1 << 64) - 1
    first = ctypes.c_char.from_buffer(memory)
    system = ctypes.CDLL(None, use_errno=True)
    # The kernel reads one bit less than it is told.
    arguments = (ctypes.addressof(first), len(memory), mode, ctypes.addressof(words), 64 * len(words) + 1, 0)
    if system.syscall(ctypes.c_long(number), *(ctypes.c_ulong(argument) for argument in arguments)):
        error = ctypes.get_errno()
        raise OSError(error, "mbind is refused")

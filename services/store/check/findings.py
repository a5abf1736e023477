"""What a check finds, by kind, and what it works with."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvblend.v1 import store_pb2
from services.store.check.kinds import TEXTS
from services.store.objects import ChunkKey
from services.store.state import StoreState
from services.store.writing.writes import Writes

_EXAMPLES = 3


def chunk_name(key: ChunkKey) -> str:
    return f"chunk {key.chain_hash.hex()[:16]} of space {key.space_id.hex()[:8]}"


# Done, of how much.
Progress = tuple[int, int]
Check = Iterator[Progress]


@dataclass
class _Found:
    count: int = 0
    fixed: int = 0
    examples: list[str] = field(default_factory=list)


class Findings:
    """Disagreements, counted."""

    def __init__(self) -> None:
        self._found: dict[str, _Found] = {}

    def add(self, kind: str, example: str, fixed: bool) -> None:
        self.add_many(kind, 1, int(fixed), example)

    def add_many(self, kind: str, count: int, fixed: int, example: str) -> None:
        found = self._found.setdefault(kind, _Found())
        found.count += count
        found.fixed += fixed
        if len(found.examples) < _EXAMPLES:
            found.examples.append(example)

    def messages(self) -> list[store_pb2.CheckFinding]:
        return [
            store_pb2.CheckFinding(
                kind=kind,
                text=TEXTS[kind][0],
                remedy=TEXTS[kind][1],
                count=found.count,
                fixed=found.fixed,
                examples=found.examples,
            )
            for kind, found in self._found.items()
        ]


@dataclass(frozen=True)
class Inspection:
    """One part of a check: what it looks at, whether it mends, how many seconds are left, and what it found."""

    state: StoreState
    writes: Writes
    directory: Path
    fix: bool
    remaining: Callable[[], float]
    findings: Findings = field(default_factory=Findings)

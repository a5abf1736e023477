"""Request traces through a policy, as the store would run it.

A trace is a file of JSON lines: `timestamp` (ms), `hash_ids` (names of a prompt's blocks in order; a block's name
stands for all before it too), and where known `input_length` (tokens).
"""

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

from kvblend.v1 import common_pb2 as pb
from services.common.identity import HASH_BYTES, SPACE_ID_BYTES
from services.common.tokens import TOKEN_BYTES
from services.store.catalog import Catalog
from services.store.eviction import make_policy
from services.store.objects import ChunkInfo, ChunkKey

_SPACE = bytes(SPACE_ID_BYTES)
_BLOCK_TOKENS = 512
_TOKENS = bytes(TOKEN_BYTES * _BLOCK_TOKENS)
_START = b"\xff" * HASH_BYTES


class Request(NamedTuple):
    """`seconds` since the trace began; `last_tokens`: of its last block."""

    seconds: float
    blocks: Sequence[int]
    last_tokens: int


@dataclass(frozen=True)
class Trace:
    name: str
    requests: list[Request]

    @property
    def footprint(self) -> int:
        """Different blocks."""
        return len({block for request in self.requests for block in request.blocks})


def read_trace(path: Path) -> Trace:
    """Raises OSError, and ValueError with the line that is no request."""
    requests = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                requests.append(_request(json.loads(line)))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}: line {number} is no request: {error!r}") from error
    return Trace(path.stem, requests)


def _request(fields: dict[str, object]) -> Request:
    blocks = [int(block) for block in fields["hash_ids"]]  # type: ignore[attr-defined]
    length = int(fields.get("input_length", len(blocks) * _BLOCK_TOKENS))  # type: ignore[call-overload]
    last = length - _BLOCK_TOKENS * (len(blocks) - 1)
    # A trace with blocks of another size: all are whole.
    return Request(float(fields["timestamp"]) / 1e3, blocks, last if 0 < last <= _BLOCK_TOKENS else _BLOCK_TOKENS)  # type: ignore[arg-type]


@dataclass
class Score:
    """Blocks asked for, those that were there, and those that were there with all before them."""

    asked: int = 0
    hits: int = 0
    prefix_hits: int = 0

    def count(self, there: Iterable[bool]) -> None:
        unbroken = True
        for hit in there:
            self.asked += 1
            self.hits += hit
            unbroken = unbroken and hit
            self.prefix_hits += unbroken

    @property
    def rates(self) -> tuple[float, float]:
        """(blocks, unbroken prefix)."""
        return self.hits / max(1, self.asked), self.prefix_hits / max(1, self.asked)


class Cache(Protocol):
    def ask(self, request: Request) -> list[bool]:
        """Which of its blocks are there; afterwards all are, if there is room for them."""
        ...


class PolicyCache:
    """A catalog of so many chunks under one of the store's policies: looked up, leased, then stored."""

    def __init__(self, policy: str, capacity: int) -> None:
        self._catalog = Catalog()
        self._policy = make_policy(policy, self._catalog.children)
        self._free = capacity

    def ask(self, request: Request) -> list[bool]:
        keys = [_key(block) for block in request.blocks]
        here = [chunk for key in keys if (chunk := self._catalog.get(key))]
        for chunk in here:
            chunk.protectors += 1
        self._policy.used(here, request.seconds)
        there = [key in self._catalog for key in keys]
        room = self._make_room(there.count(False), request.seconds)
        missing = (place for place, hit in enumerate(there) if not hit)
        for place in islice(missing, room):
            before = keys[place - 1].chain_hash if place else _START
            tokens = request.last_tokens if place == len(keys) - 1 else _BLOCK_TOKENS
            chunk = self._catalog.add_object(keys[place], _info(before, tokens), 0, 0, request.blocks[place])
            self._policy.added(chunk, request.seconds)
            self._free -= 1
        for chunk in here:
            chunk.protectors -= 1
        return there

    def _make_room(self, wanted: int, now: float) -> int:
        """How many chunks may be added, of those wanted."""
        if self._free < wanted:
            for chunk in self._policy.victims(now):
                if chunk.protectors:
                    continue
                self._catalog.remove(chunk)
                self._policy.removed(chunk)
                self._free += 1
                if self._free == wanted:
                    break
        return min(self._free, wanted)


def _key(block: int) -> ChunkKey:
    return ChunkKey(_SPACE, pb.DOMAIN_EXACT, block.to_bytes(HASH_BYTES, "little"))


def _info(before: bytes, tokens: int) -> ChunkInfo:
    return ChunkInfo(
        model_space_id=_SPACE,
        tenant="",
        previous_hash=before,
        tokens=_TOKENS[: TOKEN_BYTES * tokens],
        chunk_tokens=_BLOCK_TOKENS,
        stored_position=0,
        context_class=pb.CONTEXT_CLASS_IN_PROMPT,
        document="",
        groups=1,
        ranks=1,
        matchable=True,
    )


class Optimum:
    """Belady's: what is next used latest leaves. Knows the whole trace beforehand."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self._capacity = capacity
        self._next = _next_uses(trace)
        self._latest: list[tuple[int, int]] = []
        self._until: dict[int, int] = {}

    def ask(self, request: Request) -> list[bool]:
        return [self._ask(block) for block in request.blocks]

    def _ask(self, block: int) -> bool:
        there = block in self._until
        while not there and len(self._until) >= self._capacity:
            use, latest = heapq.heappop(self._latest)
            # Older entries of a block that was used since are passed over.
            if self._until.get(latest) == -use:
                del self._until[latest]
        use = next(self._next)
        self._until[block] = use
        heapq.heappush(self._latest, (-use, block))
        return there


def _next_uses(trace: Trace) -> Iterator[int]:
    flat = [block for request in trace.requests for block in request.blocks]
    uses = [0] * len(flat)
    after: dict[int, int] = {}
    for place in range(len(flat) - 1, -1, -1):
        # Never again: later than all, and each at its own time.
        uses[place] = after.get(flat[place], 2 * len(flat) + place)
        after[flat[place]] = place
    return iter(uses)


def replay(cache: Cache, trace: Trace) -> tuple[Score, Score]:
    """The scores of the trace's first half, with the cache cold, and of its second half."""
    first, second = Score(), Score()
    half = len(trace.requests) // 2
    for number, request in enumerate(trace.requests):
        (first if number < half else second).count(cache.ask(request))
    return first, second

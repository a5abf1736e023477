"""Which chunks are in the arena. An index over the headers, rebuilt from them; not thread-safe."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from kvblend.v1 import common_pb2 as pb
from services.store.names import ANY
from services.store.objects import ChunkInfo, ChunkKey, FactColumns, Facts, Name


class Chunk:
    """A chunk with at least one committed object in the arena."""

    __slots__ = (
        "complete",
        "documents",
        "expires_at",
        "facts",
        "headers",
        "in_l2",
        "info",
        "key",
        "last_used",
        "leases",
        "objects",
        "pinned",
        "protectors",
        "resident",
        "size",
    )

    def __init__(self, key: ChunkKey, info: ChunkInfo) -> None:
        self.key = key
        self.info = info
        self.facts = Facts(
            key.chain_hash,
            key.domain,
            info.tokens,
            info.stored_position,
            info.context_class,
            info.matchable,
            info.document,
        )
        # (group, rank) -> header.
        self.objects: dict[tuple[int, int], int] = {}
        # All of them are here.
        self.complete = False
        # Then the headers of all, rank by rank.
        self.headers: tuple[int, ...] = ()
        # Every name that the text was stored under: clearing any of them clears it. ANY: and others.
        self.documents: set[str] = {info.document} if info.document else set()
        # Unix seconds; 0: never.
        self.expires_at = 0.0
        self.pinned = False
        self.in_l2 = False
        # Leases and copies that forbid eviction.
        self.protectors = 0
        # Of any holder, HELD or not.
        self.leases = 0
        # Seconds of the state's clock.
        self.last_used = 0.0
        # Bytes of the arena.
        self.size = 0
        # False once it has left the catalog: a late copy must not bring it back.
        self.resident = True

    def usable(self, wall: float) -> bool:
        """It may be served at this Unix time."""
        return self.complete and not 0 < self.expires_at <= wall


def facts_of(chunks: Sequence[Chunk]) -> FactColumns:
    return FactColumns(*zip(*[chunk.facts for chunk in chunks], strict=True))


class Catalog:
    """Chunks by key, by what precedes them, and by header."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._children: dict[tuple[bytes, bytes], dict[ChunkKey, Chunk]] = {}
        self._by_header: dict[int, Chunk] = {}
        self._chunks_of_space: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    @property
    def object_count(self) -> int:
        return len(self._by_header)

    def get(self, key: ChunkKey) -> Chunk | None:
        return self._chunks.get(key)

    def get_each(self, names: Iterable[Name]) -> list[Chunk | None]:
        """By names: plain tuples are as good as keys, and made faster."""
        find: Callable[[Any], Chunk | None] = self._chunks.get
        return list(map(find, names))

    def of_header(self, header: int) -> Chunk | None:
        return self._by_header.get(header)

    def children(self, space_id: bytes, previous_hash: bytes) -> Iterable[Chunk]:
        """Chunks of prompts that continue the chain after `previous_hash`, latest first."""
        return reversed(self._children.get((space_id, previous_hash), {}).values())

    def accepts(self, key: ChunkKey, info: ChunkInfo, group: int, rank: int) -> bool:
        """False: that object is there already, or the chunk's other objects were computed elsewhere."""
        chunk = self._chunks.get(key)
        return chunk is None or (chunk.info.fits(info) and (group, rank) not in chunk.objects)

    def add_object(self, key: ChunkKey, info: ChunkInfo, group: int, rank: int, header: int) -> Chunk:
        """Raises ValueError if the catalog does not accept it."""
        if not self.accepts(key, info, group, rank):
            raise ValueError(f"object {group}:{rank} does not belong to the chunk or is there already")
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = Chunk(key, info)
            if key.domain != pb.DOMAIN_SEGMENT:
                self._children.setdefault((key.space_id, info.previous_hash), {})[key] = chunk
            self._chunks_of_space[key.space_id] += 1
        chunk.objects[group, rank] = header
        if len(chunk.objects) == info.groups * info.ranks:
            places = [(group, rank) for rank in range(info.ranks) for group in range(info.groups)]
            chunk.headers = tuple(chunk.objects[place] for place in places)
            chunk.complete = True
        self._by_header[header] = chunk
        return chunk

    def remove(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        chunk.resident = False
        self._chunks_of_space[chunk.key.space_id] -= 1
        for header in chunk.objects.values():
            del self._by_header[header]
        if chunk.key.domain == pb.DOMAIN_SEGMENT:
            return
        place = (chunk.key.space_id, chunk.info.previous_hash)
        siblings = self._children[place]
        del siblings[chunk.key]
        if not siblings:
            del self._children[place]

    def has_space(self, space_id: bytes) -> bool:
        return self._chunks_of_space[space_id] > 0

    def matching(self, scope: pb.ClearScope) -> list[Chunk]:
        return [chunk for chunk in self if in_scope(scope, chunk.key.space_id, chunk.info.tenant, chunk.documents)]


def in_scope(scope: pb.ClearScope, space_id: bytes, tenant: str, documents: Collection[str]) -> bool:
    kind = scope.WhichOneof("scope")
    if kind == "space_id":
        return space_id == scope.space_id
    if kind == "tenant":
        return tenant == scope.tenant
    if kind == "document":
        return tenant == scope.document.tenant and (scope.document.document in documents or ANY in documents)
    return kind == "everything" and scope.everything

"""What L2 says that it has, held against what the space would have under these keys."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvblend.v1 import object_pb2
from services.common.identity import OBJECT_FORMAT_VERSION
from services.store.objects import ChunkKey, ObjectKey, info_of
from services.store.spaces import ResolvedSpace, SpaceShape


@dataclass(frozen=True)
class L2Chunk:
    """All objects of a chunk that the tier has, and how often the store had been cleared when it said so."""

    key: ChunkKey
    objects: dict[ObjectKey, object_pb2.ObjectMeta]
    clears: int

    @property
    def size(self) -> int:
        return sum(meta.payload_bytes for meta in self.objects.values())


def objects_of(space: ResolvedSpace, keys: Iterable[ChunkKey]) -> list[ObjectKey]:
    """Every group's and rank's object of these chunks."""
    shape = space.shape
    return [ObjectKey(key, group, rank) for key in keys for group in range(shape.groups) for rank in range(shape.ranks)]


def whole_chunks(
    space: ResolvedSpace, asked: Sequence[ObjectKey], metas: Sequence[object_pb2.ObjectMeta | None], clears: int
) -> dict[ChunkKey, L2Chunk]:
    """Chunks that are there in full, of a tier's answer."""
    found: dict[ChunkKey, L2Chunk] = {}
    for key, meta in zip(asked, metas, strict=True):
        if meta is not None and _is_sound(key, meta, space):
            found.setdefault(key.chunk, L2Chunk(key.chunk, {}, clears)).objects[key] = meta
    return {key: chunk for key, chunk in found.items() if _is_whole(chunk, space.shape)}


def _is_sound(key: ObjectKey, meta: object_pb2.ObjectMeta, space: ResolvedSpace) -> bool:
    """The meta describes the object that this space would have under this key."""
    info, shape = info_of(meta), space.shape
    return (
        meta.format_version == OBJECT_FORMAT_VERSION
        and (meta.space_id, meta.domain, meta.chain_hash)
        == (key.chunk.space_id, key.chunk.domain, key.chunk.chain_hash)
        and (meta.model_space_id, meta.tenant) == (space.model_space_id, space.tenant)
        and (meta.groups, meta.ranks) == (shape.groups, shape.ranks)
        and (meta.group, shape.rank_number(meta.rank)) == (key.group, key.rank)
        and meta.payload_bytes == shape.payload_bytes(key.group, info.token_count)
    )


def _is_whole(chunk: L2Chunk, shape: SpaceShape) -> bool:
    """Every object is there, and all were computed at the same place."""
    infos = [info_of(meta) for meta in chunk.objects.values()]
    return len(infos) == shape.groups * shape.ranks and all(info.fits(infos[0]) for info in infos)

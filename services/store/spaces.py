"""Model spaces that engines registered, and the spaces derived from them for each request."""

import threading
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import DecodeError

from kvblend.v1 import common_pb2 as pb
from services.common.errors import KvblendError
from services.common.identity import model_space_id, space_id_of, space_root
from services.common.logs import get_logger

_log = get_logger("spaces")

_MOST_RESOLVED = 4096

_DTYPE_BYTES = {
    pb.DTYPE_FLOAT32: 4,
    pb.DTYPE_FLOAT16: 2,
    pb.DTYPE_BFLOAT16: 2,
    pb.DTYPE_FLOAT8_E4M3: 1,
    pb.DTYPE_FLOAT8_E5M2: 1,
}


def _kv_values_a_token(group: pb.LayerGroup, tensor_parallel: int) -> int:
    """Elements that one token has in one rank's object: [layers, K/V, heads, size], MLA: one plane."""
    if group.attention == pb.ATTENTION_KIND_MLA:
        return group.layers * group.kv_heads * group.head_size
    return group.layers * 2 * max(1, group.kv_heads // tensor_parallel) * group.head_size


def _moves(group: pb.LayerGroup) -> bool:
    """KV of this group can be moved to another position."""
    return group.attention in (pb.ATTENTION_KIND_FULL, pb.ATTENTION_KIND_MLA) and group.rope.style in (
        pb.ROPE_STYLE_NONE,
        pb.ROPE_STYLE_NEOX,
        pb.ROPE_STYLE_GPTJ,
    )


class SpaceShape:
    """Sizes and ranks of a model space."""

    def __init__(self, space: pb.ModelSpace) -> None:
        self.model_space = space
        self.chunk_tokens = space.chunk_tokens
        self.groups = len(space.groups)
        self.ranks = space.tensor_parallel or 1
        self.prefix_only = not all(_moves(group) for group in space.groups)
        width = _DTYPE_BYTES[space.kv_dtype]
        self._token_bytes = [_kv_values_a_token(group, self.ranks) * width for group in space.groups]

    def payload_bytes(self, group: int, tokens: int) -> int:
        """Bytes of one object: `tokens` tokens of one layer group for one rank."""
        return self._token_bytes[group] * tokens

    def rank_number(self, rank: pb.Rank) -> int:
        """Raises KvblendError INVALID_ARGUMENT for a rank that the model does not have."""
        if rank.tensor >= self.ranks or rank.pipeline or rank.context:
            raise KvblendError("INVALID_ARGUMENT", f"there is no such rank; tensor ranks are 0 to {self.ranks - 1}")
        return rank.tensor


@dataclass(frozen=True)
class ResolvedSpace:
    """One request's space. `root` is 32 bytes, its first 16 are `space_id`."""

    root: bytes
    space_id: bytes
    model_space_id: bytes
    tenant: str
    shape: SpaceShape


def _check_supported(space: pb.ModelSpace) -> None:
    if (space.pipeline_parallel or 1) > 1 or (space.context_parallel or 1) > 1:
        raise KvblendError("NOT_IMPLEMENTED", "pipeline and context parallel models are not served yet")
    parallel = space.tensor_parallel or 1
    for index, group in enumerate(space.groups):
        if group.kv_heads > parallel and group.kv_heads % parallel and group.attention != pb.ATTENTION_KIND_MLA:
            raise KvblendError(
                "INVALID_SPACE", f"layer group {index}: {group.kv_heads} KV heads do not divide over {parallel} ranks"
            )


class ModelSpaces:
    """Known model spaces; kept as files beside the arena, so that a restarted store serves at once."""

    def __init__(self, directory: Path, default_chunk_tokens: int) -> None:
        """Raises OSError if the directory cannot be used."""
        self._directory = directory
        self._default = default_chunk_tokens
        self._lock = threading.Lock()
        self._shapes: dict[bytes, SpaceShape] = {}
        # Spaces of the latest requests, by their canonical message: deriving one takes longer than finding a chunk.
        self._resolved: dict[bytes, ResolvedSpace] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for path in directory.glob("*.pb"):
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            space = pb.ModelSpace.FromString(path.read_bytes())
            identity = model_space_id(space)
            if identity.hex() != path.stem:
                raise KvblendError("INVALID_SPACE", "the content is not what the name says")
            self._shapes[identity] = SpaceShape(space)
        except (DecodeError, KvblendError) as error:
            _log.warning("model space file ignored", path=str(path), error=str(error))

    def register(self, space: pb.ModelSpace) -> tuple[bytes, SpaceShape]:
        """(model space id, its shape). Raises KvblendError WEIGHTS_UNKNOWN, INVALID_SPACE, NOT_IMPLEMENTED."""
        known = pb.ModelSpace()
        known.CopyFrom(space)
        known.chunk_tokens = space.chunk_tokens or self._default
        identity = model_space_id(known)
        _check_supported(known)
        with self._lock:
            shape = self._shapes.get(identity)
            if shape is None:
                shape = self._shapes[identity] = SpaceShape(known)
                self._save(identity, known)
        return identity, shape

    def _save(self, identity: bytes, space: pb.ModelSpace) -> None:
        """hugetlbfs takes no plain files; then agents register again after a restart."""
        draft = self._directory / f"{identity.hex()}.new"
        try:
            draft.write_bytes(space.SerializeToString())
            draft.rename(draft.with_suffix(".pb"))
        except OSError as error:
            _log.warning("a model space is not kept for the next start", why=error.strerror)
            draft.unlink(missing_ok=True)

    def resolve(self, space: pb.Space, tenant: str) -> ResolvedSpace:
        """The request's space, for the tenant that the caller's identity allows.

        Raises:
            KvblendError: UNKNOWN_MODEL_SPACE, INVALID_SPACE.
        """
        shape = self._shapes.get(space.model_space_id)
        if shape is None:
            raise KvblendError("UNKNOWN_MODEL_SPACE", f"model space {space.model_space_id.hex()} is not registered")
        own = pb.Space()
        own.CopyFrom(space)
        own.tenant = tenant
        name = own.SerializeToString(deterministic=True)
        resolved = self._resolved.get(name)
        if resolved is None:
            root = space_root(shape.model_space, own)
            resolved = ResolvedSpace(root, space_id_of(root), space.model_space_id, tenant, shape)
            if len(self._resolved) >= _MOST_RESOLVED:
                self._resolved.clear()
            self._resolved[name] = resolved
        return resolved

    def display_name(self, identity: bytes) -> str:
        shape = self._shapes.get(identity)
        return shape.model_space.display_name if shape else ""

"""What store tests share: a small model, texts, a store put together in this process, and known bytes for every key."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvblend.host_calls.appended import Appended
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, store_pb2
from services.common.checksums import checksum_of
from services.common.errors import KvblendError
from services.common.tokens import encode_u32
from services.store.arena.arena import Arena
from services.store.leasing.leases import HolderKey
from services.store.lookup.matchers import Client
from services.store.lookup.query import make_query
from services.store.parts import Parts, compose, make_state
from services.store.publishing.changes import Added, Change, Cleared
from services.store.settings import StoreSettings
from services.store.spaces import ResolvedSpace
from services.store.state import Clock
from services.store.tiers.base import Tier
from services.store.writing.admission import cut, wishes_of
from services.store.writing.writes import Promise

CHUNK = 16
SESSION = bytes(range(16))
OTHER_SESSION = bytes(range(16, 32))


def model_space(
    *, parallel: int = 1, groups: int = 1, layers: int = 1, epoch: int = 0, style: int = pb.ROPE_STYLE_NEOX
) -> pb.ModelSpace:
    """A model whose object of 16 tokens has 1 KiB of KV for each layer."""
    rope = pb.Rope(style=style, rotary_size=8, inv_freq=np.linspace(1, 0.1, 4).tobytes())
    group = pb.LayerGroup(attention=pb.ATTENTION_KIND_FULL, layers=layers, kv_heads=parallel, head_size=8, rope=rope)
    return pb.ModelSpace(
        weights_fingerprint=hashlib.sha256(b"weights").digest(),
        kv_dtype=pb.DTYPE_FLOAT32,
        groups=[group] * groups,
        tensor_parallel=parallel,
        chunk_tokens=CHUNK,
        weights_epoch=epoch,
        display_name="tiny",
    )


class Waiting:
    """A caller that waits for its answer, and has it at once."""

    def gone(self) -> bool:
        return False

    def when_answered(self, work: Callable[[], None]) -> None:
        work()


def text(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).tolist()


def known_bytes(space_id: bytes, domain: int, chain_hash: bytes, group: int, rank: int, size: int) -> bytes:
    """The bytes that stand for the KV of one object: different for every key."""
    name = space_id + bytes([domain, group, rank]) + chain_hash
    return hashlib.shake_256(name).digest(size)


def checksum(data: bytes) -> int:
    return checksum_of(data)


class FakeClock:
    def __init__(self) -> None:
        self.time = 1_000_000.0

    def clock(self) -> Clock:
        return Clock(lambda: self.time, lambda: self.time)


class Outbox:
    """Remembers what the matchers would be told; the log has it at once."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        # Why everything had to be told again.
        self.told: list[str] = []

    def append(self, change: Change) -> int:
        self.changes.append(change)
        return len(self.changes)

    def position(self) -> pb.StreamPosition:
        return pb.StreamPosition(store="test", epoch=1, sequence=len(self.changes))

    def durable_position(self) -> pb.StreamPosition:
        return self.position()

    def wait_durable(self, sequence: int, timeout: float) -> bool:
        return sequence <= len(self.changes) and timeout >= 0

    def depth(self) -> int:
        return 0

    def trouble(self) -> str:
        return ""

    def tell_again(self, why: str) -> None:
        self.told.append(why)

    def held(self) -> set[tuple[str, bytes, int]]:
        """(owner, chain hash, domain) after all changes."""
        now: dict[tuple[str, bytes, int], Added] = {}
        for change in self.changes:
            if isinstance(change, Cleared):
                now = {name: added for name, added in now.items() if not change.covers(added)}
                continue
            name = (change.owner, change.key.chain_hash, change.key.domain)
            if isinstance(change, Added):
                now[name] = change
            else:
                now.pop(name, None)
        return set(now)


@dataclass
class Segment:
    """One of the segments that SegmentColumns has as columns."""

    query_position: int
    stored_position: int
    length: int
    domain: int = pb.DOMAIN_SEGMENT
    context_class: int = pb.CONTEXT_CLASS_ALONE
    document: str = ""
    skip_tokens: int = 0
    # N x 32, and N u32.
    chain_hashes: bytes = b""
    chunk_lengths: bytes = b""


def segments_in(columns: pb.SegmentColumns) -> list[Segment]:
    """A slow reading."""

    def numbers(column: bytes) -> list[int]:
        return [int.from_bytes(column[at : at + 4], "little") for at in range(0, len(column), 4)]

    segments = []
    first = 0
    for number, count in enumerate(numbers(columns.chunk_counts)):
        end = first + count
        segments.append(
            Segment(
                numbers(columns.query_positions)[number],
                numbers(columns.stored_positions)[number],
                numbers(columns.lengths)[number],
                columns.domains[number],
                columns.context_classes[number],
                columns.documents[numbers(columns.document_indexes)[number]],
                numbers(columns.skip_tokens)[number],
                columns.chain_hashes[32 * first : 32 * end],
                columns.chunk_lengths[4 * first : 4 * end],
            )
        )
        first = end
    return segments


@dataclass
class Leased:
    """One of the objects that ObjectColumns has as columns."""

    place: store_pb2.ObjectPlace
    chain_hash: bytes
    domain: int
    tokens: int
    stored_position: int
    checksum: int
    verify: bool


def objects_in(columns: store_pb2.ObjectColumns) -> list[Leased]:
    """A slow reading."""

    def number(column: bytes, index: int, size: int) -> int:
        return int.from_bytes(column[size * index : size * (index + 1)], "little")

    return [
        Leased(
            store_pb2.ObjectPlace(
                header=number(columns.headers, index, 4),
                generation=number(columns.generations, index, 8),
                slab=number(columns.slabs, index, 4),
                offset=number(columns.offsets, index, 8),
                payload_bytes=number(columns.payload_bytes, index, 8),
                group=number(columns.groups, index, 4),
            ),
            columns.chain_hashes[32 * index : 32 * (index + 1)],
            columns.domains[index],
            number(columns.tokens, index, 4),
            number(columns.stored_positions, index, 4),
            number(columns.checksums, index, 8),
            bool(columns.verify[index]),
        )
        for index in range(len(columns.domains))
    ]


def columns_of(segments: Sequence[Segment]) -> pb.SegmentColumns:
    """The segments as a matcher's answer has them."""
    return pb.SegmentColumns(
        query_positions=encode_u32([item.query_position for item in segments]),
        stored_positions=encode_u32([item.stored_position for item in segments]),
        lengths=encode_u32([item.length for item in segments]),
        skip_tokens=encode_u32([item.skip_tokens for item in segments]),
        domains=bytes(item.domain for item in segments),
        context_classes=bytes(item.context_class for item in segments),
        document_indexes=encode_u32(range(len(segments))),
        documents=[item.document for item in segments],
        chunk_counts=encode_u32([len(item.chunk_lengths) // 4 for item in segments]),
        chain_hashes=b"".join(item.chain_hashes for item in segments),
        chunk_lengths=b"".join(item.chunk_lengths for item in segments),
    )


@dataclass
class FakeMatcher:
    """Answers what it was told to; raises if it was told to."""

    segments: list[Segment] = field(default_factory=list)
    error: KvblendError | None = None
    # Of a request for certain positions.
    behind: KvblendError | None = None
    log_position: int = 1
    requests: list[matcher_pb2.MatchRequest] = field(default_factory=list)

    def match(self, asked: Appended, timeout: float) -> matcher_pb2.MatchResponse:
        del timeout
        request = asked.whole()
        self.requests.append(request)
        error = self.error or (self.behind if request.at_least else None)
        if error:
            raise error
        return matcher_pb2.MatchResponse(segments=columns_of(self.segments), log_position=self.log_position)

    def score(self, request: matcher_pb2.ScoreRequest, timeout: float) -> matcher_pb2.ScoreResponse:
        del request, timeout
        if self.error:
            raise self.error
        return matcher_pb2.ScoreResponse()

    def ready(self) -> tuple[bool, str]:
        return True, ""


@dataclass
class Granted:
    """A reservation of the test, to be written and committed."""

    space: ResolvedSpace
    number: int
    rank: int
    chunks: list[store_pb2.ChunkGrant]
    session: bytes

    def outcomes(self) -> list[int]:
        return [chunk.outcome for chunk in self.chunks]

    def reasons(self) -> list[int]:
        return [chunk.reason for chunk in self.chunks]

    def places(self) -> list[tuple[store_pb2.ChunkGrant, store_pb2.ObjectPlace]]:
        return [(chunk, place) for chunk in self.chunks for place in chunk.places]

    def bytes_of(self, chunk: store_pb2.ChunkGrant, place: store_pb2.ObjectPlace) -> bytes:
        return known_bytes(
            self.space.space_id, chunk.domain, chunk.chain_hash, place.group, self.rank, place.payload_bytes
        )


class LocalStore:
    """A store's parts in this process, with a clock that the test moves."""

    def __init__(
        self,
        directory: Path,
        *,
        pages: int = 64,
        slabs: int = 2,
        matcher: Client | None = None,
        tier: Tier | None = None,
        **settings: object,
    ) -> None:
        """An arena of `pages` blocks of 4 KiB."""
        self.settings = StoreSettings(chunk_tokens=CHUNK, name="test", **settings)  # type: ignore[arg-type]
        self.time = FakeClock()
        self.outbox = Outbox()
        self.arena = Arena(directory, pages * 4096, pages * 4096 // slabs)
        state, writes, sessions = make_state(self.settings, self.arena, self.time.clock(), tier.tier_id if tier else "")
        self.parts: Parts = compose(self.settings, self.arena, state, writes, sessions, self.outbox, matcher, tier)
        self.state, self.writes, self.lookups = state, writes, self.parts.lookups
        if self.parts.l2:
            self.parts.l2.start()

    def close(self) -> None:
        if self.parts.l2:
            self.parts.l2.close()
        self.arena.close()

    def space(self, model: pb.ModelSpace | None = None, tenant: str = "default", salt: bytes = b"") -> ResolvedSpace:
        identity, _ = self.parts.spaces.register(model or model_space())
        return self.parts.spaces.resolve(pb.Space(model_space_id=identity, cache_salt=salt), tenant)

    def reserve(
        self,
        space: ResolvedSpace,
        tokens: Sequence[int],
        *,
        document: str = "",
        context: Sequence[int] = (),
        kind: int = store_pb2.STORE_KIND_PROMPT,
        exact: int | None = None,
        session: bytes = SESSION,
        rank: int = 0,
        pinned: bool = False,
        ttl: int = 0,
        first_position: int | None = None,
        allow_blended: bool = True,
        segment_tokens: Sequence[int] = (),
    ) -> Granted:
        if document:
            kind = store_pb2.STORE_KIND_DOCUMENT
        request = store_pb2.ReserveRequest(
            kind=kind,
            tokens=encode_u32(tokens),
            context=pb.Context(tokens=encode_u32(context)),
            document=store_pb2.DocumentOptions(document=document, pinned=pinned, ttl_seconds=ttl),
            first_position=len(context) if first_position is None else first_position,
            exact_tokens=len(tokens) if exact is None else exact,
            allow_blended=allow_blended,
            segment_tokens=encode_u32(segment_tokens),
        )
        state = self.state
        wishes = wishes_of(
            request,
            space,
            cut(request, space),
            lambda chunk, share: self.parts.admission.admits(
                chunk.chain_hash, rank, share, chunk.tokens, state.usage.duplicate_bytes
            ),
        )
        promise = Promise(document, pinned, state.clock.wall() + ttl if ttl else 0.0)
        number, grants = self.writes.reserve(session, space, pb.Rank(tensor=rank), wishes, promise)
        return Granted(space, number, rank, grants, session)

    def write(self, granted: Granted) -> None:
        """The agent's copy, whenever it happens."""
        for chunk, place in granted.places():
            self.arena.view(place.slab, place.offset, place.payload_bytes)[:] = granted.bytes_of(chunk, place)

    def commit(self, granted: Granted) -> list[int]:
        written = [
            ((place.header, place.generation), checksum(granted.bytes_of(chunk, place)))
            for chunk, place in granted.places()
        ]
        return list(self.writes.commit(granted.session, granted.number, written)[0])

    def put(self, space: ResolvedSpace, tokens: Sequence[int], **options: object) -> Granted:
        """Reserve, write, commit: for every rank."""
        granted = None
        for rank in range(space.shape.ranks):
            granted = self.reserve(space, tokens, rank=rank, **options)  # type: ignore[arg-type]
            self.write(granted)
            if granted.number:
                assert not any(self.commit(granted))
        assert granted is not None
        return granted

    def lookup(
        self,
        space: ResolvedSpace,
        tokens: Sequence[int],
        *,
        request: str = "r",
        attempt: int = 1,
        rank: int = 0,
        session: bytes = SESSION,
        want_segments: bool = False,
        accept_blended: bool = False,
        classes: Sequence[int] = (),
        remaining: float = 5.0,
        prefill: int = 0,
        at_least: Sequence[pb.StreamPosition] = (),
        spans: Sequence[pb.OpaqueSpan] = (),
        caller: Waiting | None = None,
    ) -> "Found":
        message = store_pb2.LookupRequest(
            tokens=encode_u32(tokens),
            opaque_spans=spans,
            want_segments=want_segments,
            accept_blended=accept_blended,
            context_classes=classes,
            prefill_tokens_per_second=prefill,
        )
        holder = HolderKey(session, request, attempt, rank)
        responses = list(self.lookups.run(make_query(message, space), holder, at_least, remaining, caller or Waiting()))
        found = Found(
            space, holder, [item for part in responses for item in objects_in(part.objects)], responses[-1].summary
        )
        assert found.total() == len(tokens), "prefix, segments and shortfalls must add up"
        for item in found.objects:
            self.check_bytes(found, item)
        return found

    def check_bytes(self, found: "Found", item: Leased) -> None:
        assert self.read(item.place) == found.bytes_of(item), "an object has another's bytes"

    def read(self, place: store_pb2.ObjectPlace) -> bytes:
        return bytes(self.arena.view(place.slab, place.offset, place.payload_bytes))

    def begin(self, found: "Found", item: Leased) -> int:
        with self.state.lock:
            return self.state.begin_copy(found.holder, (item.place.header, item.place.generation))

    def end(self, found: "Found", item: Leased) -> None:
        with self.state.lock:
            self.state.leases.end(found.holder, (item.place.header, item.place.generation))


@dataclass
class Found:
    space: ResolvedSpace
    holder: HolderKey
    objects: list[Leased]
    summary: store_pb2.LookupSummary

    @property
    def prefix(self) -> int:
        return self.summary.prefix_tokens

    @property
    def segments(self) -> list[Segment]:
        return segments_in(self.summary.segments)

    @property
    def segment_tokens(self) -> int:
        return sum(segment.length for segment in self.segments)

    def total(self) -> int:
        return self.prefix + self.segment_tokens + sum(item.tokens for item in self.summary.shortfalls)

    def reasons(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for item in self.summary.shortfalls:
            counts[item.reason] = counts.get(item.reason, 0) + item.tokens
        return counts

    def bytes_of(self, item: Leased) -> bytes:
        place = item.place
        return known_bytes(
            self.space.space_id, item.domain, item.chain_hash, place.group, self.holder.rank, place.payload_bytes
        )

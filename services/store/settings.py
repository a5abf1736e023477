"""Settings of the store, with units, defaults and reasons."""

import re
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from services.common.arena_format import PAGE
from services.common.channels import target_of
from services.common.config import ServiceSettings
from services.common.identity import is_chunk_size
from services.common.redis_url import parse_route

_MIB = 1 << 20
_GIB = 1 << 30


class StoreSettings(ServiceSettings):
    """kvblend store: one place's KV bytes in shared memory, the way to L2, and telling matchers what is held."""

    service: ClassVar[str] = "store"

    listen: str = Field(
        "127.0.0.1:50052",
        description="Addresses to serve, comma-separated: host:port or unix:/path. Loopback by default: "
        "its callers are agents of the same host.",
    )
    name: str = Field(
        "local",
        description="Stable name of this store, 1 to 63 of a-z, 0-9 and -: matchers know what it owns by it, and it "
        "names the arena's directory.",
    )
    arena_dir: str = Field(
        "",
        description="Absolute directory of the arena, on a memory file system that agents map too; empty: "
        "/dev/shm/kvblend-<name>.",
    )
    arena_bytes: int = Field(
        4 * _GIB,
        ge=_MIB,
        description="Bytes of KV to hold (L1). Reserved in full at start; refused if there is no room.",
    )
    slab_bytes: int = Field(
        4 * _GIB,
        ge=256 << 10,
        description="Bytes of one file of the arena at most; the largest object must fit. 1 to 4 GiB: at a file's end "
        "up to one object's room is lost, and each file can lie on a NUMA node of its own.",
    )
    chunk_tokens: int = Field(
        256, description="Tokens of a chunk for engines that name none: a power of two from 16 to 1024."
    )
    matcher: str = Field(
        "",
        description="Where the matchers are: host:port, dns:///name:port or unix:/path (all that is behind it), or "
        "several replicas as IP:port or unix:/path, comma-separated; empty: prefix reuse only.",
    )
    matcher_timeout_seconds: float = Field(
        1.0, gt=0, le=60, description="Longest wait for a matcher in a lookup, whatever time the caller has left."
    )
    redis_url: str = Field(
        "",
        description="L2 (Redis 6.2 or later, or Valkey): redis://[user:password@]host[:port][/database], "
        "unix:///path, redis+sentinel://host,.../master or redis+cluster://host,...; rediss for TLS, with "
        "?ssl_ca_certs=/path and, for a client certificate, &ssl_certfile=/path&ssl_keyfile=/path; empty: no L2. "
        "The same text in every store that shares it.",
    )
    redis_key_prefix: str = Field(
        "kvblend:", description="In front of every key of L2; stores share objects only under the same prefix."
    )
    redis_ttl_seconds: int = Field(
        86_400, ge=1, description="Life of an object in L2: L2 must not fill up with what nobody asks for any more."
    )
    redis_part_bytes: int = Field(
        2 * _MIB,
        ge=_MIB,
        le=4 * _MIB,
        description="Objects lie in L2 in parts of at most so many bytes: Redis is slow with larger values.",
    )
    redis_connections: int = Field(
        16,
        ge=1,
        le=1024,
        description="Connections to each Redis server at most. It serves one after another: more only wait there.",
    )
    redis_connect_seconds: float = Field(
        1.0, gt=0, le=60, description="Longest time to connect, TLS and login included, whatever a caller has left."
    )
    redis_retry_seconds: float = Field(
        5.0,
        gt=0,
        le=300,
        description="A Redis server that failed three times in a row is tried again after so long; until then what it "
        "holds is a miss at once.",
    )
    l2_documents: Literal["through", "back", "none"] = Field(
        "through",
        description="Documents go to L2 when they are stored (through), when they are evicted (back), or never (none).",
    )
    l2_prompts: Literal["through", "back", "none"] = Field("through", description="The same of prompts.")
    l2_blended: Literal["through", "back", "none"] = Field(
        "none", description="The same of prompts' chunks that depend on reused segments: rarely worth the bytes."
    )
    l2_queue_chunks: int = Field(
        1024,
        ge=1,
        le=1_000_000,
        description="Chunks that wait to be written to L2; more are dropped, counted, and offered again later.",
    )
    l2_write_threads: int = Field(2, ge=1, le=16, description="Chunks written to L2 at once.")
    l2_threads: int = Field(
        8, ge=1, le=64, description="Chunks fetched from L2 at once, at most: as many as hide its latency are."
    )
    l2_fetch_share: float = Field(
        0.25, gt=0, le=1, description="Share of the arena that may be on its way from L2 at once."
    )
    l2_fetched: Literal["kept", "temporary"] = Field(
        "kept",
        description="What was fetched stays in the arena (kept), or leaves with its last lease (temporary): for an "
        "arena that is small beside what L2 holds.",
    )
    l2_patience: float = Field(
        0.02,
        ge=0,
        le=1,
        description="What a lookup loses to a slow L2 at most, as a share of the time in which the engine computes "
        "what the arena lacks.",
    )
    l2_steady_patience: float = Field(
        0.15,
        ge=0,
        le=1,
        description="The same while L2 has been as fast as expected, if the first chunk needs so long to arrive: the "
        "one prompt during which L2 becomes slow may lose this. 0: tiers that are far away help long prompts only.",
    )
    l2_timeout_seconds: float = Field(5.0, gt=0, le=300, description="Longest transfer of one object from or to L2.")
    lease_ttl_seconds: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="How long a lookup's lease forbids eviction: longer than an engine's queue. Later what is still "
        "there is still good.",
    )
    lease_session_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the arena that one agent's leases may protect; more is answered as QUOTA.",
    )
    lease_tenant_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the arena that one tenant's leases may protect; more is answered as QUOTA.",
    )
    verify_share: float = Field(
        1 / 256,
        ge=0,
        le=1,
        description="Share of leased objects whose readers compare their bytes with the checksum: memory that goes bad "
        "is noticed. All are compared on the first read after a crash.",
    )
    request_ttl_seconds: float = Field(
        600.0, gt=0, le=86_400, description="After this a request that was never ended is forgotten with its leases."
    )
    reservation_ttl_seconds: float = Field(
        30.0,
        ge=0,
        le=3_600,
        description="From reserve to commit. A later commit is refused; the room is kept until the copy has stopped.",
    )
    session_grace_seconds: float = Field(
        2.0, ge=0, le=300, description="How long an agent whose session stream broke keeps its leases: a reconnect."
    )
    duplicate_window_seconds: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="A blended prompt's chunk of known text is kept if offered twice within this.",
    )
    eviction_policy: Literal["density", "lru", "arc", "s3-fifo"] = Field(
        "density",
        description="What leaves first: density learns from the traffic how soon chunks return; the others are general "
        "policies to compare with (kvblend bench eviction).",
    )
    tenant_quota_bytes: dict[str, int] = Field(
        {},
        description="Tenant (* for any other) -> bytes of the arena that it may hold: it loses chunks of its own for "
        "more, and what then does not fit is answered as QUOTA. Empty: no quotas, only fair shares.",
    )
    tenant_idle_seconds: float = Field(
        3_600.0,
        gt=0,
        description="A tenant that asked nothing for this long has no fair share: its chunks go before others'.",
    )
    pinned_share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the arena, and of each tenant's quota, that pinned documents may hold; more is answered "
        "as QUOTA. Pins must leave room for what nobody pinned.",
    )
    evict_above: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Share of the arena in use above which eviction runs by itself: room without waiting.",
    )
    evict_to: float = Field(0.9, gt=0, le=1, description="Share of the arena in use at which it stops.")
    tenant_tokens: dict[str, list[str]] = Field(
        {}, description="Bearer token -> tenants it may act for (* for any); empty: every local caller for any."
    )

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", value):
            raise ValueError("must be 1 to 63 of a-z, 0-9 and -, not starting with -")
        return value

    @field_validator("arena_dir")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if value and not Path(value).is_absolute():
            raise ValueError("must be an absolute path, or empty")
        return value

    @field_validator("chunk_tokens")
    @classmethod
    def _chunk_size(cls, value: int) -> int:
        if not is_chunk_size(value):
            raise ValueError("must be a power of two from 16 to 1024")
        return value

    @field_validator("matcher")
    @classmethod
    def _targets(cls, value: str) -> str:
        if value:
            target_of(value)
        return value

    @field_validator("redis_url")
    @classmethod
    def _redis_route(cls, value: str) -> str:
        if value:
            parse_route(value)
        return value

    @field_validator("redis_key_prefix")
    @classmethod
    def _no_braces(cls, value: str) -> str:
        if "{" in value or "}" in value:
            raise ValueError("must not have braces: they say which part of a key chooses its slot")
        return value

    @field_validator("tenant_quota_bytes")
    @classmethod
    def _positive_quotas(cls, value: dict[str, int]) -> dict[str, int]:
        if any(quota < 0 for quota in value.values()):
            raise ValueError("quotas must be 0 or more bytes")
        return value

    @model_validator(mode="after")
    def _falling_watermark(self) -> "StoreSettings":
        if self.evict_to > self.evict_above:
            raise ValueError(f"evict_to must not be above evict_above = {self.evict_above}")
        return self

    @property
    def directory(self) -> Path:
        return Path(self.arena_dir or f"/dev/shm/kvblend-{self.name}")

    @property
    def slab_shape(self) -> tuple[int, int]:
        """(slabs, bytes of each): as few as slab_bytes allows, all of one size."""
        slabs = -(-self.arena_bytes // self.slab_bytes)
        return slabs, self.arena_bytes // slabs // PAGE * PAGE

    @property
    def matcher_target(self) -> str:
        """gRPC's target; empty without matchers."""
        return target_of(self.matcher) if self.matcher else ""

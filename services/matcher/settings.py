"""Settings of the matcher."""

from typing import ClassVar

from pydantic import Field

from services.common.config import ServiceSettings

_MIB = 1 << 20
_GIB = 1 << 30


class MatcherSettings(ServiceSettings):
    """Finds stored chunks in new prompts. What stores publish goes into a log, which every replica follows."""

    service: ClassVar[str] = "matcher"

    listen: str = Field(
        "127.0.0.1:50051",
        description="Addresses to serve, comma-separated: host:port or unix:/path. Loopback by default: "
        "there is no transport security yet.",
    )
    log: str = Field(
        "memory:",
        description="The log of stores' changes: memory: (gone with the process: stores publish again), sqlite:/path "
        "(one replica), or Redis for any number of replicas: redis://, rediss://, unix:///, "
        "redis+sentinel://host:port,.../name, redis+cluster://host:port,... Never a server that evicts.",
    )
    log_key_prefix: str = Field(
        "kvblend-log", description="Of the log's keys in Redis; replicas with the same one follow the same log."
    )
    memory_limit_bytes: int = Field(
        4 * _GIB,
        ge=32 * _MIB,
        description="Bytes of the table; over it, least recently matched entries are dropped here. A chunk of 256 "
        "tokens takes about 1.2 KB.",
    )
    snapshot_bytes: int = Field(
        64 * _MIB,
        ge=1 << 10,
        description="Bytes of records behind the last snapshot that make another one due (at least half of the table).",
    )

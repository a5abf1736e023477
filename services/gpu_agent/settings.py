"""Settings of the GPU agent."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from services.common.config import ServiceSettings


class AgentSettings(ServiceSettings):
    """The GPU agent: moves KV between one engine's memory and the store's arena."""

    service: ClassVar[str] = "gpu_agent"

    listen: str = Field(
        "127.0.0.1:50053",
        description="Addresses to serve, comma-separated: host:port or unix:/path. Loopback by default: "
        "there is no transport security yet.",
    )
    name: str = Field("agent", min_length=1, max_length=64, description="This agent's name, for people and the store.")
    store: str = Field("127.0.0.1:50052", min_length=1, description="The store: host:port or unix:/path.")
    store_token: str = Field("", description="Bearer token that the store knows this agent by; empty: none.")
    device: str = Field("cpu", description="Where the engine's KV memory is: cpu (shared memory) or cuda.")
    gpu: str = Field("", description="cuda: UUID of the GPU to serve (nvidia-smi -L); empty: the only visible one.")
    staging_mib: int = Field(
        32,
        ge=1,
        le=1024,
        description="cuda: MiB of one staging slot. Six are taken of GPU memory at start, and as many of pinned host "
        "memory; larger than a chunk's object is of no use, and below 4 the link is not used fully.",
    )
    hang_seconds: float = Field(
        10.0,
        gt=0,
        le=300,
        description="cuda: seconds after which a copy that does not end is answered as failed.",
    )
    shm_dir: Path = Field(
        Path("/dev/shm"), description="Directory in which engines' shared-memory files are looked up."
    )
    arena_dir: Path | None = Field(
        None, description="The arena's directory as this agent sees it; unset: as the store names it."
    )
    tenant_tokens: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Bearer token -> tenants it may act for, * for any. Empty: every local caller may act for any.",
    )
    max_mapped_bytes: int = Field(
        64 << 30, ge=1, description="Bytes of engine memory mapped at once; a registration beyond it is refused."
    )
    max_requests: int = Field(
        4096, ge=1, description="Open requests of an instance; the oldest is ended when one more begins."
    )
    copy_threads: int = Field(2, ge=1, le=64, description="CPU threads that one copy uses.")
    engine_grace_seconds: float = Field(
        2.0,
        ge=0,
        le=60,
        description="Seconds that a vanished engine's requests keep their leases, should it reconnect.",
    )
    heartbeat_seconds: float = Field(
        1.0,
        gt=0,
        le=5,
        description="Seconds between heartbeats to the store; its session limit must be several times it.",
    )
    answer_margin_ms: int = Field(
        10,
        ge=1,
        le=1000,
        description="Milliseconds of a call's deadline kept back: for a copy's last layers, and for the answer's way "
        "to the engine.",
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if value not in ("cpu", "cuda"):
            raise ValueError("must be cpu or cuda")
        return value

    @field_validator("shm_dir")
    @classmethod
    def _existing_directory(cls, value: Path) -> Path:
        if not value.is_dir():
            raise ValueError("must be an existing directory")
        return value

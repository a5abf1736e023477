"""Settings of the matcher."""

from typing import ClassVar

from pydantic import Field

from services.common.config import ServiceSettings


class MatcherSettings(ServiceSettings):
    """Finds stored chunks in new prompts. Its table lives in memory; stores publish into it."""

    service: ClassVar[str] = "matcher"

    listen: str = Field(
        "127.0.0.1:50051",
        description="Addresses to serve, comma-separated: host:port or unix:/path. Loopback by default: "
        "there is no transport security yet.",
    )

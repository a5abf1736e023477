"""The setting that names the log, as a log."""

from pathlib import Path

from services.common.redis_url import SCHEMES
from services.matcher.log.base import Log
from services.matcher.log.memory import MemoryLog
from services.matcher.log.redis import RedisLog
from services.matcher.log.sqlite import SqliteLog


def open_log(url: str, key_prefix: str) -> Log:
    """memory: (gone with the process), sqlite:/path or sqlite:relative/path (one replica), or Redis, for any number:
    see `parse_route`. A server that is away now is no error.

    Args:
        key_prefix: of the log's keys in Redis.

    Raises:
        ValueError: one line that says what is wrong, never with a credential.
    """
    scheme, colon, rest = url.partition(":")
    if url == "memory:":
        return MemoryLog()
    if scheme == "sqlite" and colon and rest:
        return SqliteLog(Path(rest))
    if scheme in SCHEMES and rest.startswith("//"):
        return RedisLog(url, key_prefix)
    raise ValueError(f"a log is memory:, sqlite:/path, or one of {', '.join(f'{name}://' for name in SCHEMES)}")

"""Refuses servers that may lose records by themselves."""

import time
from contextlib import suppress

from redis.exceptions import ResponseError

from services.common.logs import get_logger
from services.common.redis_connection import BoundedConnection, LinkError, Options, dial
from services.matcher.log.redis_link import RedisLink
from services.matcher.log.rules import unavailable

_EVERY_SECONDS = 5.0
# For servers of a cluster that do not hold the log now: callers wait for ours only.
_OTHERS_SECONDS = 0.25
_OLDEST = (6, 2)

_log = get_logger("log")


def refusal_of(info: dict[str, str]) -> str:
    """Why a server with this INFO must not hold the log; empty if it may."""
    version = info.get("redis_version", "0")
    if tuple(int(number) for number in version.split(".")[:2] if number.isdecimal()) < _OLDEST:
        return f"Redis {version} is too old for the log: 6.2 or later, or Valkey, is needed"
    policy = info.get("maxmemory_policy", "")
    if policy.startswith("allkeys-"):
        return f"a server with maxmemory-policy {policy} evicts the log's records: noeviction is needed"
    return ""


class RedisGuard:
    """Asks at the start, after reconnecting, and now and then; at most every few seconds."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        # None: never asked.
        self._refusal: str | None = None
        self._asked_at = float("-inf")
        self._dials_seen = -1
        self._warned = False

    def admit(self, deadline: float, *, now_and_then: bool = False) -> None:
        """Raises KvblendError LOG_UNAVAILABLE if the server is refused, or does not say what must be known.

        `now_and_then`: also if nothing points to a change; for callers that do not mind a round trip.
        """
        due = now_and_then or self._refusal or self._link.dials != self._dials_seen
        if self._refusal is None or (due and time.monotonic() - self._asked_at >= _EVERY_SECONDS):
            # Others go on with the last answer meanwhile.
            self._asked_at = time.monotonic()
            try:
                self._refusal = self.ask(deadline)
            except BaseException:
                self._asked_at = float("-inf")
                raise
        if self._refusal:
            raise unavailable(f"the log at {self._link.route.name} is refused: {self._refusal}")

    def ask(self, deadline: float) -> str:
        """Why the log's server, or one of the cluster that may come to hold it, is refused; empty if none is."""
        self._link.refresh(deadline)
        info = self._link.run(self._info, deadline)
        self._dials_seen = self._link.dials
        return next(filter(None, map(refusal_of, [info, *self._others(deadline)])), "")

    def _others(self, deadline: float) -> list[dict[str, str]]:
        """INFO of the cluster's other primaries; without those that do not answer."""
        found = []
        for options in self._link.route.primaries():
            if options != self._link.primary:
                with suppress(LinkError, ResponseError):
                    found.append(_info_of(options, min(deadline, time.monotonic() + _OTHERS_SECONDS)))
        return found

    def _info(self, connection: BoundedConnection) -> dict[str, str]:
        info = _parsed(connection.call("INFO"))
        if not self._warned and not _keeps(connection, info):
            self._warned = True
            name = self._link.route.name
            _log.warning("the log's server keeps nothing on disk: a restart of it loses the log", server=name)
        return info


def _info_of(options: Options, deadline: float) -> dict[str, str]:
    connection = dial(options, deadline)
    try:
        connection.until(deadline)
        return _parsed(connection.call("INFO"))
    finally:
        connection.close()


def _parsed(reply: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _keeps(connection: BoundedConnection, info: dict[str, str]) -> bool:
    """Whether the server writes to disk, by log or by dumps. Yes where it may not be asked."""
    if info.get("aof_enabled") == "1":
        return True
    try:
        return bool(connection.call("CONFIG", "GET", "save")[1:] != [b""])
    except ResponseError:
        return True

"""The log in Redis or Valkey: a single server, one watched by Sentinels, or a cluster."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from services.common.redis_connection import Argument, BoundedConnection
from services.common.redis_url import parse_route
from services.matcher.log.base import (
    PART_BYTES,
    START_CHAIN,
    Appended,
    Page,
    Position,
    Record,
    SnapshotInfo,
    digest_of,
)
from services.matcher.log.redis_guard import RedisGuard
from services.matcher.log.redis_link import RedisLink
from services.matcher.log.redis_scripts import APPEND, FORMAT, Keys, digits
from services.matcher.log.redis_snapshots import RedisSnapshots
from services.matcher.log.rules import chained, check_position, refuse_stale, unavailable

# Redis reads by count, not by bytes: what is read at once if records are suddenly larger than the last ones.
_READ_RECORDS = 64
# Of a call's time; the rest is for the reply to a wait that brought nothing.
_WAIT_SHARE = 0.8

_T = TypeVar("_T")


class RedisLog:
    """See `Log`. Durable is what the primary has acknowledged: behind a failover the log may end earlier, which
    readers (`LogGap`) and writers (`Appended.durable`) notice.

    Args:
        url: see `parse_route`.
        key_prefix: in front of every key, and their hash tag; replicas share a log only under the same prefix.

    Raises:
        ValueError: an argument that cannot be; says which, without credentials.
    """

    kind = "redis"

    def __init__(self, url: str, key_prefix: str) -> None:
        self._keys = Keys(key_prefix)
        self._link = RedisLink(parse_route(url, self._keys.records))
        self._guard = RedisGuard(self._link)
        self._snapshots = RedisSnapshots(self._link, self._keys)
        self._largest = PART_BYTES

    def check(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        refusal = self._guard.ask(deadline)
        if not refusal:
            found = self._link.run(lambda connection: connection.call("HGET", self._keys.state, "format"), deadline)
            refusal = _format_refusal(found)
        if refusal:
            raise ValueError(f"the log at {self._link.route.name} is refused: {refusal}")

    def append(self, page: Page, timeout: float) -> Appended:
        if page.count < 1 or page.first < 1:
            return self.tail(page.store, page.epoch, timeout)
        before, last = digits(page.first - 1), digits(page.last)
        arguments = (before, last, int(page.reset), digest_of(page.data), page.data)
        return self._advance(page.store, page.epoch, arguments, timeout)

    def tail(self, store: str, epoch: int, timeout: float) -> Appended:
        return self._advance(store, epoch, (), timeout)

    def _advance(self, store: str, epoch: int, page: Sequence[Argument], timeout: float) -> Appended:
        keys = [self._keys.records, self._keys.heads, self._keys.state]
        outcome, held, number, chain = self._run(
            lambda connection: connection.run(APPEND, keys, store, digits(epoch), *page), timeout
        )
        if outcome == b"format":
            raise unavailable(_format_refusal(held))
        if outcome == b"stale":
            refuse_stale(store, epoch, int(held))
        return Appended(int(held), Position(int(number), chain))

    def read(self, after: Position, max_bytes: int, wait: float, timeout: float) -> list[Record]:
        stop_waiting_at = time.monotonic() + min(wait, _WAIT_SHARE * timeout)
        count = min(_READ_RECORDS, max(1, max_bytes // self._largest))

        def operation(connection: BoundedConnection) -> list[list[object]] | None:
            # In one go with the question for records: whatever server this is, it must have `after`.
            self._ask_state(connection)
            wait_ms = round(1000 * (stop_waiting_at - time.monotonic()))
            block = ("BLOCK", wait_ms) if wait_ms > 0 else ()
            after_id = f"{after.number}-0"
            connection.send("XREAD", "COUNT", count, *block, "STREAMS", self._keys.records, after_id)
            check_position(after, *_state(connection.receive()))
            found: list[list[object]] | None = connection.receive()
            return found

        found = self._run(operation, timeout, now_and_then=True)
        if not found:
            return []
        rows = [_row(*entry) for entry in found[0][1]]  # type: ignore[attr-defined]
        self._largest = max(1, *(len(data) for _, _, data in rows))
        return chained(after, rows, max_bytes)

    def end(self, timeout: float) -> Position:
        end, _ = self._run(self._current_state, timeout)
        return end

    def save_snapshot(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        self._guard.admit(time.monotonic() + timeout)
        return self._snapshots.save(position, parts, timeout)

    def snapshot(self, timeout: float) -> SnapshotInfo | None:
        deadline = time.monotonic() + timeout
        self._guard.admit(deadline)
        return self._snapshots.latest(max(0.0, deadline - time.monotonic()))

    def read_snapshot(self, info: SnapshotInfo, timeout: float) -> Iterator[bytes]:
        self._guard.admit(time.monotonic() + timeout)
        return self._snapshots.read(info, timeout)

    def size_behind_snapshot(self, timeout: float) -> int:
        def operation(connection: BoundedConnection) -> int:
            connection.send("HGET", self._keys.state, "total")
            connection.send("HGET", self._keys.snapshot, "total")
            return int(connection.receive() or 0) - int(connection.receive() or 0)

        return self._run(operation, timeout)

    def close(self) -> None:
        self._link.close()

    def _current_state(self, connection: BoundedConnection) -> tuple[Position, int]:
        self._ask_state(connection)
        return _state(connection.receive())

    def _ask_state(self, connection: BoundedConnection) -> None:
        connection.send("HMGET", self._keys.state, "format", "number", "chain", "trimmed")

    def _run(self, operation: Callable[[BoundedConnection], _T], timeout: float, *, now_and_then: bool = False) -> _T:
        deadline = time.monotonic() + timeout
        self._guard.admit(deadline, now_and_then=now_and_then)
        return self._link.run(operation, deadline)


def _format_refusal(found: bytes | None) -> str:
    if found in (None, FORMAT):
        return ""
    return f"it has format {found!r}; this version of kvblend reads format {FORMAT!r}"


def _state(reply: list[bytes | None]) -> tuple[Position, int]:
    """The log's end, and the number up to which it is trimmed."""
    found, number, chain, trimmed = reply
    if refusal := _format_refusal(found):
        raise unavailable(f"the log is refused: {refusal}")
    return Position(int(number or 0), chain or START_CHAIN), int(trimmed or 0)


def _row(identity: bytes, fields: list[bytes]) -> tuple[int, bytes, bytes]:
    _, chain, _, _, _, data = fields
    return int(identity.partition(b"-")[0]), chain, data

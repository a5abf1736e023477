"""Snapshots in Redis: parts under a name of their own, and one hash that makes them the log's snapshot.

One replica writes at a time, holding a lease that it renews with every part. Who lost it (it stood still too long)
is refused by the scripts, so nothing of it can end up in another's snapshot. What a writer that died left behind
is in `begun`, and removed by the next.
"""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from services.common.errors import KvblendError
from services.common.redis_connection import BoundedConnection, Script
from services.matcher.log.base import LogGap, Position, SnapshotInfo
from services.matcher.log.redis_link import RedisLink
from services.matcher.log.redis_scripts import BEGUN, HOLD, RELEASE, SWITCH, WRITE_PART, Keys
from services.matcher.log.rules import check_part_size, checksum_of, unavailable

_LEASE_SECONDS = 10.0
_CHECKSUM_BYTES = 8
# Deleted at once: little enough for the server to serve others in between.
_SLICE_PARTS = 64
_SLICE_RECORDS = 100


class RedisSnapshots:
    def __init__(self, link: RedisLink, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def latest(self, timeout: float) -> SnapshotInfo | None:
        number, chain, parts = self._call(timeout, "HMGET", self._keys.snapshot, "number", "chain", "parts")
        return None if number is None else SnapshotInfo(Position(int(number), chain), int(parts))

    def read(self, info: SnapshotInfo, timeout: float) -> Iterator[bytes]:
        number, chain, name, checksums = self._call(
            timeout, "HMGET", self._keys.snapshot, "number", "chain", "name", "checksums"
        )
        if number is None or Position(int(number), chain) != info.position:
            raise LogGap("that snapshot has been replaced")
        if len(checksums) != info.parts * _CHECKSUM_BYTES:
            raise LogGap("the snapshot is damaged: its checksums are not all there")
        return (
            self._part(name, index, checksums[index * _CHECKSUM_BYTES :][:_CHECKSUM_BYTES], timeout)
            for index in range(info.parts)
        )

    def _part(self, name: bytes, index: int, checksum: bytes, timeout: float) -> bytes:
        part: bytes | None = self._call(timeout, "GET", self._keys.part(name, index))
        if part is None:
            raise LogGap(f"part {index} of the snapshot is missing")
        if checksum_of(part) != checksum:
            raise LogGap(f"part {index} of the snapshot is damaged")
        return part

    def save(self, position: Position, parts: Iterable[bytes], timeout: float) -> bool:
        writer = _Writer(self._link, self._keys, position, timeout)
        if not writer.hold():
            return False
        try:
            latest = self.latest(timeout)
            if latest is not None and latest.position.number > position.number:
                return False
            writer.remove_leftovers()
            saved = writer.write(parts)
        finally:
            # Of no consequence if it fails: the next writer does it.
            with suppress(KvblendError):
                writer.clean_up()
        if saved:
            with suppress(KvblendError):
                self._trim(position.number, timeout)
        return saved

    def _trim(self, number: int, timeout: float) -> None:
        first_kept = f"{number + 1}-0"
        arguments = ("XTRIM", self._keys.records, "MINID")
        while self._call(timeout, *arguments, "~", first_kept, "LIMIT", _SLICE_RECORDS):
            pass
        # Small records share nodes of the stream, and only whole ones have gone so far.
        self._call(timeout, *arguments, first_kept)

    def _call(self, timeout: float, *arguments: Any) -> Any:
        return self._link.run(lambda connection: connection.call(*arguments), time.monotonic() + timeout)


class _Writer:
    """One attempt to write a snapshot; `timeout` is for each step."""

    def __init__(self, link: RedisLink, keys: Keys, position: Position, timeout: float) -> None:
        self._link = link
        self._keys = keys
        self._position = position
        self._timeout = timeout
        self._token = secrets.token_hex(8).encode()
        self._name = b"%d-%b" % (position.number, self._token)
        self._lease_ms = round(1000 * max(_LEASE_SECONDS, 3 * timeout))

    def hold(self) -> bool:
        return bool(self._script(HOLD, [self._keys.lease], self._lease_ms))

    def write(self, parts: Iterable[bytes]) -> bool:
        """False if somebody else has taken over."""
        checksums = []
        for index, part in enumerate(parts):
            check_part_size(part)
            key = self._keys.part(self._name, index)
            keys = [self._keys.lease, self._keys.begun, key]
            if not self._script(WRITE_PART, keys, self._lease_ms, self._name, index + 1, part):
                return False
            if self._run(lambda connection, key=key: connection.call("GET", key)) != part:  # type: ignore[misc]
                raise unavailable(f"part {index} of the snapshot reads back differently")
            checksums.append(checksum_of(part))
        return self._switch(checksums)

    def _switch(self, checksums: Sequence[bytes]) -> bool:
        number, chain = self._position
        keys = [self._keys.lease, self._keys.snapshot, self._keys.state, self._keys.records]
        outcome = self._script(SWITCH, keys, self._name, number, chain, len(checksums), b"".join(checksums))
        if outcome == b"gap":
            raise LogGap(f"record {number} is not this log's")
        return bool(outcome == b"ok")

    def remove_leftovers(self) -> None:
        """Of every snapshot but the log's one. Only what had been begun before us: we have the lease when we ask."""
        current, *begun = self._script(BEGUN, [self._keys.lease, self._keys.snapshot, self._keys.begun]) or [b""]
        for name, parts in zip(begun[::2], begun[1::2], strict=True):
            if name == current:
                continue
            names = [self._keys.part(name, index) for index in range(int(parts))]
            for first in range(0, len(names), _SLICE_PARTS):
                some = names[first : first + _SLICE_PARTS]
                self._run(lambda connection, some=some: connection.call("UNLINK", *some))  # type: ignore[misc]
            self._run(lambda connection, name=name: connection.call("HDEL", self._keys.begun, name))  # type: ignore[misc]

    def clean_up(self) -> None:
        """The snapshot before, or what we wrote of one that was not finished; then others may write."""
        self.remove_leftovers()
        self._script(RELEASE, [self._keys.lease])

    def _script(self, script: Script, keys: list[bytes], *arguments: Any) -> Any:
        return self._run(lambda connection: connection.run(script, keys, self._token, *arguments))

    def _run(self, operation: Callable[[BoundedConnection], Any]) -> Any:
        return self._link.run(operation, time.monotonic() + self._timeout)

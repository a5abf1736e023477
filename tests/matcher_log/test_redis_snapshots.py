"""Snapshots in Redis: damage, replicas that write at once, writers that die or stand still."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from log_kit import SECONDS, OpenLog, append_all, drain, is_gap, page, reason_of
from redis_server import RedisServer
from redis_topologies import client_of

from services.matcher.log.base import Log


@pytest.fixture
def raw(redis_unix: RedisServer) -> Iterator[Any]:
    with client_of(redis_unix) as client:
        yield client


@pytest.fixture
def open_replica(redis_unix: RedisServer, opened: OpenLog, fresh_prefix: str) -> Callable[[], Log]:
    """Each call: one more replica on the same log."""
    return lambda: opened(redis_unix.unix_url, fresh_prefix)


def keys_of(raw: Any, prefix: str) -> set[bytes]:
    """Without the tag in front."""
    return {bytes(key).partition(b"}:")[2] for key in raw.scan_iter(match=f"{{{prefix}}}:*", count=1000)}


def parts_of(log: Log) -> list[bytes]:
    info = log.snapshot(SECONDS)
    assert info is not None
    return list(log.read_snapshot(info, SECONDS))


def tidy(raw: Any, prefix: str, parts: int) -> bool:
    """Nothing but the log, one snapshot and its parts."""
    keys = keys_of(raw, prefix)
    name = raw.hget(f"{{{prefix}}}:snapshot", "name")
    expected = {b"snapshot:%b:%d" % (name, index) for index in range(parts)}
    return keys - {b"records"} == {b"heads", b"state", b"snapshot", b"begun"} | expected


@pytest.mark.parametrize("damage", ["missing", "changed", "shorter", "checksums", "no checksums"])
def test_a_damaged_snapshot_is_a_gap(damage: str, raw: Any, open_replica: Callable[[], Log], fresh_prefix: str) -> None:
    log = open_replica()
    assert log.save_snapshot(append_all(log, page()), [b"zero", b"one", b"two"], SECONDS)
    snapshot = f"{{{fresh_prefix}}}:snapshot"
    part = f"{snapshot}:{raw.hget(snapshot, 'name').decode()}:1"
    if damage == "missing":
        raw.delete(part)
    elif damage == "changed":
        raw.setrange(part, 1, b"N")
    elif damage == "shorter":
        raw.set(part, b"on")
    elif damage == "checksums":
        raw.hset(snapshot, "checksums", bytes(24))
    else:
        raw.hset(snapshot, "checksums", b"")
    assert is_gap(parts_of, log)
    assert log.save_snapshot(log.end(SECONDS), [b"sound"], SECONDS), "the same position again mends it"
    assert parts_of(log) == [b"sound"]


def test_a_reader_of_a_snapshot_that_is_replaced_meanwhile_never_mixes_the_two(open_replica: Callable[[], Log]) -> None:
    log = open_replica()
    end = append_all(log, page())
    assert log.save_snapshot(end, [b"old 0", b"old 1"], SECONDS)
    info = log.snapshot(SECONDS)
    assert info is not None
    reading = log.read_snapshot(info, SECONDS)
    assert next(reading) == b"old 0"
    assert open_replica().save_snapshot(end, [b"new 0", b"new 1"], SECONDS)
    assert is_gap(next, reading)


def test_replicas_that_save_at_once_leave_one_whole_snapshot(
    raw: Any, open_replica: Callable[[], Log], fresh_prefix: str
) -> None:
    log = open_replica()
    append_all(log, *(page("a", number) for number in range(1, 9)))
    positions = [record.position for record in drain(log)]
    saved: list[int] = []

    def save(replica: Log) -> None:
        for position in positions:
            if replica.save_snapshot(position, [b"%d/%d" % (position.number, part) for part in range(3)], SECONDS):
                saved.append(position.number)

    savers = [threading.Thread(target=save, args=(open_replica(),)) for _ in range(3)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    info = log.snapshot(SECONDS)
    assert info is not None
    assert info.position.number == max(saved)
    assert parts_of(log) == [b"%d/%d" % (info.position.number, part) for part in range(3)]
    assert tidy(raw, fresh_prefix, 3)


def test_while_one_replica_writes_another_is_turned_away(open_replica: Callable[[], Log]) -> None:
    log, other = open_replica(), open_replica()
    end = append_all(log, page())
    turned_away: list[bool] = []

    def parts() -> Iterator[bytes]:
        yield b"a"
        turned_away.append(other.save_snapshot(end, [b"other"], SECONDS))

    assert log.save_snapshot(end, parts(), SECONDS)
    assert turned_away == [False]
    assert parts_of(other) == [b"a"]
    assert other.save_snapshot(end, [b"later"], SECONDS)


def test_what_a_dead_writer_left_is_removed_by_the_next(
    raw: Any, open_replica: Callable[[], Log], fresh_prefix: str
) -> None:
    log, dying = open_replica(), open_replica()
    end = append_all(log, page())
    assert log.save_snapshot(end, [b"before"], SECONDS)
    end = append_all(log, page("a", 2))

    def parts() -> Iterator[bytes]:
        yield from (b"one", b"two", b"three")
        # Cut off from the server, so that it cannot even clean up.
        dying.close()
        yield b"four"

    assert reason_of(dying.save_snapshot, end, parts(), SECONDS) == "LOG_UNAVAILABLE"
    assert parts_of(log) == [b"before"]
    assert not tidy(raw, fresh_prefix, 1)
    assert not log.save_snapshot(end, [b"after"], SECONDS), "the dead writer's lease still runs"
    assert raw.pttl(f"{{{fresh_prefix}}}:lease") > 0, "but not forever"
    raw.delete(f"{{{fresh_prefix}}}:lease")

    def parts_after() -> Iterator[bytes]:
        assert len([key for key in keys_of(raw, fresh_prefix) if key.startswith(b"snapshot:")]) == 1, "only the old one"
        yield from (b"after", b"wards")

    assert log.save_snapshot(end, parts_after(), SECONDS)
    assert parts_of(log) == [b"after", b"wards"]
    assert tidy(raw, fresh_prefix, 2)


@pytest.mark.parametrize(("parts_before", "parts_after"), [(0, 0), (1, 0), (1, 2)])
def test_a_writer_that_stood_still_and_lost_its_lease_changes_nothing(
    parts_before: int, parts_after: int, raw: Any, open_replica: Callable[[], Log], fresh_prefix: str
) -> None:
    slow, quick = open_replica(), open_replica()
    first = append_all(slow, page("a", 1))
    second = append_all(slow, page("a", 2))

    def parts() -> Iterator[bytes]:
        yield from [b"slow"] * parts_before
        raw.delete(f"{{{fresh_prefix}}}:lease")
        assert quick.save_snapshot(first, [b"quick"], SECONDS)
        yield from [b"slow"] * parts_after

    assert not slow.save_snapshot(second, parts(), SECONDS)
    assert parts_of(slow) == [b"quick"]
    assert tidy(raw, fresh_prefix, 1)


def test_a_writer_that_lost_its_lease_to_one_still_writing_leaves_that_one_alone(
    raw: Any, open_replica: Callable[[], Log], fresh_prefix: str
) -> None:
    slow, quick = open_replica(), open_replica()
    end = append_all(slow, page())
    quick_has_begun, slow_has_ended = threading.Event(), threading.Event()
    saved: list[bool] = []

    def quick_parts() -> Iterator[bytes]:
        yield b"quick 0"
        quick_has_begun.set()
        assert slow_has_ended.wait(SECONDS)
        yield b"quick 1"

    taking_over = threading.Thread(target=lambda: saved.append(quick.save_snapshot(end, quick_parts(), SECONDS)))

    def slow_parts() -> Iterator[bytes]:
        yield b"slow 0"
        raw.delete(f"{{{fresh_prefix}}}:lease")
        taking_over.start()
        assert quick_has_begun.wait(SECONDS)
        yield b"slow 1"

    assert not slow.save_snapshot(end, slow_parts(), SECONDS)
    assert not slow.save_snapshot(end, [b"again"], SECONDS), "the lease is still the other's"
    slow_has_ended.set()
    taking_over.join()
    assert saved == [True]
    assert parts_of(slow) == [b"quick 0", b"quick 1"]
    assert tidy(raw, fresh_prefix, 2)


def test_parts_lost_before_the_switch_leave_the_old_snapshot(
    raw: Any, open_replica: Callable[[], Log], fresh_prefix: str
) -> None:
    log = open_replica()
    end = append_all(log, page())
    assert log.save_snapshot(end, [b"old"], SECONDS)

    def parts() -> Iterator[bytes]:
        yield b"new 0"
        for key in raw.scan_iter(match=f"{{{fresh_prefix}}}:snapshot:*", count=1000):
            if raw.get(key) == b"new 0":
                raw.delete(key)
        yield b"new 1"

    assert not log.save_snapshot(end, parts(), SECONDS)
    assert parts_of(log) == [b"old"]
    assert tidy(raw, fresh_prefix, 1)

"""The log in one Redis server that is lost, stands still, drips, is full, or was changed by other hands."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from log_kit import EPOCH, MANY_BYTES, SECONDS, OpenLog, append_all, drain, is_gap, page, reason_of
from redis_server import RedisServer, free_port, redis_server
from redis_topologies import client_of, wait_until

from services.common.errors import KvblendError
from services.matcher.log.base import START, Log, LogGap, Record

MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One of its own, that a test may kill."""
    with redis_server() as started:
        yield started


def every_call(log: Log, timeout: float) -> set[str]:
    """The reasons with which every kind of call fails."""
    calls = [
        (log.check, timeout),
        (log.append, page("other"), timeout),
        (log.tail, "a", EPOCH, timeout),
        (log.read, START, MIB, timeout, timeout),
        (log.end, timeout),
        (log.save_snapshot, START, [b"x"], timeout),
        (log.snapshot, timeout),
        (log.size_behind_snapshot, timeout),
    ]
    return {reason_of(*call) for call in calls}


def test_a_server_that_lost_everything_shows_to_readers_and_writers(server: RedisServer, opened: OpenLog) -> None:
    log = opened(server.unix_url, "kvblend")
    end = append_all(log, page("a", 1), page("a", 2))
    server.kill()
    assert every_call(log, 1.0) == {"LOG_UNAVAILABLE"}
    server.start()
    assert is_gap(log.read, end, MIB, SECONDS / 2, SECONDS)
    assert log.tail("a", EPOCH, SECONDS).durable == 0
    assert log.append(page("a", 3), SECONDS).durable == 0
    assert log.read(START, MIB, 0, SECONDS) == []
    append_all(log, page("b", 1), page("a", 1, 2))
    assert is_gap(log.read, end, MIB, 0, SECONDS), "another record has that number now"


def test_a_waiting_reader_notices_that_the_server_lost_everything(server: RedisServer, opened: OpenLog) -> None:
    log = opened(server.unix_url, "kvblend")
    end = append_all(log, page())
    found: list[str] = []

    def follow() -> None:
        give_up_at = time.monotonic() + SECONDS
        while "gap" not in found and time.monotonic() < give_up_at:
            try:
                found.extend("records" for _ in log.read(end, MIB, SECONDS / 2, SECONDS))
            except KvblendError as error:
                found.append(error.reason)
                time.sleep(0.01)
            except LogGap:
                found.append("gap")

    reader = threading.Thread(target=follow)
    reader.start()
    server.kill()
    server.start()
    append_all(opened(server.unix_url, "kvblend"), page("b", data=b"another one"), page("b", 2))
    reader.join()
    assert set(found) <= {"gap", "LOG_UNAVAILABLE"}
    assert "gap" in found


def test_every_call_to_a_server_that_stands_still_ends_in_its_time(server: RedisServer, opened: OpenLog) -> None:
    log = opened(server.unix_url, "kvblend")
    append_all(log, page())
    server.freeze()
    assert every_call(log, 0.1) == {"LOG_UNAVAILABLE"}
    fresh = opened(server.tcp_url, "kvblend")
    assert every_call(fresh, 0.1) == {"LOG_UNAVAILABLE"}
    server.thaw()
    assert [record.data for record in drain(log)][:1] == [page().data]


def test_an_append_without_an_answer_may_be_repeated(server: RedisServer, opened: OpenLog) -> None:
    log = opened(server.unix_url, "kvblend")
    append_all(log, page("a", 1))
    server.freeze()
    assert reason_of(log.append, page("a", 2), 0.3) == "LOG_UNAVAILABLE"
    server.thaw()
    wait_until(lambda: log.tail("a", EPOCH, SECONDS).durable == 2)
    appended = log.append(page("a", 2), SECONDS)
    assert (appended.durable, appended.end.number) == (2, 2)
    assert [record.data for record in drain(log)] == [page("a", 1).data, page("a", 2).data]


def test_a_server_that_drips_is_left_in_time(opened: OpenLog) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stop = threading.Event()

        def drip() -> None:
            listening.settimeout(0.05)
            while not stop.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(1)
                    try:
                        connection.sendall(b"$1000000\r\n")
                        while not stop.wait(0.02):
                            connection.sendall(b"x")
                    except OSError:
                        continue

        dripping = threading.Thread(target=drip)
        dripping.start()
        log = opened(f"redis://127.0.0.1:{listening.getsockname()[1]}", "kvblend")
        try:
            assert reason_of(log.tail, "a", EPOCH, 0.3) == "LOG_UNAVAILABLE"
        finally:
            stop.set()
            dripping.join()


def test_a_server_that_is_not_there_yet_is_used_when_it_comes(opened: OpenLog) -> None:
    with redis_server() as server:
        server.kill()
        log = opened(server.unix_url, "kvblend")
        assert reason_of(log.check, 0.5) == "LOG_UNAVAILABLE"
        assert reason_of(log.append, page(), 0.5) == "LOG_UNAVAILABLE"
        server.start()
        append_all(log, page())
    nowhere = opened(f"redis://127.0.0.1:{free_port()}", "kvblend")
    with pytest.raises(KvblendError, match="cannot be reached"):
        nowhere.end(SECONDS)


def test_a_full_server_refuses_in_words_and_keeps_the_log_whole(opened: OpenLog) -> None:
    with redis_server("--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        log = opened(server.unix_url, "kvblend")
        pages = [page("a", number, data=bytes(MIB)) for number in range(1, 20)]
        with pytest.raises(KvblendError, match="maxmemory") as caught:
            append_all(log, *pages)
        assert caught.value.reason == "LOG_UNAVAILABLE"
        held = log.tail("a", EPOCH, SECONDS).durable
        assert 0 < held < 19
        assert len(drain(log)) == held
        with client_of(server) as client:
            client.config_set("maxmemory", "0")
        append_all(log, page("a", held + 1))


def test_scripts_that_the_server_forgot_are_sent_again(
    redis_unix: RedisServer, opened: OpenLog, fresh_prefix: str
) -> None:
    log = opened(redis_unix.unix_url, fresh_prefix)
    append_all(log, page("a", 1))
    with client_of(redis_unix) as client:
        client.script_flush()
    append_all(log, page("a", 2))


def test_a_hole_in_the_records_is_a_gap(redis_unix: RedisServer, opened: OpenLog, fresh_prefix: str) -> None:
    log = opened(redis_unix.unix_url, fresh_prefix)
    append_all(log, *(page("a", number) for number in range(1, 6)))
    with client_of(redis_unix) as client:
        client.xdel(f"{{{fresh_prefix}}}:records", "3-0")
    before: list[Record] = log.read(START, MANY_BYTES, 0, SECONDS)
    assert [record.position.number for record in before] == [1, 2]
    assert is_gap(log.read, before[-1].position, MIB, 0, SECONDS)


def test_records_of_other_bytes_are_a_gap(redis_unix: RedisServer, opened: OpenLog, fresh_prefix: str) -> None:
    log = opened(redis_unix.unix_url, fresh_prefix)
    end = append_all(log, page())
    fields = {"chain": end.chain, "total": 3, "data": b"bad"}
    with client_of(redis_unix) as client:
        client.xadd(f"{{{fresh_prefix}}}:records", fields, id="2-0")
    assert is_gap(log.read, end, MIB, 0, SECONDS)
    # And as that number is taken the log stops rather than going on beside it.
    assert reason_of(log.append, page("a", 2), SECONDS) == "LOG_UNAVAILABLE"


def test_trimmed_records_give_their_memory_back(opened: OpenLog) -> None:
    with redis_server() as server, client_of(server) as client:
        log = opened(server.unix_url, "kvblend")
        before = client.info("memory")["used_memory"]
        end = append_all(log, *(page("a", number, data=bytes(MIB)) for number in range(1, 31)))
        append_all(log, *(page("b", number) for number in range(1, 300)))
        small = drain(log, end)[-2].position
        assert client.info("memory")["used_memory"] > before + 30 * MIB
        assert log.save_snapshot(small, [b"part"], SECONDS)
        wait_until(lambda: client.info("memory")["used_memory"] < before + 5 * MIB)
        assert client.xlen("{kvblend}:records") == 1
        assert len(drain(log, small)) == 1


def test_logs_under_different_prefixes_share_a_server(
    redis_unix: RedisServer, opened: OpenLog, fresh_prefix: str
) -> None:
    one, other = opened(redis_unix.unix_url, fresh_prefix), opened(redis_unix.tcp_url, fresh_prefix + "-other")
    append_all(one, page("a", 1), page("a", 2))
    assert other.end(SECONDS) == START
    again = opened(redis_unix.tcp_url, fresh_prefix)
    assert drain(again) == drain(one)

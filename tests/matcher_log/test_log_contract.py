"""What every log does, whichever kind it is."""

import threading
import time

import pytest
from log_kit import EPOCH, SECONDS, append_all, drain, foreign, is_gap, page, reason_of

from services.matcher.log.base import PART_BYTES, START, Appended, Log, LogGap, Position, Record, chain_of

MIB = 1 << 20


def test_a_new_log_is_empty(log: Log) -> None:
    log.check(SECONDS)
    assert log.end(SECONDS) == START
    assert log.tail("a", EPOCH, SECONDS) == Appended(0, START)
    assert log.read(START, MIB, 0, SECONDS) == []
    assert log.snapshot(SECONDS) is None
    assert log.size_behind_snapshot(SECONDS) == 0


def test_records_are_numbered_chained_and_in_the_order_of_appending(log: Log) -> None:
    pages = [page("a", 1, 3), page("b", 1), page("a", 4), page("b", 2, 10, data=bytes(range(256)))]
    end = append_all(log, *pages)
    expected = []
    chain = START.chain
    for number, item in enumerate(pages, 1):
        chain = chain_of(chain, item.data)
        expected.append(Record(Position(number, chain), item.data))
    assert drain(log) == expected
    assert end == log.end(SECONDS) == expected[-1].position
    assert log.size_behind_snapshot(SECONDS) == sum(len(item.data) for item in pages)


def test_a_repeat_changes_nothing_and_is_answered_like_the_page(log: Log) -> None:
    append_all(log, page("a", 1, 5), page("b", 1))
    first = log.append(page("a", 6, 5), SECONDS)
    assert log.append(page("a", 6, 5), SECONDS) == first
    assert log.append(page("a", 1, 5), SECONDS) == first
    assert first.durable == 10
    assert len(drain(log)) == 3


@pytest.mark.parametrize("wrong", [page("a", 7), page("a", 5, 3), page("a", 4, 2), page("a", 6, 0), page("a", 0, 6)])
def test_a_page_that_does_not_follow_is_answered_with_where_the_stream_stands(log: Log, wrong: object) -> None:
    end = append_all(log, page("a", 1, 5))
    assert log.append(wrong, SECONDS) == Appended(5, end)
    assert log.append(page("b", 2), SECONDS) == Appended(0, end)
    assert len(drain(log)) == 1


def test_a_newer_epoch_starts_at_one_and_an_older_one_is_stale(log: Log) -> None:
    append_all(log, page("a", 1, 5))
    assert log.tail("a", EPOCH + 1, SECONDS).durable == 0
    assert log.append(page("a", 6, epoch=EPOCH + 1), SECONDS).durable == 0
    append_all(log, page("a", 1, epoch=EPOCH + 1))
    assert reason_of(log.append, page("a", 6), SECONDS) == "STALE_EPOCH"
    assert reason_of(log.tail, "a", EPOCH, SECONDS) == "STALE_EPOCH"
    assert log.tail("b", EPOCH, SECONDS).durable == 0
    assert len(drain(log)) == 2


def test_a_reset_may_leave_a_gap_but_never_goes_back(log: Log) -> None:
    append_all(log, page("a", 1, 5), page("a", 100, 3, reset=True))
    assert log.append(page("a", 100, 3, reset=True), SECONDS).durable == 102
    assert log.append(page("a", 50, 3, reset=True), SECONDS).durable == 102
    assert log.append(page("a", 101, 9, reset=True), SECONDS).durable == 102
    append_all(log, page("a", 103), page("c", 17, 2, reset=True), page("a", 40, epoch=EPOCH + 1, reset=True))
    assert len(drain(log)) == 5


def test_epochs_and_sequences_have_64_bits(log: Log) -> None:
    large = 2**64 - 1
    append_all(log, page("a", 2**53 + 1, 1, large - 1, reset=True), page("a", 2**53 + 2, 1, large - 1))
    assert log.append(page("a", 2**53 + 4, 1, large - 1), SECONDS).durable == 2**53 + 2
    append_all(log, page("a", 1, epoch=large), page("b", large, reset=True))
    assert reason_of(log.tail, "a", large - 1, SECONDS) == "STALE_EPOCH"
    assert log.tail("b", EPOCH, SECONDS).durable == large


def test_names_of_stores_are_any_text(log: Log) -> None:
    names = ["", "a b", "{a}", "é", "a\n", "a:1"]
    append_all(log, *(page(name) for name in names))
    assert [log.tail(name, EPOCH, SECONDS).durable for name in (*names, "none")] == [1] * len(names) + [0]


def test_a_read_takes_no_more_than_it_is_told_to_but_at_least_one(log: Log) -> None:
    sizes = [10, 300_000, 10, 10, 4 * MIB, 20, 700_000, 700_000, 3]
    append_all(log, *(page("a", number, data=b"x" * size) for number, size in enumerate(sizes, 1)))
    after, seen = START, []
    for _ in sizes:
        found = log.read(after, MIB, 0, SECONDS)
        if not found:
            break
        assert len(found) == 1 or sum(len(record.data) for record in found) <= MIB
        seen += [len(record.data) for record in found]
        after = found[-1].position
    assert seen == sizes


def test_a_waiting_read_is_woken_by_an_append(log: Log) -> None:
    found: list[list[Record]] = []
    reader = threading.Thread(target=lambda: found.append(log.read(START, MIB, SECONDS / 2, SECONDS)))
    begun = time.monotonic()
    reader.start()
    append_all(log, page())
    reader.join()
    assert [len(records) for records in found] == [1]
    assert time.monotonic() - begun < SECONDS / 2, "it did not wait to the end"


def test_a_read_that_brings_nothing_returns_after_its_wait(log: Log) -> None:
    end = append_all(log, page())
    begun = time.monotonic()
    assert log.read(end, MIB, 0.2, SECONDS) == []
    assert time.monotonic() - begun >= 0.15


def test_a_position_of_another_log_is_a_gap(log: Log) -> None:
    append_all(log, page("a", 1), page("a", 2), page("a", 3))
    for position in [record.position for record in drain(log)]:
        assert is_gap(log.read, foreign(position), MIB, 0, SECONDS)
    assert is_gap(log.read, foreign(START), MIB, 0, SECONDS)
    assert is_gap(log.read, Position(4, START.chain), MIB, SECONDS / 2, SECONDS)


def test_an_empty_log_does_not_know_anybodys_position(log: Log) -> None:
    assert is_gap(log.read, Position(3, b"\1" * 20), MIB, SECONDS / 2, SECONDS)


def test_stores_appending_at_once_each_have_a_gapless_stream(log: Log) -> None:
    def write(store: str) -> None:
        append_all(log, *(page(store, number) for number in range(1, 31)))

    writers = [threading.Thread(target=write, args=(store,)) for store in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    records = drain(log)
    for store in "abcd":
        assert [record.data for record in records if record.data[:1] == store.encode()] == [
            page(store, number).data for number in range(1, 31)
        ]
    assert len(records) == 120


def test_one_page_sent_over_several_ways_at_once_is_there_once(log: Log) -> None:
    answers: list[Appended] = []
    senders = [threading.Thread(target=lambda: answers.append(log.append(page(), SECONDS))) for _ in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert answers == [Appended(1, log.end(SECONDS))] * 8
    assert len(drain(log)) == 1


def test_a_snapshot_replaces_the_records_up_to_it(log: Log) -> None:
    append_all(log, page("a", 1), page("a", 2), page("a", 3))
    first, second, third = (record.position for record in drain(log))
    parts = [b"one", b"", b"x" * PART_BYTES]
    assert log.save_snapshot(second, parts, SECONDS)
    info = log.snapshot(SECONDS)
    assert info is not None
    assert (info.position, info.parts) == (second, 3)
    assert list(log.read_snapshot(info, SECONDS)) == parts
    assert is_gap(log.read, first, MIB, 0, SECONDS)
    assert is_gap(log.read, START, MIB, 0, SECONDS)
    assert [record.position for record in drain(log, second)] == [third]
    assert log.size_behind_snapshot(SECONDS) == len(page("a", 3).data)
    assert log.append(page("a", 4), SECONDS).durable == 4


def test_a_snapshot_of_everything_leaves_a_log_that_goes_on(log: Log) -> None:
    end = append_all(log, page("a", 1), page("a", 2))
    first = drain(log)[0].position
    assert log.save_snapshot(end, [b"all"], SECONDS)
    assert log.end(SECONDS) == end
    assert is_gap(log.read, first, MIB, 0, SECONDS)
    assert drain(log, end) == []
    assert is_gap(log.read, foreign(end), MIB, 0, SECONDS)
    append_all(log, page("a", 3))
    assert is_gap(log.read, foreign(end), MIB, 0, SECONDS)
    assert [record.position.number for record in drain(log, end)] == [3]


def test_only_a_later_snapshot_or_the_same_again_takes_the_place_of_one(log: Log) -> None:
    append_all(log, page("a", 1), page("a", 2))
    first, second = (record.position for record in drain(log))
    assert log.save_snapshot(second, [b"two"], SECONDS)
    assert not log.save_snapshot(first, [b"one"], SECONDS)
    old = log.snapshot(SECONDS)
    assert log.save_snapshot(second, [b"two", b"again"], SECONDS)
    new = log.snapshot(SECONDS)
    assert new is not None
    assert list(log.read_snapshot(new, SECONDS)) == [b"two", b"again"]
    append_all(log, page("a", 3))
    assert log.save_snapshot(log.end(SECONDS), [], SECONDS)
    with pytest.raises(LogGap):
        list(log.read_snapshot(old, SECONDS))


def test_a_snapshot_of_a_record_that_is_not_the_logs_is_refused(log: Log) -> None:
    end = append_all(log, page("a", 1), page("a", 2))
    for position in (foreign(end), Position(9, end.chain), foreign(drain(log)[0].position)):
        with pytest.raises(LogGap):
            log.save_snapshot(position, [b"x"], SECONDS)
    assert log.snapshot(SECONDS) is None
    assert len(drain(log)) == 2


def test_a_snapshot_whose_making_fails_leaves_the_one_before(log: Log) -> None:
    end = append_all(log, page("a", 1))
    assert log.save_snapshot(end, [b"before"], SECONDS)
    end = append_all(log, page("a", 2))

    def failing():
        yield b"x" * 1000
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        log.save_snapshot(end, failing(), SECONDS)
    with pytest.raises(ValueError, match="at most"):
        log.save_snapshot(end, [b"x" * (PART_BYTES + 1)], SECONDS)
    info = log.snapshot(SECONDS)
    assert info is not None
    assert list(log.read_snapshot(info, SECONDS)) == [b"before"]
    assert log.save_snapshot(end, [b"after"], SECONDS), "nothing stands in the way of the next"


def test_one_snapshot_is_written_at_a_time(log: Log) -> None:
    end = append_all(log, page("a", 1))
    inner: list[bool] = []

    def parts():
        yield b"a"
        inner.append(log.save_snapshot(end, [b"other"], SECONDS))
        yield b"b"

    assert log.save_snapshot(end, parts(), SECONDS)
    assert inner == [False]
    info = log.snapshot(SECONDS)
    assert info is not None
    assert list(log.read_snapshot(info, SECONDS)) == [b"a", b"b"]


def test_appends_and_reads_go_on_while_a_snapshot_is_written(log: Log) -> None:
    end = append_all(log, page("a", 1))

    def parts():
        for number in range(2, 6):
            append_all(log, page("a", number))
            yield b"part"

    assert log.save_snapshot(end, parts(), SECONDS)
    assert [record.position.number for record in drain(log, end)] == [2, 3, 4, 5]


def test_a_closed_log_says_so(log: Log) -> None:
    log.close()
    log.close()
    calls = [
        (log.append, page(), SECONDS),
        (log.tail, "a", EPOCH, SECONDS),
        (log.read, START, MIB, 0, SECONDS),
        (log.end, SECONDS),
        (log.save_snapshot, START, [], SECONDS),
        (log.snapshot, SECONDS),
        (log.size_behind_snapshot, SECONDS),
    ]
    assert {reason_of(*call) for call in calls} == {"LOG_UNAVAILABLE"}

"""The log in a file: killed processes, one process at a time, foreign files, space."""

import os
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from log_kit import EPOCH, SECONDS, append_all, drain, is_gap, page, reason_of
from sqlite_child import STORE, page_of, parts_of

import services.matcher.log.sqlite_file as sqlite_file
from services.matcher.log.base import PART_BYTES, START, Position
from services.matcher.log.sqlite import SqliteLog

KIT = Path(__file__).resolve().parent
MIB = 1 << 20


def run_and_kill(path: Path, what: str, after_lines: int, seconds_more: float) -> int:
    """The last sequence that the child told of before it was killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(KIT), str(KIT.parents[1])])}
    command = [sys.executable, str(KIT / "sqlite_child.py"), str(path), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        told = [int(child.stdout.readline()) for _ in range(after_lines)]
        time.sleep(seconds_more)
        child.kill()
        told += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    return told[-1]


def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for lines, seconds_more in [(1, 0), (20, 0.003), (57, 0.01)]:
        acknowledged = run_and_kill(path, "append", lines, seconds_more)
        log = SqliteLog(path)
        records = drain(log)
        assert len(records) >= acknowledged
        assert [record.data for record in records] == [page_of(number + 1).data for number in range(len(records))]
        assert log.tail(STORE, EPOCH, SECONDS).durable == len(records)
        log.close()


def test_a_process_killed_while_it_saves_a_snapshot_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    for lines, seconds_more in [(1, 0), (2, 0.005), (2, 0.01), (3, 0.02), (1, 0.03)]:
        acknowledged = run_and_kill(path, "snapshot", lines, seconds_more)
        log = SqliteLog(path)
        info = log.snapshot(SECONDS)
        assert info is not None
        assert info.position.number >= acknowledged
        assert list(log.read_snapshot(info, SECONDS)) == parts_of(info.position.number)
        behind = drain(log, info.position)
        assert log.end(SECONDS).number == info.position.number + len(behind)
        # Whatever was half written or half removed goes with the next one.
        assert log.save_snapshot(log.end(SECONDS), [b"x"], SECONDS)
        log.close()
        with sqlite3.connect(path) as db:
            counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("records", "parts")]
        db.close()
        assert counts == [0, 1]


def test_parts_of_a_snapshot_that_was_never_finished_are_in_nobodys_way(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    end = append_all(log, page())
    for _ in range(2):
        with log._file.writing(SECONDS) as db:
            for identity in range(5):
                for part in range(3):
                    db.execute("INSERT OR IGNORE INTO parts VALUES (?, ?, x'00', x'00')", (identity, part))
        assert log.save_snapshot(end, [b"whole"], SECONDS)
        info = log.snapshot(SECONDS)
        assert info is not None
        assert list(log.read_snapshot(info, SECONDS)) == [b"whole"]
        with log._file.reading() as db:
            assert db.execute("SELECT count(*) FROM parts").fetchone() == (1,)
    log.close()


def test_a_log_is_there_again_after_it_was_closed(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    append_all(log, page("a", 1), page("b", 1), page("a", 2))
    records = drain(log)
    assert log.save_snapshot(records[0].position, [b"part"], SECONDS)
    log.close()
    log = SqliteLog(tmp_path / "log.db")
    assert drain(log, records[0].position) == records[1:]
    info = log.snapshot(SECONDS)
    assert info is not None
    assert list(log.read_snapshot(info, SECONDS)) == [b"part"]
    assert append_all(log, page("a", 3)).number == 4
    log.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    program = (
        "import sys; from pathlib import Path; from services.matcher.log.sqlite import SqliteLog\n"
        "try: SqliteLog(Path(sys.argv[1]))\nexcept ValueError as error: sys.exit(str(error))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "log.db")]
    second = subprocess.run(command, capture_output=True, text=True, cwd=KIT.parents[1], check=False)
    assert second.returncode == 1
    assert "is in use" in second.stderr
    assert len(second.stderr.strip().splitlines()) == 1
    with pytest.raises(ValueError, match="is in use"):
        SqliteLog(tmp_path / "log.db")
    log.close()
    SqliteLog(tmp_path / "log.db").close()


def test_a_file_of_another_format_or_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    SqliteLog(tmp_path / "newer.db").close()
    with sqlite3.connect(tmp_path / "newer.db") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with sqlite3.connect(tmp_path / "other.db") as db:
        db.execute("CREATE TABLE other (value)")
    db.close()
    (tmp_path / "text.db").write_text("not a database at all, but longer than a header is " * 100)
    (tmp_path / "folder.db").mkdir()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.db") if path.is_file()}
    for name, words in [
        ("newer.db", "format 99"),
        ("other.db", "something else"),
        ("text.db", "not a database"),
        ("folder.db", "cannot be opened"),
        ("missing/log.db", "cannot be opened"),
    ]:
        with pytest.raises(ValueError, match=words):
            SqliteLog(tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.db") if path.is_file()} == before


def test_only_its_owner_can_read_the_file(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    append_all(log, page())
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    log.close()


def test_space_of_what_was_trimmed_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "_CHECKPOINT_BYTES", MIB)
    log = SqliteLog(tmp_path / "log.db")
    sizes = []
    sequence = 0
    for _ in range(6):
        for _ in range(20):
            sequence += 1
            append_all(log, page("a", sequence, data=os.urandom(200_000)))
        assert log.save_snapshot(log.end(SECONDS), [os.urandom(MIB)] * 3, SECONDS)
        sizes.append((tmp_path / "log.db").stat().st_size)
    log.close()
    # The old snapshot and the new one, the records, and not much beside.
    assert max(sizes) <= 2 * 3 * MIB + 20 * 200_000 + 4 * MIB


def test_appends_get_in_between_the_slices_of_a_large_removal(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    end = append_all(log, *(page("a", number, data=bytes(MIB)) for number in range(1, 101)))
    appended_meanwhile: list[bool] = []

    def save() -> None:
        assert log.save_snapshot(end, [bytes(PART_BYTES)], SECONDS)

    saver = threading.Thread(target=save)
    saver.start()
    sequence = 0
    while saver.is_alive():
        sequence += 1
        append_all(log, page("b", sequence))
        with log._file.reading() as db:
            (left,) = db.execute("SELECT count(*) FROM records WHERE number <= 100").fetchone()
        appended_meanwhile.append(0 < left < 100)
    saver.join()
    assert any(appended_meanwhile), "some appends came while records were being removed"
    assert len(drain(log, end)) == sequence
    log.close()


def test_a_damaged_or_missing_part_is_a_gap(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    end = append_all(log, page())
    for change in (
        "UPDATE parts SET data = x'00' WHERE part = 1",
        "UPDATE parts SET checksum = x'00' WHERE part = 1",
        "DELETE FROM parts WHERE part = 1",
    ):
        assert log.save_snapshot(end, [b"0", b"1", b"2"], SECONDS)
        with log._file.writing(SECONDS) as db:
            db.execute(change)
        info = log.snapshot(SECONDS)
        assert info is not None
        parts = log.read_snapshot(info, SECONDS)
        assert next(parts) == b"0"
        assert is_gap(next, parts)
    log.close()


def test_a_damaged_record_is_a_gap(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    append_all(log, page("a", 1), page("a", 2), page("a", 3))
    with log._file.writing(SECONDS) as db:
        db.execute("UPDATE records SET data = x'00' WHERE number = 2")
    assert is_gap(drain, log)
    assert [record.position.number for record in log.read(START, MIB, 0, SECONDS)] == [1]
    log.close()


def test_a_file_that_fails_is_unavailable_in_words(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    append_all(log, page("a", 1))
    with log._file.writing(SECONDS) as db:
        db.execute("ALTER TABLE records RENAME TO gone")
    assert reason_of(log.append, page("a", 2), SECONDS) == "LOG_UNAVAILABLE"
    assert reason_of(log.read, START, MIB, 0, SECONDS) == "LOG_UNAVAILABLE"
    with log._file.writing(SECONDS) as db:
        db.execute("ALTER TABLE gone RENAME TO records")
    assert append_all(log, page("a", 2)) == Position(2, drain(log)[1].position.chain)
    log.close()


def test_an_append_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "log.db")
    with log._file.writing(SECONDS):
        assert reason_of(log.append, page(), 0.05) == "LOG_UNAVAILABLE"
        assert log.end(SECONDS) == START, "readers are not kept waiting"
    log.close()

"""Run as a process that will be killed: appends to a SQLite log, or saves snapshots in it, and tells what is done.

python sqlite_child.py FILE append|snapshot
"""

import sys
from pathlib import Path

from log_kit import EPOCH, SECONDS, page

from services.matcher.log.base import Page
from services.matcher.log.sqlite import SqliteLog

STORE = "child"
PARTS = 12


def page_of(sequence: int) -> Page:
    return page(STORE, sequence, data=f"{sequence} ".encode() * (1 + sequence % 7 * 5000))


def parts_of(number: int) -> list[bytes]:
    """Of a snapshot at record `number`."""
    return [f"{number}/{part} ".encode() * 20_000 for part in range(PARTS)]


def main() -> None:
    log = SqliteLog(Path(sys.argv[1]))
    sequence = log.tail(STORE, EPOCH, SECONDS).durable
    while True:
        sequence += 1
        appended = log.append(page_of(sequence), SECONDS)
        if sys.argv[2] == "snapshot":
            log.save_snapshot(appended.end, parts_of(appended.end.number), SECONDS)
        print(sequence, flush=True)


if __name__ == "__main__":
    main()

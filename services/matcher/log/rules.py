"""What every log decides alike: which page follows, whether a reader's position is this log's, which rows are whole."""

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import xxhash

from services.common.errors import KvblendError
from services.matcher.log.base import PART_BYTES, LogGap, Page, Position, Record, chain_of


class Head(NamedTuple):
    """Where a store's stream stands in the log."""

    epoch: int
    sequence: int


def refuse_stale(store: str, epoch: int, newer: int) -> NoReturn:
    raise KvblendError("STALE_EPOCH", f"store {store!r} is at epoch {newer} in the log; {epoch} is over")


def durable_at(head: Head | None, store: str, epoch: int) -> int:
    """Last sequence that the log holds of the store at this epoch; 0 if none.

    Raises KvblendError STALE_EPOCH.
    """
    if head is None or head.epoch < epoch:
        return 0
    if head.epoch > epoch:
        refuse_stale(store, epoch, head.epoch)
    return head.sequence


def follows(page: Page, durable: int) -> bool:
    """Whether a page is appended behind `durable`, the last sequence at its epoch."""
    if page.count < 1:
        return False
    return page.first == durable + 1 or (page.reset and page.first > durable)


def check_position(after: Position, end: Position, trimmed: int) -> None:
    """Raises LogGap if a log that ends at `end`, with its records up to `trimmed` gone, cannot hold `after`.

    Where it says nothing the next record decides: its chain value comes out right behind the true `after` only.
    """
    if after.number > end.number:
        raise LogGap(f"the log ends at {end.number}, before {after.number}")
    if after.number == end.number and after.chain != end.chain:
        raise LogGap(f"record {after.number} is another one in this log")
    if after.number < trimmed:
        raise LogGap(f"records up to {trimmed} have been trimmed, and {after.number} is before that")


def chained(after: Position, rows: Iterable[tuple[int, bytes, bytes]], max_bytes: int) -> list[Record]:
    """Rows (number, chain value, data) as records: at least one if there is one, more as far as `max_bytes` hold them.

    A row that does not follow ends the list; the call that starts there raises.

    Raises LogGap if the first row does not follow `after`.
    """
    records: list[Record] = []
    size = 0
    for number, chain, data in rows:
        size += len(data)
        if records and size > max_bytes:
            break
        if number != after.number + 1 or chain != chain_of(after.chain, data):
            if records:
                break
            raise LogGap(f"record {number} does not follow {after.number}: another log, or damaged")
        after = Position(number, chain)
        records.append(Record(after, data))
    return records


def checksum_of(part: bytes) -> bytes:
    return xxhash.xxh3_64_digest(part)


def check_part_size(part: bytes) -> None:
    if len(part) > PART_BYTES:
        raise ValueError(f"a part of a snapshot has {len(part)} bytes; at most {PART_BYTES} are allowed")


def unavailable(message: str) -> KvblendError:
    return KvblendError("LOG_UNAVAILABLE", message)

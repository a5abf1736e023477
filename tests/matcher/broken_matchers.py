"""Matchers with one fault each. The tests that compare with the slow model must notice every one of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import fold_machine
import numpy as np
import pytest
from history import History

from services.matcher import matching, occurrences, snapshot
from services.matcher.capture import Capture
from services.matcher.documents import Documents
from services.matcher.fold import Fold
from services.matcher.kernels.types import (
    BEFORE,
    CLASS,
    LENGTH,
    NEXT_SAME,
    NONE,
    OFFSET,
    OWNERS,
    ROW_PLANES,
    SLOT_TOKENS,
    SPACE,
    TOKEN_BEHIND,
)
from services.matcher.occurrences import Found, Occurrences
from services.matcher.owners import Owners
from services.matcher.runs import Cover, run_ranges
from services.matcher.table import Table

Spoil = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def fault(spoil: Spoil) -> Spoil:
    @contextmanager
    def spoiled() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch)
            yield

    FAULTS[spoil.__name__] = spoiled
    return spoil


@fault
def compares_nothing(patch: pytest.MonkeyPatch) -> None:
    """Every chunk "occurs" wherever its (fully colliding) fingerprint does: everywhere."""

    def everywhere(table: Table, space: Any, tokens: Any, intervals: Any, *_: Any) -> Found:
        rows = table.columns.rows
        entries = [n for n in range(table.entries_begun) if rows[n, SPACE] == space.number and table.columns.windows[n]]
        parts = []
        for low, high in intervals:
            every = sorted(
                (at << 32 | entry, rows[entry, LENGTH])
                for entry in entries
                for at in range(low, high - int(rows[entry, LENGTH]) + 1)
            )
            keys, agreed = np.array(every, dtype=np.int64).reshape(-1, 2).T.copy()
            parts.append(Occurrences(low, high, keys, agreed.astype(np.int32)))
        return Found(parts, len(tokens), 0, 0)

    patch.setattr(matching, "find_occurrences", everywhere)


@fault
def filter_loses_bits(patch: pytest.MonkeyPatch) -> None:
    insert = Table.insert

    def forgetful(self: Table, batch: Any) -> Any:
        entries = insert(self, batch)
        for space in self.spaces.values():
            for index in filter(None, space.indexes):
                index.buckets.bits[:] &= np.uint32(0xFFFF)
        return entries

    patch.setattr(Table, "insert", forgetful)


@fault
def removes_the_other_of_two_copies(patch: pytest.MonkeyPatch) -> None:
    disown = Table._disown

    def mistaken(self: Table, entries: Any, owner: Any, seen: int = 0) -> None:
        entries = entries.copy()
        for row, entry in enumerate(entries.tolist()):
            if entry != NONE and self.columns.rows[entry, NEXT_SAME] != NONE:
                entries[row] = self.columns.rows[entry, NEXT_SAME]
        disown(self, np.unique(entries), owner, seen)

    patch.setattr(Table, "_disown", mistaken)


@fault
def keeps_a_link_to_a_chunk_that_went(patch: pytest.MonkeyPatch) -> None:
    delete = Table._delete_alike

    def stale(self: Table, entries: Any) -> None:
        rows = self.columns.rows
        behind = [(n, int(rows[n, BEFORE])) for n in range(64) if rows[n, BEFORE] in entries and n not in entries]
        delete(self, entries)
        for child, gone in behind:
            rows[child, BEFORE] = gone

    patch.setattr(Table, "_delete_alike", stale)


@fault
def forgets_a_link_when_a_chunk_comes_back(patch: pytest.MonkeyPatch) -> None:
    insert = Table.insert

    def unlinked(self: Table, batch: Any) -> Any:
        entries = insert(self, batch)
        # The first ids: machines use few.
        head = self.columns.rows[:64]
        if len(entries) == 1:
            head[head[:, BEFORE] == entries[0], BEFORE] = NONE
        return entries

    patch.setattr(Table, "insert", unlinked)


@fault
def trusts_the_token_behind(patch: pytest.MonkeyPatch) -> None:
    """What a chunk's neighbours begin with is not kept up to date."""
    insert = Table.insert

    def stale(self: Table, batch: Any) -> Any:
        head = self.columns.rows[:64]
        tokens = head[:, TOKEN_BEHIND].copy()
        entries = insert(self, batch)
        known = tokens >= 0
        head[known, TOKEN_BEHIND] = tokens[known]
        return entries

    patch.setattr(Table, "insert", stale)


@fault
def skips_the_last_position_of_a_stretch(patch: pytest.MonkeyPatch) -> None:
    scan = occurrences.scan
    patch.setattr(occurrences, "_STRETCH", 16)

    def short(tokens: Any, first: int, last: int, *rest: Any) -> int:
        reached = scan(tokens, first, max(first, last - 1), *rest)
        return last if reached == max(first, last - 1) else int(reached)

    patch.setattr(occurrences, "scan", short)


@fault
def stops_a_token_before_the_end(patch: pytest.MonkeyPatch) -> None:
    scan = occurrences.scan

    def short(tokens: Any, first: int, last: int, high: int, *rest: Any) -> int:
        return int(scan(tokens, first, last, high - 1, *rest))

    patch.setattr(occurrences, "scan", short)


@fault
def asks_nobody_who_owns_a_chunk(patch: pytest.MonkeyPatch) -> None:
    reader = Table.reader
    patch.setattr(Table, "reader", lambda self, owners, classes: reader(self, self.owners.names, classes))


@fault
def serves_every_context_class(patch: pytest.MonkeyPatch) -> None:
    reader = Table.reader
    patch.setattr(Table, "reader", lambda self, owners, classes: reader(self, owners, [1, 2, 3]))


def _spoil_covers(patch: pytest.MonkeyPatch, spoil: Callable[[Cover], Cover]) -> None:
    cover_of = matching.cover_of
    patch.setattr(matching, "cover_of", lambda *arguments: spoil(cover_of(*arguments)))


def _only(cover: Cover, kept: Any) -> Cover:
    chunks = np.repeat(kept, cover.counts)
    columns = {name: column[chunks if name in ("entries", "lengths") else kept] for name, column in vars(cover).items()}
    return Cover(**columns)


@fault
def never_cuts_a_run(patch: pytest.MonkeyPatch) -> None:
    """Of two that overlap it takes one whole, and of the other nothing."""
    cover_of = matching.cover_of

    def uncut(columns: Any, tokens: Any, part: Any, reader: Any, skip: int, *rest: Any) -> Cover:
        cover = cover_of(columns, tokens, part, reader, skip, *rest)
        starts, ends = run_ranges(columns, tokens, part, reader)
        runs = set(zip(np.maximum(starts, skip).tolist(), ends.tolist(), strict=True))
        whole = [piece in runs for piece in zip(cover.starts.tolist(), cover.ends.tolist(), strict=True)]
        return _only(cover, np.array(whole, dtype=bool))

    patch.setattr(matching, "cover_of", uncut)


@fault
def forgets_the_last_piece(patch: pytest.MonkeyPatch) -> None:
    _spoil_covers(patch, lambda cover: _only(cover, np.arange(len(cover.starts)) < len(cover.starts) - 1))


@fault
def shortens_a_piece(patch: pytest.MonkeyPatch) -> None:
    def shorter(cover: Cover) -> Cover:
        by = (cover.ends - cover.starts > 16) & (cover.lengths[np.cumsum(cover.counts) - 1] > 1)
        lengths = cover.lengths.copy()
        lengths[np.cumsum(cover.counts)[by] - 1] -= 1
        return replace(cover, ends=cover.ends - by, lengths=lengths)

    _spoil_covers(patch, shorter)


@fault
def shifts_what_is_served(patch: pytest.MonkeyPatch) -> None:
    _spoil_covers(patch, lambda cover: replace(cover, skips=cover.skips + 1))


@fault
def keeps_what_an_older_epoch_had(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owners, "void", lambda self, owner: None)


@fault
def gives_a_voided_bit_again_at_once(patch: pytest.MonkeyPatch) -> None:
    def void(self: Owners, owner: Any) -> None:
        number = self._bits.pop(owner, None)
        if number is not None:
            self._free.append(number)

    patch.setattr(Owners, "void", void)


@fault
def a_late_report_removes_a_new_claim(patch: pytest.MonkeyPatch) -> None:
    remove = Table.remove
    patch.setattr(Table, "remove", lambda self, *what: remove(self, *what[:4]))


@fault
def clears_other_documents_too(patch: pytest.MonkeyPatch) -> None:
    clear = Table.clear
    patch.setattr(Table, "clear", lambda self, owner, space, tenant, document: clear(self, owner, space, tenant))


@fault
def clears_other_tenants_too(patch: pytest.MonkeyPatch) -> None:
    clear = Table.clear
    patch.setattr(Table, "clear", lambda self, owner, space, tenant, document: clear(self, owner, space, "", document))


@fault
def a_document_of_that_name_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Documents, "find", lambda self, name: None)


@fault
def a_chunk_has_one_owner_only(patch: pytest.MonkeyPatch) -> None:
    own = Table.own

    def first_comes(self: Table, entries: Any, owner: Any, claimed: int = 0) -> None:
        free = [
            n for n in entries.tolist() if n != NONE and not self.columns.rows[n, OWNERS : OWNERS + ROW_PLANES].any()
        ]
        own(self, np.array(free, dtype=np.int64), owner, claimed)

    patch.setattr(Table, "own", first_comes)


@fault
def wipes_a_text_that_copies_share(patch: pytest.MonkeyPatch) -> None:
    delete = Table._delete_alike

    def early(self: Table, entries: Any) -> None:
        for entry in entries.tolist():
            start = int(self.columns.rows[entry, OFFSET]) * SLOT_TOKENS
            if start >= 0:
                self.columns.pool[start : start + int(self.columns.rows[entry, LENGTH])] = 0
        delete(self, entries)

    patch.setattr(Table, "_delete_alike", early)


@fault
def a_better_context_class_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    insert = Table.insert

    def kept(self: Table, batch: Any) -> Any:
        space = self.spaces.get(batch.space_id)
        if space is None:
            return insert(self, batch)
        known = self.find(space, int(batch.domains[0]), batch.names)
        classes = self.columns.rows[known, CLASS].copy()
        entries = insert(self, batch)
        same = (known != NONE) & (known == entries)
        self.columns.rows[known[same], CLASS] = classes[same]
        return entries

    patch.setattr(Table, "insert", kept)


# These spoil only what a snapshot says.
SNAPSHOT_FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def snapshot_fault(spoil: Spoil) -> Spoil:
    fault(spoil)
    SNAPSHOT_FAULTS[spoil.__name__] = FAULTS.pop(spoil.__name__)
    return spoil


@snapshot_fault
def a_snapshot_loses_an_owner(patch: pytest.MonkeyPatch) -> None:
    owners_of = snapshot._owners_of
    patch.setattr(snapshot, "_owners_of", lambda *arguments: list(owners_of(*arguments))[:1])


@snapshot_fault
def a_snapshot_forgets_when_a_tier_claimed(patch: pytest.MonkeyPatch) -> None:
    part_of = snapshot._part

    def unclaimed(*arguments: Any) -> Any:
        part = part_of(*arguments)
        part.claimed = bytes(len(part.claimed))
        return part

    patch.setattr(snapshot, "_part", unclaimed)


@snapshot_fault
def a_snapshot_leaves_out_an_entry(patch: pytest.MonkeyPatch) -> None:
    take = Capture._take
    patch.setattr(Capture, "_take", lambda self, entries: take(self, entries[entries != 1]))


@snapshot_fault
def a_snapshot_shows_what_changed_meanwhile(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capture, "before_change", lambda self, entries: None)


@snapshot_fault
def a_snapshot_shows_what_came_meanwhile(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Capture, "leave_out", lambda self, entries: None)


@snapshot_fault
def a_replay_begins_one_record_late(patch: pytest.MonkeyPatch) -> None:
    replay = History.replay
    patch.setattr(
        History, "replay", lambda self, fold, behind=0: replay(self, fold, min(behind + 1, len(self.records)))
    )


@snapshot_fault
def a_newer_epoch_is_taken_for_the_old_one(patch: pytest.MonkeyPatch) -> None:
    restore = snapshot.restore

    def without_streams(*arguments: Any) -> Fold:
        fold = restore(*arguments)
        fold.streams.clear()
        return fold

    patch.setattr(fold_machine, "restore", without_streams)

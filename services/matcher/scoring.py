"""How much of a prompt each store could serve, for routers."""

from collections.abc import Callable

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.tokens import TokenArray
from services.matcher.kernels import batches
from services.matcher.kernels.types import NONE, U64
from services.matcher.matching import as_kernel_tokens, best_cover
from services.matcher.occurrences import find_occurrences
from services.matcher.owners import OwnerName
from services.matcher.table import Space, Table


def scores(
    table: Table,
    space: Space,
    tokens: TokenArray,
    names: U64,
    classes: frozenset[int],
    timeout: float,
    is_late: Callable[[], bool],
) -> list[matcher_pb2.StoreScore]:
    """Of every owner that has something of the prompt. names: [N, 4], the prompt's full chunks in order.

    When there is no more time, owners that were not looked at are left out.

    Raises:
        KvblendError: DEADLINE_EXCEEDED if the names cannot be looked up within `timeout` seconds.
    """
    query = as_kernel_tokens(tokens)
    owners = table.owners.names
    prefixes = _prefix_chunks(table, space, names, timeout)
    answers = []
    with table.grace.reading():
        found = find_occurrences(table, space, query, [(0, len(query))], table.reader(owners, classes), is_late)
        entries = np.unique(np.concatenate([part.entries for part in found.parts]))
        for owner in owners:
            bit = table.owners.find(owner)
            if bit is None:
                continue
            held = min(len(tokens), prefixes.get(owner, 0) * space.chunk_tokens)
            anywhere = 0
            if not is_late() and batches.held_by(entries, bit.plane, bit.mask, table.columns).any():
                anywhere = best_cover(table, query, found, table.reader([owner], classes), 0).tokens
            if held or anywhere:
                answers.append(_score(owner, held, anywhere))
    return answers


def _prefix_chunks(table: Table, space: Space, names: U64, timeout: float) -> dict[OwnerName, int]:
    """How many leading chunks each owner has."""
    with table.locked(timeout):
        entries = table.find(space, pb.DOMAIN_EXACT, names)
        missing = np.flatnonzero(entries == NONE)
        entries = entries[: missing[0]] if len(missing) else entries
        chunks = {}
        for owner, bit in table.owners.items():
            lost = np.flatnonzero(~batches.held_by(entries, bit.plane, bit.mask, table.columns))
            chunks[owner] = int(lost[0]) if len(lost) else len(entries)
        return chunks


def _score(owner: OwnerName, prefix: int, anywhere: int) -> matcher_pb2.StoreScore:
    is_store = owner.kind == matcher_pb2.OWNER_KIND_STORE
    return matcher_pb2.StoreScore(
        store=owner.name if is_store else "",
        l2_id="" if is_store else owner.name,
        prefix_tokens=prefix,
        anywhere_tokens=max(anywhere, prefix),
    )

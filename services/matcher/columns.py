"""Making and growing a table's columns. Growth copies: arrays that a caller still holds stay as they were."""

import numpy as np

from services.matcher.kernels import NONE, Columns

_FIRST_CAPACITY = 64


def empty_columns(chunk_tokens: int) -> Columns:
    def links() -> np.ndarray:
        return np.full(_FIRST_CAPACITY, NONE, dtype=np.int32)

    return Columns(
        pool=np.zeros(_FIRST_CAPACITY * chunk_tokens, dtype=np.uint32),
        offsets=np.zeros(_FIRST_CAPACITY, dtype=np.int64),
        lengths=np.zeros(_FIRST_CAPACITY, dtype=np.int32),
        fingerprints=np.zeros(_FIRST_CAPACITY, dtype=np.uint64),
        following=links(),
        preceding=links(),
        before=links(),
        first_behind=links(),
        next_sibling=links(),
        prior_sibling=links(),
        owners=np.zeros((_FIRST_CAPACITY, 1), dtype=np.uint64),
        classes=np.zeros(_FIRST_CAPACITY, dtype=np.uint8),
    )


def grown(columns: Columns) -> Columns:
    """Room for twice as many entries; the pool as it is."""
    larger = {
        name: np.concatenate([array, np.zeros_like(array)])
        for name, array in columns._asdict().items()
        if name != "pool"
    }
    return Columns(pool=columns.pool, **larger)


def with_pool(columns: Columns, size: int) -> Columns:
    pool = np.zeros(size, dtype=np.uint32)
    pool[: len(columns.pool)] = columns.pool
    return columns._replace(pool=pool)


def with_owner_words(columns: Columns, words: int) -> Columns:
    owners = np.zeros((len(columns.owners), words), dtype=np.uint64)
    owners[:, : columns.owners.shape[1]] = columns.owners
    return columns._replace(owners=owners)

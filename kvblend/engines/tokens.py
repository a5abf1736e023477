"""Token arrays and ranges of tokens."""

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]


def runs_of(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(first, length) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]])))
    return [(int(first), int(end - first)) for first, end in edges.reshape(-1, 2)]

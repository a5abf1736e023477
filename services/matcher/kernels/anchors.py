"""Anchors: which windows of a text are looked for, so that one in many positions is enough.

A text of a class of 64 tokens or more is indexed by a window that begins a little behind its start: at its **anchor**,
the position among the first `span` whose token has the least key (the first of these, if several have). The key depends
on the token alone; so wherever the text stands in a query, its anchor is the least of that stretch of the query, too,
and only such positions need to be looked up: about 2 of span + 1 in usual text, all in a text of one token. Every
stretch of `span` positions has one, so none of the text's occurrences can be missed, whatever the tokens are.
"""

import numpy as np
from numba import njit

from services.matcher.kernels.types import I32, U32

# A smaller class is looked for at every position: that is less work than to choose among few.
_SMALLEST_ANCHORED = 64
_SPANS_IN_WINDOW = 8
_MIX = np.uint32(0x9E3779B1)
# A key's lower bits are the position, in a block and behind it: the first of two equal tokens is the lesser.
_PLACE = np.uint32((1 << 13) - 1)
_MIXED = np.uint32(0xFFFF_FFFF - ((1 << 13) - 1))
# No position's.
_NO_KEY = np.uint32(0xFFFF_FFFF)


@njit(nogil=True, cache=True)
def span_of(window: int) -> int:
    """At how many positions the indexed window of a text of this class may begin; a power of two."""
    return window // _SPANS_IN_WINDOW if window >= _SMALLEST_ANCHORED else 1


@njit(nogil=True, cache=True)
def width_of(window: int) -> int:
    """Tokens of the indexed window: it lies inside the class's window wherever it begins."""
    return window - span_of(window) + 1


@njit(nogil=True, cache=True, inline="always")
def _key(token: np.uint32, place: int) -> np.uint32:
    return np.uint32((np.uint32(token * _MIX) & _MIXED) | np.uint32(place))


@njit(nogil=True, cache=True)
def key_places(tokens: U32, keys: U32) -> None:
    """Keys of positions, whose least in a stretch is its anchor."""
    for place in range(len(tokens)):
        keys[place] = _key(tokens[place], place)


@njit(nogil=True, cache=True)
def double_span(least: U32, span: int, doubled: U32) -> None:
    """From the least key of each `span` positions to that of twice as many; doubled: shorter than `least` by `span`."""
    size = len(doubled)
    near = least[:size]
    far = least[span : span + size]
    for place in range(size):
        doubled[place] = min(near[place], far[place])


@njit(nogil=True, cache=True)
def anchors_of(least: U32, places: I32) -> int:
    """Of stretches that begin one behind another: their anchors, each once; returns how many."""
    places[0] = np.int32(least[0] & _PLACE)
    prior = least[:-1]
    behind = least[1:]
    # Unsigned: a place that cannot be negative is not checked for that.
    last = np.uint64(0)
    for stretch in range(behind.shape[0]):
        last += np.uint64(behind[stretch] != prior[stretch])
        places[last] = np.int32(behind[stretch] & _PLACE)
    return np.int64(last) + 1


@njit(nogil=True, cache=True)
def anchor_of(tokens: U32, start: int, span: int) -> int:
    """The anchor of the text at tokens[start:], counted from its start."""
    least = _NO_KEY
    # A slice: its places need no check for negative ones, so that this is vectorised.
    beginning = tokens[start : start + span]
    for place in range(beginning.shape[0]):
        least = min(least, _key(beginning[place], place))
    return np.int64(least & _PLACE)

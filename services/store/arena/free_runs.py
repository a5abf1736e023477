"""Free runs of pages by length: the shortest that is long enough is found in constant time."""

from collections.abc import Iterator

# Bits of one word of `_Lengths`: its two levels cover a slab of 4 GiB.
_WORD = 1024


class _Lengths:
    """A set of small numbers that knows its members' neighbours: words of bits, and a word over the words."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._filled = 0

    def add(self, number: int) -> None:
        word, bit = divmod(number, _WORD)
        self._words[word] = self._words.get(word, 0) | 1 << bit
        self._filled |= 1 << word

    def discard(self, number: int) -> None:
        word, bit = divmod(number, _WORD)
        self._words[word] &= ~(1 << bit)
        if not self._words[word]:
            del self._words[word]
            self._filled &= ~(1 << word)

    def at_least(self, number: int) -> int | None:
        word, bit = divmod(number, _WORD)
        here = self._words.get(word, 0) >> bit
        if here:
            return number + _lowest(here)
        above = self._filled >> (word + 1)
        if not above:
            return None
        word += 1 + _lowest(above)
        return word * _WORD + _lowest(self._words[word])

    def below(self, number: int) -> int | None:
        word, bit = divmod(number, _WORD)
        here = self._words.get(word, 0) & ((1 << bit) - 1)
        if not here:
            filled = self._filled & ((1 << word) - 1)
            if not filled:
                return None
            word = filled.bit_length() - 1
            here = self._words[word]
        return word * _WORD + here.bit_length() - 1


def _lowest(word: int) -> int:
    return (word & -word).bit_length() - 1


class FreeRuns:
    """Runs of pages by their first page; they never touch each other."""

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        # Length -> first pages.
        self._of_length: dict[int, dict[int, None]] = {}
        self._lengths = _Lengths()

    def __contains__(self, first: int) -> bool:
        return first in self._pages

    def pages(self, first: int) -> int:
        return self._pages[first]

    def add(self, first: int, pages: int) -> None:
        self._pages[first] = pages
        alike = self._of_length.get(pages)
        if alike is None:
            alike = self._of_length[pages] = {}
            self._lengths.add(pages)
        alike[first] = None

    def remove(self, first: int) -> int:
        """How many pages it had. Raises KeyError."""
        pages = self._pages.pop(first)
        alike = self._of_length[pages]
        del alike[first]
        if not alike:
            del self._of_length[pages]
            self._lengths.discard(pages)
        return pages

    def best(self, pages: int) -> int | None:
        """First page of the shortest run that has so many."""
        length = self._lengths.at_least(pages)
        return None if length is None else next(reversed(self._of_length[length]))

    def shorter_than(self, pages: int) -> Iterator[int]:
        """First pages of shorter runs, longest first. Nothing may change meanwhile."""
        length: int | None = pages
        while length and (length := self._lengths.below(length)):
            yield from self._of_length[length]

    @property
    def longest(self) -> int:
        """Pages; 0: there is none."""
        return max(self._of_length, default=0)

    def usable(self, pages: int) -> int:
        """Pages that blocks of so many could take."""
        return sum(length // pages * pages * len(alike) for length, alike in self._of_length.items())

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """(first page, pages)"""
        return iter(self._pages.items())

"""The one palette: where a token's KV came from, in the terminal and on the page.

Hues stay apart for colour-blind readers and differ in lightness; every use adds a letter, a
pattern or a shape, so that colour is never alone.
"""

from dataclasses import dataclass

SOURCES = ("prefix", "segment", "recomputed", "new")


@dataclass(frozen=True)
class SourceStyle:
    """How one source looks and what it is called. Colours are `#rrggbb`."""

    letter: str
    label: str
    meaning: str
    # Terminal: background behind white text, readable on dark and light terminals alike.
    terminal: str
    light: str
    dark: str


STYLES = {
    "prefix": SourceStyle(
        "P", "prefix", "the prompt starts exactly like a stored one: nothing to repair", "#1a2aa0", "#1f33c9", "#7b88f2"
    ),
    "segment": SourceStyle(
        "S", "segment as is", "known text at another position, taken over as stored", "#1b7e5d", "#12a171", "#62d6bc"
    ),
    "recomputed": SourceStyle(
        "R",
        "recomputed",
        "known text, but computed again to repair what its new neighbours change",
        "#a85a00",
        "#cc7700",
        "#ffb84d",
    ),
    "new": SourceStyle("N", "new", "never seen before: computed as without a cache", "#71367d", "#813d8f", "#c9507c"),
}

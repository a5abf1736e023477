"""Sizes and durations as people write and read them."""

import re

_FACTORS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of `2GiB`, `512MiB`, `64KiB` or a plain number.

    Raises ValueError with what is allowed.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _FACTORS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ValueError("a size is a number of bytes, or a number with KiB, MiB, GiB or TiB, such as 2GiB")
    return int(float(match[1]) * factor)


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """A duration by its two largest units: 42 s, 3 min 5 s, 2 h 10 min, 4 d 3 h."""
    whole = int(seconds)
    for size, unit, smaller, smaller_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {smaller_unit}"
    return f"{whole} s"

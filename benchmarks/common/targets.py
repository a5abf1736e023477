"""What must be reached, and whether it was."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

Row = dict[str, Any]


class Target(NamedTuple):
    """`measure` is given the figures of a section, or all sections by name: as the bench says.

    It raises LookupError or TypeError where there is nothing to measure.
    """

    name: str
    wanted: str
    measure: Callable[[Row], Any]
    passes: Callable[[Any], bool]


def entry(target: Target, figures: Row) -> Row:
    """name, target, value, and passed (None where it was not measured)."""
    try:
        value = target.measure(figures)
    except (LookupError, TypeError):
        # Its section did not run, was run small, or had no peers.
        value = None
    passed = None if value is None else bool(target.passes(value))
    return {"name": target.name, "target": target.wanted, "value": value, "passed": passed}


def at_least(name: str, bound: float, measure: Callable[[Row], Any]) -> Target:
    return Target(name, f">= {bound}", measure, lambda value: value >= bound)


def at_most(name: str, bound: float, measure: Callable[[Row], Any]) -> Target:
    return Target(name, f"<= {bound}", measure, lambda value: value <= bound)


def one(rows: Iterable[Row], **where: Any) -> Row:
    """The first row with these values. Raises LookupError."""
    for row in rows:
        if all(row[key] == value for key, value in where.items()):
            return row
    raise LookupError(where)

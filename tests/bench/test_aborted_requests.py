"""A thousand requests aborted at random moments leave nothing; `benchmarks/store/aborted.py` does ten thousand."""

from rich.console import Console

from benchmarks.common.screen import Screen
from benchmarks.store import aborted


def test_randomly_aborted_requests_leave_no_lease_and_no_byte() -> None:
    figures = aborted.run(quick=True, screen=Screen(Console(quiet=True)))
    assert figures["requests"] >= 1_000
    assert (figures["engine_kills"], figures["agent_kills"]) == (2, 1)
    assert {name: figures[name] for name in ("leases", "reserved_bytes", "quarantined_bytes")} == {
        "leases": 0,
        "reserved_bytes": 0,
        "quarantined_bytes": 0,
    }
    assert figures["used_bytes_after_clear"] == 0
    assert figures["lookups"] > 200, "the requests must be such that get somewhere"
    assert figures["stored_chunks"] > 200
    assert figures["evicted_chunks"]

"""`kvblend status`: what it shows of a busy system, and of one with something down."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from canned_services import SPACES, STORE_STATS, Matcher, Store, serve, serve_all
from rich.console import Console

from cli.probe import Peer
from cli.status import run, take
from cli.status_view import Snapshot, bar, render
from cli.units import format_bytes, format_seconds, parse_bytes
from kvblend.v1 import common_pb2, matcher_pb2

NOBODY = "127.0.0.1:1"


def screen(snapshot: Snapshot, width: int = 100) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), force_terminal=False)  # noqa: SIM115
    with console.file:
        console.print(render(snapshot))
        return console.export_text()


def snapshot_of(targets: dict[str, str]) -> Snapshot:
    peers = [Peer(service, target) for service, target in targets.items()]
    with ThreadPoolExecutor(3) as pool:
        snapshot = take(peers, pool)
    for peer in peers:
        peer.close()
    return snapshot


def test_a_busy_system_fits_the_terminal_and_shows_its_numbers() -> None:
    with serve_all() as targets:
        text = screen(snapshot_of(targets))
    lines = text.splitlines()
    assert len(lines) <= 30
    assert max(len(line.rstrip()) for line in lines) <= 100
    assert "880 MiB whole, 63.0 MiB partial chunks · 1.1 GiB free, 1.0 GiB of it in one piece" in text
    for shown in (
        "a1a1a1a1",
        "SmolLM2-135M [bold]x",
        "acme",
        "1,834",
        "1,830",
        "943 MiB",
        "reads 3.0 GiB/s, 17 to be written, 2 never written",
        "74.0%",
        "48 held, 12 busy",
        "2 quarantined",
        "10 refused",
        "3.0 MiB of 4.0 GiB",
        "31 dropped",
        "redis",
        "3 behind",
        "0.71",
        "RoPE proven",
        "2 h 5 min",
    ):
        assert shown in text, shown
    assert "PingStore" not in text


def test_with_services_down_it_shows_the_rest() -> None:
    with serve(Matcher()) as matcher:
        text = screen(snapshot_of({"matcher": matcher, "store": NOBODY, "agent": NOBODY}))
    assert text.count("down") == 2
    assert "1,830 entries" in text


def test_a_log_that_is_away_is_shown_with_why_and_since_when(monkeypatch: pytest.MonkeyPatch) -> None:
    away = matcher_pb2.GetMatcherStatsResponse(
        log=matcher_pb2.LogState(kind="redis", applied_position=9, end_position=9, age_ms=75_000, error="refused")
    )
    monkeypatch.setattr("canned_services.MATCHER_STATS", away)
    with serve(Matcher()) as matcher:
        text = screen(snapshot_of({"matcher": matcher}))
    assert "redis is away for 1 min 15 s: refused" in text


def test_a_long_reason_squeezes_nothing_else() -> None:
    trouble = common_pb2.Dependency(name="matcher", detail="connections to all backends failing " * 5)
    with serve(Store(trouble)) as store:
        text = screen(snapshot_of({"store": store}))
    (line,) = [line for line in text.splitlines() if line.startswith("store")]
    assert "not ready" in line
    assert store in line
    assert "matcher: connections to all" in line
    assert line.rstrip().endswith("…")


def test_json_has_numbers_as_numbers_and_ids_in_hexadecimal(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_all() as targets:
        assert run(targets, once=True, as_json=True, every=1) == 0
    store = json.loads(capsys.readouterr().out)["services"]["store"]["stats"]
    assert store["requested_tokens"] == STORE_STATS.requested_tokens
    assert store["spaces"][0]["space_id"] == SPACES[0].hex()
    assert store["spaces"][2]["tenant"] == "404"
    assert store["tiers"][1]["tier"] == "TIER_L2"
    assert store["checksum_failures"] == 0


def test_once_fails_when_a_service_is_down(capsys: pytest.CaptureFixture[str]) -> None:
    assert run({"store": NOBODY}, once=True, as_json=False, every=1) == 1
    assert "start it with kvblend up" in capsys.readouterr().out


def test_sizes() -> None:
    assert parse_bytes("2GiB") == 2 << 30
    assert parse_bytes(" 512 mib ") == 512 << 20
    assert parse_bytes("4096") == 4096
    assert [format_bytes(n) for n in (0, 1023, 1536, 943 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "943 MiB",
        "3.0 TiB",
    ]


@pytest.mark.parametrize("text", ["", "2GB", "lots", "-1", "2 GiB extra", "1e9"])
def test_a_size_that_is_none_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="such as 2GiB"):
        parse_bytes(text)


def test_durations() -> None:
    assert [format_seconds(s) for s in (0.9, 61, 3600, 90000)] == ["0 s", "1 min 1 s", "1 h 0 min", "1 d 1 h"]


def test_bars_never_overflow_and_show_shares_side_by_side() -> None:
    def plain(*shares: float) -> str:
        return bar([(share, letter, "") for share, letter in zip(shares, "ab", strict=False)], 4).plain

    assert [plain(share) for share in (-1, 0, 0.5, 1, 7)] == ["····", "····", "aa··", "aaaa", "aaaa"]
    assert plain(0.25, 0.5) == "abb·"
    assert plain(0.9, 0.9) == "aaaa"

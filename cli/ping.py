"""`kvblend ping`: are the services there and ready? For people, scripts (JSON) and probes (quiet)."""

import json
from collections.abc import Mapping

from rich.table import Table

from cli.console import make_console
from cli.probe import Peer, Probe, probe_all
from cli.units import format_seconds


def run(targets: Mapping[str, str], *, as_json: bool, quiet: bool, timeout: float) -> int:
    """0: all of `targets` (service -> address) are ready; 1: something is not."""
    peers = [Peer(service, target) for service, target in targets.items()]
    try:
        probes = probe_all(peers, timeout)
    finally:
        for peer in peers:
            peer.close()
    ready = all(probe.ready for probe in probes)
    if as_json:
        print(json.dumps({"ready": ready, "services": [probe.as_json() for probe in probes]}, indent=2))
    elif not quiet:
        _print_table(probes)
    return 0 if ready else 1


def _print_table(probes: list[Probe]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("service")
    table.add_column("address")
    table.add_column("state")
    table.add_column("up for", justify="right")
    table.add_column("answer", justify="right")
    table.add_column("version")
    for probe in probes:
        live = probe.liveness
        table.add_row(
            probe.service,
            probe.target,
            state_text(probe),
            format_seconds(live.uptime_seconds) if live else "",
            f"{probe.round_trip_ms:.1f} ms" if live else "",
            live.version if live else "",
        )
    console = make_console()
    console.print(table)
    for probe in probes:
        if probe.detail:
            console.print(f"{probe.service}: {probe.detail}", markup=False, soft_wrap=True)


def state_text(probe: Probe) -> str:
    if probe.ready:
        return "[green]ready[/]"
    return "[yellow]not ready[/]" if probe.reachable else "[red]down[/]"

"""How `kvblend status` looks: made for a terminal of 100 x 30."""

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cli.colors import STYLES
from cli.ping import state_text
from cli.probe import Probe
from cli.units import format_bytes, format_seconds
from kvblend.v1 import common_pb2, matcher_pb2, store_pb2

_MOST_SPACES = 4
_MOST_LATENCIES = 4
_TIER_CELLS = 24
_REUSE_CELLS = 30
_TIER_NAMES = {common_pb2.TIER_L1: "L1 memory", common_pb2.TIER_L2: "L2 Redis"}


@dataclass(frozen=True)
class View:
    """One service: whether it answers, and its statistics (None: it gave none)."""

    probe: Probe
    stats: Any


@dataclass(frozen=True)
class Snapshot:
    views: list[View]
    # Unix seconds.
    time: float

    def stats(self, service: str) -> Any:
        return next((view.stats for view in self.views if view.probe.service == service), None)


def render(snapshot: Snapshot, height: int = 30) -> RenderableType:
    """Sections from top to bottom, apart by an empty line where `height` rows leave room for it."""
    store, matcher, agent = (snapshot.stats(service) for service in ("store", "matcher", "agent"))
    sections = [_services(snapshot)]
    if store is not None:
        sections += [_tiers(store), _second_tier(store.l2), _reuse(store), _spaces(store, matcher)]
    sections += [_counts(store, matcher, agent), _latencies(snapshot)]
    sections = [section for section in sections if section.row_count]
    rows = sum(section.row_count + section.show_header for section in sections)
    apart = rows + len(sections) <= height
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time))
    parts: list[RenderableType] = [Text.from_markup(f"[bold]kvblend status[/]  [dim]{clock}[/]")]
    for section in sections:
        parts += [Text(""), section] if apart and len(parts) > 1 else [section]
    return Group(*parts)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def _services(snapshot: Snapshot) -> Table:
    table = _table("service", "state", "up for", "address", right=("up for",))
    # Takes what the others leave: a long reason must not squeeze an address.
    table.add_column("", ratio=1, no_wrap=True, overflow="ellipsis")
    table.expand = True
    for view in snapshot.views:
        live = view.probe.liveness
        up_for = format_seconds(live.uptime_seconds) if live else ""
        why = "" if view.probe.reachable else "start it with kvblend up"
        detail = why or view.probe.detail or ("no statistics" if view.stats is None else "")
        table.add_row(
            view.probe.service, state_text(view.probe), up_for, view.probe.target, Text(detail, style="yellow")
        )
    return table


def bar(parts: list[tuple[float, str, str]], cells: int) -> Text:
    """Shares side by side: (share, character, style). The rest is a dotted line; colour is never alone."""
    text, used, shown = Text(), 0.0, 0
    for share, character, style in parts:
        used = min(used + max(share, 0.0), 1.0)
        text.append(character * (round(used * cells) - shown), style)
        shown = round(used * cells)
    return text.append("·" * (cells - shown), "dim")


def _tiers(store: store_pb2.GetStoreStatsResponse) -> Table:
    table = _table("tier", "used", "of", "", "objects", "state", right=("used", "of", "objects"))
    for tier in store.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        state = Text("ready", style="green") if tier.ready else Text(tier.detail or "down", style="red")
        capacity = format_bytes(tier.capacity_bytes) if tier.capacity_bytes else "?"
        used = bar([(share, "█", "green" if share < 0.9 else "yellow")], _TIER_CELLS)
        gauge = Text.assemble(used, f" {share:4.0%}") if tier.capacity_bytes else Text("")
        name = _TIER_NAMES.get(tier.tier, str(tier.tier))
        objects = f"{tier.objects:,}" if tier.objects or tier.tier == common_pb2.TIER_L1 else "?"
        table.add_row(name, format_bytes(tier.used_bytes), capacity, gauge, objects, state)
    return table


def _second_tier(l2: store_pb2.SecondTierStats) -> Table:
    """One row about what goes on between the arena and L2; none if nothing does."""
    parts = [f"reads {format_bytes(l2.bytes_per_second)}/s"] if l2.bytes_per_second else []
    counts = (
        (l2.queued_writes, "to be written"),
        (l2.dropped_writes, "put off"),
        (l2.lost_writes, "never written"),
        (l2.failed_writes, "writes failed"),
    )
    parts += [f"{count:,} {what}" for count, what in counts if count]
    table = _table("", "")
    table.show_header = False
    if parts:
        table.add_row("[dim]to and from L2[/]", ", ".join(parts))
    return table


def _reuse(store: store_pb2.GetStoreStatsResponse) -> Table:
    """Of all tokens ever asked for: how many the cache served, and how."""
    asked, prefix, segment = store.requested_tokens, store.prefix_hit_tokens, store.segment_hit_tokens
    table = _table("reuse", f"of {asked:,} tokens in {store.lookups:,} lookups" if asked else "")
    if not asked:
        table.add_row("[dim]nothing asked yet[/]", "")
        return table
    parts = [(prefix / asked, "█", STYLES["prefix"].dark), (segment / asked, "▒", STYLES["segment"].dark)]
    rest = 1 - (prefix + segment) / asked
    legend = Text.assemble(
        ("█", parts[0][2]), f" {prefix / asked:.1%} from a prefix  ",
        ("▒", parts[1][2]), f" {segment / asked:.1%} from segments  ",
        ("·", "dim"), f" {rest:.1%} not cached",
    )  # fmt: skip
    table.add_row(bar(parts, _REUSE_CELLS), legend)
    return table


def _spaces(store: store_pb2.GetStoreStatsResponse, matcher: Any) -> Table:
    known = {space.space_id: space.chunks for space in matcher.spaces} if matcher is not None else {}
    table = _table("space", "model", "tenant", "chunks", "in matcher", "bytes", right=("chunks", "in matcher", "bytes"))
    spaces = sorted(store.spaces, key=lambda space: space.bytes, reverse=True)
    for space in spaces[:_MOST_SPACES]:
        entries = f"{known.get(space.space_id, 0):,}" if matcher is not None else "–"
        short = space.space_id.hex()[:8]
        model, tenant = Text(space.display_name or "–"), Text(space.tenant)
        table.add_row(short, model, tenant, f"{space.chunks:,}", entries, format_bytes(space.bytes))
    rest = spaces[_MOST_SPACES:]
    if rest:
        chunks, size = sum(space.chunks for space in rest), sum(space.bytes for space in rest)
        table.add_row(f"{len(rest)} more", "", "", f"{chunks:,}", "", format_bytes(size))
    if not spaces:
        table.add_row("[dim]none yet[/]", "", "", "", "", "")
    return table


def _counts(store: Any, matcher: Any, agent: Any) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    if store is not None:
        leases = f"{store.held_leases:,} held, {store.busy_leases:,} busy"
        trouble = f"{store.quarantined_objects:,} quarantined, {store.checksum_failures:,} checksum failures"
        table.add_row("leases", f"{leases} · {store.reserved_objects:,} reserved, {trouble}")
        if store.HasField("arena"):
            table.add_row("arena", _arena(store.arena))
        changes = f"{store.stored_chunks:,} stored, {store.evicted_chunks:,} evicted"
        table.add_row("chunks", f"{changes} · {store.outbox_events:,} events wait for the matcher")
    if matcher is not None:
        entries = sum(space.chunks for space in matcher.spaces)
        room = f"{format_bytes(matcher.table_bytes)} of {format_bytes(matcher.memory_limit_bytes)}"
        table.add_row("matcher", f"{entries:,} entries in {room}, {matcher.evicted:,} dropped for room")
        looked = f"{matcher.matches:,} matches: {matcher.candidates:,} candidates, {matcher.refused:,} refused"
        table.add_row("", looked)
        table.add_row("log", _log(matcher.log))
    if agent is not None:
        moved = f"{format_bytes(agent.retrieved_bytes)} retrieved, {format_bytes(agent.stored_bytes)} stored"
        table.add_row("agent", f"{agent.device or 'no device'} · {moved} · {agent.failed_tokens:,} tokens failed")
        for item in agent.instances:
            name = item.display_name or item.instance_id
            rope = "RoPE proven" if item.rope_proven else "RoPE not proven: prefix only"
            text = f"{name} · {format_bytes(item.mapped_bytes)} mapped · {item.open_requests} open requests · {rope}"
            table.add_row("engine", Text(text))
    return table


def _arena(arena: store_pb2.ArenaUsage) -> str:
    held = f"{format_bytes(arena.whole_bytes)} whole, {format_bytes(arena.partial_bytes)} partial chunks"
    free = f"{format_bytes(arena.free_bytes)} free, {format_bytes(arena.longest_free_bytes)} of it in one piece"
    huge = f", {format_bytes(arena.huge_page_bytes)} in huge pages" if arena.huge_page_bytes else ""
    return f"{held} · {free}{huge}"


def _log(log: matcher_pb2.LogState) -> Text:
    """The log that matchers follow, and how far behind it this one is."""
    if log.error:
        return Text(f"{log.kind} is away for {format_seconds(log.age_ms / 1e3)}: {log.error}", style="red")
    behind = max(0, log.end_position - log.applied_position)
    snapshot = f"snapshot at {log.snapshot_position:,}" if log.snapshot_position else "no snapshot yet"
    return Text(f"{log.kind} at {log.applied_position:,}, {behind:,} behind · {snapshot}")


def _latencies(snapshot: Snapshot) -> Table:
    """The calls on which the services spend most time."""
    rows = [(view.probe.service, item) for view in snapshot.views if view.stats for item in view.stats.latencies]
    rows = [row for row in rows if not row[1].name.startswith(("Ping", "Get", "Check"))]
    table = _table("call", "service", "count", "p50 ms", "p99 ms", right=("count", "p50 ms", "p99 ms"))
    for service, item in sorted(rows, key=lambda row: row[1].count * row[1].p50_ms, reverse=True)[:_MOST_LATENCIES]:
        table.add_row(item.name, service, f"{item.count:,}", f"{item.p50_ms:.2f}", f"{item.p99_ms:.2f}")
    return table

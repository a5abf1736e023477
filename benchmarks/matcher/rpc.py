"""`Match` from end to end: client process, gRPC, table; beside a no-op whose request has the same size."""

from contextlib import ExitStack
from typing import Any

from benchmarks.common.figures import latencies
from benchmarks.common.processes import Piped, at_once
from benchmarks.common.screen import Screen
from benchmarks.matcher.matchers import Matcher, folder, matcher, publish_library, started
from benchmarks.matcher.plan import Plan
from benchmarks.matcher.processes import client_processes
from benchmarks.matcher.server import STORE

_TOKENS = (1 << 15, 1 << 17)
_CLIENTS = (1, 8)
_ROUNDS = 5
# Half covered, at no multiple of a chunk.
_COVERAGE = 50

Row = dict[str, Any]


def run(plan: Plan, screen: Screen) -> Row:
    """Section `rpc`: the service (a synchronous server), an asyncio server around the same table, and their no-ops.

    The same requests go to every server, in turns.
    """
    rows = []
    with ExitStack() as stack:
        where = stack.enter_context(folder())
        with screen.working(f"rpc: {plan.rpc_chunks:,} chunks for each server"):
            servers = {
                ("sync", "match"): stack.enter_context(matcher(where, "m", f"sqlite:{where}/log.db")),
                ("sync", "no-op"): stack.enter_context(started(where, "sn", _server("sync", "no-op", 0))),
                ("asyncio", "match"): stack.enter_context(
                    started(where, "am", _server("asyncio", "match", plan.rpc_chunks))
                ),
                ("asyncio", "no-op"): stack.enter_context(started(where, "an", _server("asyncio", "no-op", 0))),
            }
            publish_library(servers["sync", "match"], STORE, plan.rpc_chunks)
            clients = stack.enter_context(client_processes(max(_CLIENTS)))
        for tokens in _TOKENS:
            for count in _CLIENTS:
                with screen.working(f"rpc: {tokens:,} tokens, {count} clients"):
                    answers = _in_turns(plan, servers, clients[:count], tokens)
                for (kind, call, transport), milliseconds in answers.items():
                    row = {"server": kind, "call": call, "transport": transport, "tokens": tokens, "clients": count}
                    rows.append(row | latencies(milliseconds))
                    screen.line(_words(rows[-1]))
    return {"chunks": plan.rpc_chunks, "coverage": _COVERAGE, "rows": rows}


def _server(kind: str, call: str, chunks: int) -> list[str]:
    return ["benchmarks.matcher.server", "--kind", kind, "--call", call, "--chunks", str(chunks)]


def _in_turns(
    plan: Plan, servers: dict[tuple[str, str], Matcher], clients: list[Piped], tokens: int
) -> dict[tuple[str, str, str], list[float]]:
    """Milliseconds of each call, by server, call and transport."""
    each = max(_ROUNDS, plan.rpc_calls // len(clients))
    for index, client in enumerate(clients):
        numbers = list(range(1 + index * each, 1 + (index + 1) * each))
        client.ask(
            "prepare_queries", store=STORE, tokens=tokens, coverage=_COVERAGE, table=plan.rpc_chunks, numbers=numbers
        )
    answers: dict[tuple[str, str, str], list[float]] = {}
    count = each // _ROUNDS
    for turn in range(_ROUNDS):
        for (kind, call), server in servers.items():
            for transport, target in (("unix", server.unix), ("tcp", server.tcp)):
                # The first call opens the connection.
                at_once(clients, "run", target=target, method="Match", first=0, count=1)
                done = at_once(clients, "run", target=target, method="Match", first=turn * count, count=count)
                answers.setdefault((kind, call, transport), []).extend(ms for one in done for ms in one["ms"])
    return answers


def _words(row: Row) -> str:
    return (
        f"{row['server']:>8} {row['call']:>6} {row['transport']:>5} {row['tokens']:>8,} tokens {row['clients']} clients"
        f"   p50 {row['p50_ms']:.2f} ms   p99 {row['p99_ms']:.2f} ms"
    )

"""`kvblend status`: what the services hold and how well it serves, live or once."""

import json
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.live import Live

from cli.console import make_console
from cli.probe import Peer
from cli.status_view import Snapshot, View, render
from kvblend.v1 import agent_pb2, matcher_pb2, store_pb2

_TIMEOUT_SECONDS = 1.0


def run(targets: Mapping[str, str], *, once: bool, as_json: bool, every: float) -> int:
    """With `once` or `as_json`: 1 if a service is down. Live: until Ctrl-C."""
    peers = [Peer(service, target) for service, target in targets.items()]
    try:
        with ThreadPoolExecutor(len(peers)) as pool:
            if as_json or once or not make_console().is_terminal:
                return _show_once(take(peers, pool), as_json=as_json)
            return _show_live(peers, pool, every)
    finally:
        for peer in peers:
            peer.close()


def take(peers: list[Peer], pool: ThreadPoolExecutor) -> Snapshot:
    """All services at once; one that is down is shown as down and delays no other."""
    return Snapshot(list(pool.map(_view, peers)), time.time())


def _view(peer: Peer) -> View:
    probe = peer.probe(_TIMEOUT_SECONDS)
    if not probe.reachable:
        return View(probe, None)
    try:
        return View(probe, _stats(peer))
    except grpc.RpcError:
        return View(probe, None)


def _stats(peer: Peer) -> Any:
    if peer.service == "matcher":
        return peer.stub.GetMatcherStats(matcher_pb2.GetMatcherStatsRequest(), timeout=_TIMEOUT_SECONDS)
    if peer.service == "store":
        return peer.stub.GetStoreStats(store_pb2.GetStoreStatsRequest(), timeout=_TIMEOUT_SECONDS)
    return peer.stub.GetAgentStats(agent_pb2.GetAgentStatsRequest(), timeout=_TIMEOUT_SECONDS)


def _show_once(snapshot: Snapshot, *, as_json: bool) -> int:
    if as_json:
        document = {view.probe.service: _as_json(view) for view in snapshot.views}
        print(json.dumps({"time": round(snapshot.time, 3), "services": document}, indent=2))
    else:
        make_console().print(render(snapshot))
    return 0 if all(view.probe.reachable for view in snapshot.views) else 1


def _as_json(view: View) -> dict[str, Any]:
    return view.probe.as_json() | {"stats": None if view.stats is None else _plain(view.stats)}


def _plain(message: Message) -> dict[str, Any]:
    """Every field, also those at zero; ids in hexadecimal, enums by name."""
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> Any:
    if field.is_repeated:
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: Any, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _plain(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return field.enum_type.values_by_number[value].name
    return value.hex() if isinstance(value, bytes) else value


def _show_live(peers: list[Peer], pool: ThreadPoolExecutor, every: float) -> int:
    # SIGTERM leaves the terminal as clean as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = make_console()
    try:
        with Live(render(take(peers, pool), console.height), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(render(take(peers, pool), console.height), refresh=True)
    except KeyboardInterrupt:
        return 0

"""`kvblend check`: do the store's headers, bytes, matchers and L2 agree? Through the store, or offline in its arena."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from rich.text import Text

from cli.console import make_console
from cli.probe import Peer
from cli.units import format_bytes
from kvblend.v1 import store_pb2
from services.common.errors import KvblendError, reason_of

_NAMES = {
    store_pb2.CHECK_PART_BLOCKS: "blocks",
    store_pb2.CHECK_PART_OBJECTS: "objects",
    store_pb2.CHECK_PART_LOG: "matchers",
    store_pb2.CHECK_PART_L2: "L2",
    store_pb2.CHECK_PART_L2_LOG: "L2 text",
}
_WHAT = {
    store_pb2.CHECK_PART_BLOCKS: "chunks, headers and blocks",
    store_pb2.CHECK_PART_OBJECTS: "of KV and its descriptions",
    store_pb2.CHECK_PART_LOG: "chunks asked for by their text",
    store_pb2.CHECK_PART_L2: "marks and objects",
    store_pb2.CHECK_PART_L2_LOG: "chunks of L2 asked for by their text",
}

Messages = Iterator[store_pb2.CheckStoreResponse]


def run(store: str, arena: Path | None, *, fix: bool, as_json: bool, timeout: float, token: str = "") -> int:
    """0: all of it agrees, or does after the fix. 1: something does not, or could not be looked at."""
    try:
        ended = list(_watch(_messages(store, arena, fix, timeout, token), quiet=as_json))
    except (KvblendError, grpc.RpcError) as error:
        line = error.message if isinstance(error, KvblendError) else _why(error, store, timeout)
        if as_json:
            print(json.dumps({"ok": False, "error": line, "parts": []}, indent=2))
        else:
            make_console(stderr=True).print(Text(line, style="red"), soft_wrap=True)
        return 1
    ok = all(not item.unfinished and _left(item) == 0 for item in ended)
    if as_json:
        print(json.dumps({"ok": ok, "fixed": fix, "parts": [_as_json(item) for item in ended]}, indent=2))
    else:
        _print(ended, fix)
    return 0 if ok else 1


def _messages(store: str, arena: Path | None, fix: bool, timeout: float, token: str) -> Messages:
    if arena is not None:
        from services.store.check.stopped import check_stopped

        yield from check_stopped(arena, fix)
        return
    peer = Peer("store", store)
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        yield from peer.stub.CheckStore(store_pb2.CheckStoreRequest(fix=fix), timeout=timeout, metadata=metadata)
    finally:
        peer.close()


def _why(error: grpc.RpcError, store: str, timeout: float) -> str:
    code = error.code()
    if code == grpc.StatusCode.UNAVAILABLE:
        return f"cannot reach the store at {store}: start it with kvblend up, or name its arena with --arena"
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the check did not end within {timeout:g} s: give it more with --timeout"
    return f"the store at {store} answered {reason_of(error)}: {error.details()}"


def _watch(messages: Messages, *, quiet: bool) -> Messages:
    """The last message of each part; progress of the present one on a terminal."""
    console = make_console(stderr=True)
    columns = TextColumn("{task.description:<9}"), BarColumn(40), TaskProgressColumn()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as screen:
        task = screen.add_task("blocks", total=None)
        for message in messages:
            name = _NAMES.get(message.part, "")
            screen.update(task, description=name, completed=message.done, total=message.total or None)
            if message.ended:
                yield message


def _left(item: store_pb2.CheckStoreResponse) -> int:
    """What still disagrees."""
    return sum(finding.count - finding.fixed for finding in item.findings)


def _print(ended: list[store_pb2.CheckStoreResponse], fix: bool) -> None:
    console = make_console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for column in range(3):
        table.add_column(no_wrap=column < 2, overflow="fold")
    for item in ended:
        table.add_row(_NAMES.get(item.part, ""), _state(item), _looked_at(item))
        for finding in item.findings:
            table.add_row("", "", _line(finding, fix))
    console.print(table)
    found, left = sum(f.count for item in ended for f in item.findings), sum(map(_left, ended))
    unfinished = [item for item in ended if item.unfinished]
    if not found and not unfinished:
        console.print("everything agrees")
    elif found:
        rest = "nothing is left" if not left else f"{left:,} left"
        advice = "" if fix or not left else ": kvblend check --fix repairs"
        console.print(f"{found:,} disagree, {found - left:,} repaired, {rest}{advice}")
    if unfinished:
        console.print("not everything could be looked at", style="yellow")


def _state(item: store_pb2.CheckStoreResponse) -> Text:
    count = sum(finding.count for finding in item.findings)
    if count:
        return Text(f"{count:,} disagree", style="yellow" if not _left(item) else "red")
    return Text("unfinished", style="yellow") if item.unfinished else Text("ok", style="green")


def _looked_at(item: store_pb2.CheckStoreResponse) -> Text:
    size: Callable[[int], str] = format_bytes if item.part == store_pb2.CHECK_PART_OBJECTS else "{:,}".format
    text = f"{size(item.done)} {_WHAT.get(item.part, '')}"
    return Text(f"{text}, then: {item.unfinished}" if item.unfinished else text)


def _line(finding: store_pb2.CheckFinding, fix: bool) -> Text:
    examples = ", ".join(finding.examples) + (", ..." if finding.count > len(finding.examples) else "")
    text = Text(f"{finding.text}: {finding.count:,} ({examples})")
    if finding.fixed == finding.count:
        text.append(f"\n→ repaired: {finding.remedy}", style="bold")
    elif fix:
        text.append(f"\n→ {finding.fixed:,} repaired: {finding.remedy}", style="bold")
    else:
        text.append(f"\n→ with --fix {finding.remedy}", style="bold")
    return text


def _as_json(item: store_pb2.CheckStoreResponse) -> dict[str, Any]:
    return {
        "part": _NAMES.get(item.part, ""),
        "looked_at": item.done,
        "unfinished": item.unfinished,
        "findings": [
            {
                "kind": finding.kind,
                "text": finding.text,
                "count": finding.count,
                "fixed": finding.fixed,
                "examples": list(finding.examples),
            }
            for finding in item.findings
        ],
    }

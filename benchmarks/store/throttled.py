"""Time to the first token with L2 at any speed, against plain prefill of the same prompts.

A real store process, a real Redis behind a wire whose speed is chosen, an engine whose prefill is modelled: time to
the first token = looking up + copying out of the arena + computing the rest. What is fetched leaves the arena again,
so every prompt needs L2.
"""

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np

from benchmarks.common.processes import ROOT, Piped, piped
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row, Target, at_least, at_most
from benchmarks.store.modelled_engine import TOKEN_BYTES, ModelledEngine, Tokens
from benchmarks.store.redis_process import running_redis
from kvblend.v1 import store_pb2, store_pb2_grpc
from services.store.tiers.redis import MIB

_ARENA_BYTES = 480 * MIB
DEADLINE = 10.0
_START_SECONDS = 60.0
# Prompts at each speed that only show the store how fast L2 is now.
_WARM_UP = 5
# Between prompts, as an engine would be busy.
_BUSY_SECONDS = 0.1
_RECOVERY_SECONDS = 10.0
# A tier this fast must be worth having: ideally at most this share of plain prefill.
_FAST = 0.5


class Wire(NamedTuple):
    """MB/s (None: unlimited, 0: stopped), and seconds there and back."""

    name: str
    speed: float | None
    latency: float = 0.0

    def set(self, proxy: Piped) -> None:
        rate = None if self.speed is None else self.speed * 1e6
        proxy.ask("set", bytes_per_second=rate, latency=self.latency)


_UNLIMITED = Wire("unlimited", None)
_WIRES = (
    _UNLIMITED,
    Wire("1000 MB/s", 1000),
    Wire("1000 MB/s, 20 ms away", 1000, 0.02),
    Wire("100 MB/s", 100),
    Wire("10 MB/s", 10),
    Wire("1 MB/s", 1),
    Wire("stopped", 0),
    Wire("unlimited again", None),
)
_SLOW = Wire("10 MB/s", 10)
_CHANGING = Wire("slow in the middle", None)


class Sizes(NamedTuple):
    prompts: int
    tokens: int
    # Tokens a second of the engine.
    rates: tuple[int, ...]
    wires: tuple[Wire, ...]


_FULL = Sizes(8, 8192, (10_000, 50_000), _WIRES)
_QUICK = Sizes(4, 1024, (10_000,), (_UNLIMITED, Wire("1 MB/s", 1), Wire("stopped", 0)))


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    sizes = _QUICK if quick else _FULL
    rows: list[Row] = []
    with _store() as (engine, proxy):
        prompts = [_prompt(number, sizes.tokens) for number in range(sizes.prompts)]
        _fill(engine, prompts)
        for rate in sizes.rates:
            for wire in sizes.wires:
                wire.set(proxy)
                # Also how long it takes until a tier that was slow or stopped is used again.
                rows.append(_measure(engine, prompts, wire, rate))
                screen.line(_line(rows[-1]))
            _UNLIMITED.set(proxy)
            rows.append(_changing(engine, proxy, prompts, rate))
            screen.line(_line(rows[-1]))
        stats = engine.stats()
    return {
        "prompts": sizes.prompts,
        "tokens": sizes.tokens,
        "kv_bytes_per_token": TOKEN_BYTES,
        "rows": rows,
        "tiers": [{"objects": tier.objects, "ready": tier.ready} for tier in stats.tiers],
        "quick": quick,
    }


def _prompt(number: int, tokens: int) -> Tokens:
    return np.random.default_rng(number).integers(0, 50_000, tokens + 1).astype(np.uint32)


def _fill(engine: ModelledEngine, prompts: Sequence[Tokens]) -> None:
    """All prompts are in L2 and none is in the arena."""
    for prompt in prompts:
        engine.store(prompt[:-1])
        _until(lambda: engine.stats().l2.queued_writes == 0)
    others = _ARENA_BYTES // (TOKEN_BYTES * (len(prompts[0]) - 1)) + 1
    for number in range(others):
        engine.store(_prompt(1000 + number, len(prompts[0]) - 1)[:-1])
        _until(lambda: engine.stats().l2.queued_writes == 0)


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > limit:
            raise RuntimeError("the store did not write its chunks to Redis")
        time.sleep(0.02)


def _measure(engine: ModelledEngine, prompts: Sequence[Tokens], wire: Wire, rate: int) -> Row:
    begun = time.monotonic()
    for prompt in prompts[:_WARM_UP]:
        _ask(engine, prompt, rate)
    if wire.name == _WIRES[-1].name:
        while _ask(engine, prompts[0], rate)[1] == 0 and time.monotonic() - begun < _RECOVERY_SECONDS:
            pass
    warm = time.monotonic() - begun
    return {
        **_figures(wire, rate, prompts, [_ask(engine, prompt, rate) for prompt in prompts]),
        "warm_up_seconds": warm,
    }


def _ask(engine: ModelledEngine, prompt: Tokens, rate: int) -> tuple[float, float, float]:
    """(time to the first token over plain prefill, share reused, ms of the lookup)."""
    found = engine.find(prompt, rate, DEADLINE)
    count = len(prompt)
    time.sleep(_BUSY_SECONDS)
    ratio = found.ttft(count, rate) / (count / rate)
    return ratio, found.summary.prefix_tokens / count, 1e3 * found.lookup_seconds


def _changing(engine: ModelledEngine, proxy: Piped, prompts: Sequence[Tokens], rate: int) -> Row:
    """The wire becomes slow while a prompt is being fetched, and fast again before the next."""
    asked = []
    for number, prompt in enumerate(prompts):
        _UNLIMITED.set(proxy)
        limit = time.monotonic() + _RECOVERY_SECONDS
        while _ask(engine, prompts[number - 1], rate)[1] == 0 and time.monotonic() < limit:
            pass
        delay = 0.002 * (1 + number)
        timer = threading.Timer(delay, _SLOW.set, (proxy,))
        timer.start()
        asked.append(_ask(engine, prompt, rate))
        timer.join()
    return _figures(_CHANGING, rate, prompts, asked)


def _figures(wire: Wire, rate: int, prompts: Sequence[Tokens], asked: Sequence[tuple[float, float, float]]) -> Row:
    count = len(prompts[0])
    ratios, reused, lookup = zip(*asked, strict=True)
    seconds = wire.latency + (count * TOKEN_BYTES / (wire.speed * 1e6) if wire.speed else float("inf"))
    return {
        "wire": wire.name,
        "steady": wire is not _CHANGING,
        "tokens_per_second": rate,
        "ratio_median": statistics.median(ratios),
        "ratio_worst": max(ratios),
        "reused_median": statistics.median(reused),
        "lookup_ms_median": statistics.median(lookup),
        "lookup_ms_worst": max(lookup),
        # Everything fetched at the speed of the wire, nothing computed.
        "ratio_ideal": min(1.0, seconds * rate / count) if wire.speed else None,
    }


def _line(row: Row) -> str:
    return (
        f"{row['tokens_per_second'] // 1000:3} K tokens/s, {row['wire']:22} TTFT {row['ratio_median']:.3f} of plain "
        f"prefill, worst {row['ratio_worst']:.3f}; reused {row['reused_median']:.0%}; "
        f"lookup {row['lookup_ms_median']:.1f} ms"
    )


def targets(section: dict[str, Any]) -> list[Target]:
    del section
    return [
        at_most(
            "L2 at any speed or stopped: TTFT over plain prefill, median", 1.05, lambda s: _highest(s, "ratio_median")
        ),
        at_most("the same, worst prompt", 1.05, lambda s: _highest(s, "ratio_worst")),
        at_least("prompts reused where L2 is fast, lowest share", 0.9, _reused_where_fast),
    ]


def _highest(section: dict[str, Any], name: str) -> Any:
    return max(row[name] for row in _rows(section) if row["steady"])


def _reused_where_fast(section: dict[str, Any]) -> Any:
    return min(row["reused_median"] for row in _rows(section) if (row["ratio_ideal"] or 1.0) <= _FAST)


def _rows(section: dict[str, Any]) -> list[Row]:
    if section["quick"]:
        raise LookupError("run small")
    return list(section["rows"])


# Processes.


@contextmanager
def _store() -> Iterator[tuple[ModelledEngine, Piped]]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-thr-", dir="/dev/shm")))
        wire = folder / "wire.sock"
        redis = stack.enter_context(running_redis())["unix"].removeprefix("unix://")
        arguments = ["benchmarks.store.throttle", str(wire), redis]
        proxy = stack.enter_context(piped({"throttle": (sys.executable, arguments)}))["throttle"]
        target = f"unix:{folder}/store.sock"
        command = [sys.executable, "-m", "services.store", "--name", "bench", "--listen", target]
        command += ["--arena-dir", str(folder / "arena"), "--arena-bytes", str(_ARENA_BYTES)]
        command += ["--redis-url", f"unix://{wire}", "--l2-fetched", "temporary", "--log-level", "error"]
        command += ["--drain-seconds", "0", "--grace-seconds", "0.2"]
        with (folder / "log").open("wb") as log:
            stack.enter_context(_process(command, log))
        _wait_for_store(target, folder / "log")
        yield stack.enter_context(closing(ModelledEngine(target, folder / "arena"))), proxy


@contextmanager
def _process(command: Sequence[str], output: Any) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_store(target: str, log: Path) -> None:
    with grpc.insecure_channel(target) as channel:
        stub: Any = store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]
        limit = time.monotonic() + _START_SECONDS
        while True:
            try:
                stub.PingStore(store_pb2.PingStoreRequest(), timeout=1)
                return
            except grpc.RpcError:
                if time.monotonic() > limit:
                    raise RuntimeError(f"the store did not start: {log.read_text()[-2000:]}") from None
                time.sleep(0.05)

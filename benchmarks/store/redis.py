"""What goes to Redis and comes back a second, checksums on, from and to a shared map as the arena is one.

Beside it, in the same rounds on the same server: redis-py with hiredis (values of our parts' sizes, made and dropped in
its own memory), LMCache's C++ connector (TCP only, without checksums), and redis-benchmark (one key, always in cache).

Ours and redis-py move one object or value in a call, and as many as the store itself does at such a speed (the chunks
that a lookup fetches, the queue that is written). The latter is judged, against the faster of redis-py's two ways;
LMCache's connector gets the whole volume as one batch.
"""

import mmap
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice, product
from typing import TypeVar

import redis
import xxhash

from benchmarks.common.processes import PEERS_PYTHON, Piped, piped
from benchmarks.common.screen import Screen
from benchmarks.common.targets import Row, Target, one
from benchmarks.store.redis_process import running_redis
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.checksums import checksum_of
from services.common.identity import OBJECT_FORMAT_VERSION
from services.store.l2.batches import MOST_BYTES
from services.store.objects import ChunkKey, ObjectKey
from services.store.tiers.base import Read, Write
from services.store.tiers.redis import RedisTier

MIB = 1 << 20
_SECONDS = 60.0
_TRANSPORTS = ("unix", "tcp")
_OBJECTS_MIB = (1, 4, 8, 32)
_PARTS_MIB = (1, 2, 4)
# The tier's default.
_PART_MIB = 2
# What one contender writes and reads in one round.
_VOLUME_MIB = 64
_CALLERS = (1, 4)
_WORKERS = (1, 2, 4)
_ROUNDS = (7, 1)
_T = TypeVar("_T")
# Puts the volume there, gets it back.
Pair = tuple[Callable[[], object], Callable[[], object]]


class _Arena:
    """Source and target, both of the volume's size."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, 2 * size)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._map)
        self.source, self.target = whole[:size], whole[size:]
        for start in range(0, size, MIB):
            # Every part another one: equal parts would hide that one was taken for another.
            self.source[start : start + MIB] = xxhash.xxh3_128_digest(start.to_bytes(8)) * (MIB // 16)
        self.target[:] = bytes(size)


def _together(mib: int) -> int:
    """Objects of one call of ours, or values of one pipeline of redis-py."""
    return max(1, MOST_BYTES // (mib * MIB))


def _ours(
    tier: RedisTier, arena: _Arena, object_bytes: int, together: int, callers: int, threads: ThreadPoolExecutor
) -> Pair:
    """`together`: objects of one call."""
    keys, payloads, targets = [], [], []
    for start in range(0, len(arena.source), object_bytes):
        name = f"{object_bytes}/{start}/{tier.tier_id}".encode()
        keys.append(ObjectKey(ChunkKey(b"s" * 16, pb.DOMAIN_EXACT, xxhash.xxh3_128_digest(name) * 2), 0, 0))
        payloads.append(arena.source[start : start + object_bytes])
        targets.append(arena.target[start : start + object_bytes])
    writes = [Write(key, _meta(key, data), data) for key, data in zip(keys, payloads, strict=True)]

    def put(some: Sequence[Write]) -> None:
        if not all(tier.write(some, _SECONDS)):
            raise RuntimeError("a write failed")

    def get(some: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta | None, memoryview]]) -> None:
        reads = [Read(key, meta, target) for key, meta, target in some if meta is not None]
        if len(reads) < len(some) or not all(tier.read_into(reads, _SECONDS)):
            raise RuntimeError("a read failed")

    each: Callable[..., Iterable[None]] = map if callers == 1 else threads.map

    def put_all() -> None:
        deque(each(put, _batches(writes, together)), 0)

    def get_all() -> None:
        found = zip(keys, tier.find(keys, _SECONDS), targets, strict=True)
        deque(each(get, _batches(found, together)), 0)

    return put_all, get_all


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _meta(key: ObjectKey, data: memoryview) -> object_pb2.ObjectMeta:
    return object_pb2.ObjectMeta(
        format_version=OBJECT_FORMAT_VERSION,
        space_id=key.chunk.space_id,
        domain=key.chunk.domain,
        chain_hash=key.chunk.chain_hash,
        tokens=bytes(1024),
        payload_bytes=len(data),
        checksum=checksum_of(data),
    )


def _redis_py(client: redis.Redis, arena: _Arena, part_bytes: int, together: int) -> Pair:
    """What it sends is there as bytes already; what it gets is not copied to the target."""
    starts = range(0, len(arena.source), part_bytes)
    values = {f"{part_bytes}/{start}": bytes(arena.source[start : start + part_bytes]) for start in starts}

    def each(call: Callable[[redis.Redis, str], object]) -> None:
        for names in _batches(values, together):
            target = client.pipeline(transaction=False) if together > 1 else client
            for name in names:
                call(target, name)
            if isinstance(target, redis.client.Pipeline):
                target.execute()

    return lambda: each(lambda target, name: target.set(name, values[name], ex=600)), lambda: each(redis.Redis.get)


def _lmcache(peer: Piped, value_bytes: int, workers: int) -> Pair:
    return (
        lambda: peer.ask("put", value_bytes=value_bytes, workers=workers),
        lambda: peer.ask("get", value_bytes=value_bytes, workers=workers),
    )


def _redis_benchmark(urls: dict[str, str], transport: str, value_bytes: int, volume: int) -> Row:
    where = ["-s", urls["unix"].removeprefix("unix://")]
    if transport == "tcp":
        where = ["-p", urls["tcp"].rpartition(":")[2]]
    command = ["redis-benchmark", *where, "-t", "set,get", "-c", "1", "-d", str(value_bytes), "--csv"]
    command += ["-n", str(max(8, 4 * volume // value_bytes))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rates = {name.strip('"'): float(rate.strip('"')) for name, rate, *_ in (line.split(",") for line in lines[1:])}
    return {
        "contender": "redis-benchmark",
        "transport": transport,
        "value_mib": value_bytes // MIB,
        "set_gb_s": rates["SET"] * value_bytes / 1e9,
        "get_gb_s": rates["GET"] * value_bytes / 1e9,
    }


def _contenders(
    stack: ExitStack, urls: dict[str, str], arena: _Arena, peer: Piped | None, quick: bool
) -> list[tuple[Row, Pair]]:
    """What each is, and its work."""
    found: list[tuple[Row, Pair]] = []
    sizes = _OBJECTS_MIB[:2] if quick else _OBJECTS_MIB
    for transport in _TRANSPORTS:
        client = stack.enter_context(redis.Redis.from_url(urls[transport], protocol=2))
        for part in _PARTS_MIB:
            for together in (1, _together(part)):
                row = {"contender": "redis-py with hiredis", "transport": transport, "value_mib": part}
                found.append(({**row, "together": together}, _redis_py(client, arena, part * MIB, together)))
            tier = RedisTier(urls[transport], key_prefix=f"bench{part}:", part_bytes=part * MIB)
            stack.enter_context(closing(tier))
            for size in sizes:
                if size < part:
                    # One part of its own size: that is there already.
                    continue
                for callers, together in product(_CALLERS, {1, _together(size)}):
                    row = {"contender": "kvblend", "transport": transport, "object_mib": size, "part_mib": part}
                    threads = stack.enter_context(ThreadPoolExecutor(callers))
                    pair = _ours(tier, arena, size * MIB, together, callers, threads)
                    found.append(({**row, "together": together, "callers": callers}, pair))
    if peer is not None:
        for size in sizes[:2]:
            for workers in _WORKERS:
                row = {"contender": "LMCache", "transport": "tcp", "value_mib": size, "workers": workers}
                found.append((row, _lmcache(peer, size * MIB, workers)))
    return found


def run(quick: bool, screen: Screen) -> Row:
    volume = (8 if quick else _VOLUME_MIB) * MIB
    with ExitStack() as stack:
        urls = stack.enter_context(running_redis())
        arena = _Arena(volume)
        peer = None
        if PEERS_PYTHON.exists():
            arguments = ["benchmarks.store.redis_peer", urls["tcp"].rpartition(":")[2], str(volume)]
            peer = stack.enter_context(piped({"lmcache": (PEERS_PYTHON, arguments)}))["lmcache"]
        contenders = _contenders(stack, urls, arena, peer, quick)
        admin = stack.enter_context(redis.Redis.from_url(urls["unix"]))
        with screen.working("Redis"):
            rows = _rounds(contenders, admin, volume, _ROUNDS[quick])
        rows += _ceilings(urls, volume)
        if arena.target != arena.source:
            raise RuntimeError("what came back is not what was sent")
    for row in rows:
        if row["contender"] != "kvblend" or row["callers"] == 1:
            screen.line(_text(row))
    return {"volume_bytes": volume, "rows": rows, "lmcache": peer is not None, "quick": quick}


def _ceilings(urls: dict[str, str], volume: int) -> list[Row]:
    if shutil.which("redis-benchmark") is None:
        return []
    return [_redis_benchmark(urls, transport, part * MIB, volume) for transport in _TRANSPORTS for part in _PARTS_MIB]


def _rounds(contenders: Sequence[tuple[Row, Pair]], admin: redis.Redis, volume: int, rounds: int) -> list[Row]:
    """Medians over rounds in which everybody has a turn; the first turns, of memory never used before, do not count.

    After each turn its keys are deleted: everybody writes new ones, in memory that the server has used before.
    """
    seconds: list[tuple[list[float], list[float]]] = [([], []) for _ in contenders]
    for turn in range(rounds + 1):
        for (_, pair), kept in zip(contenders, seconds, strict=True):
            for work, times in zip(pair, kept, strict=True):
                start = time.perf_counter()
                work()
                if turn:
                    times.append(time.perf_counter() - start)
            admin.delete(*admin.keys())
    return [
        {**row, "set_gb_s": volume / statistics.median(puts) / 1e9, "get_gb_s": volume / statistics.median(gets) / 1e9}
        for (row, _), (puts, gets) in zip(contenders, seconds, strict=True)
    ]


def _text(row: Row) -> str:
    sizes = ", ".join(f"{name.removesuffix('_mib')} {row[name]} MiB" for name in row if name.endswith("_mib"))
    workers = f", {row['workers']} workers" if "workers" in row else ""
    workers += f", {row['together']} a call" if "together" in row else ""
    rates = f"SET {row['set_gb_s']:.2f}, GET {row['get_gb_s']:.2f} GB/s"
    return f"{row['transport']:4}  {row['contender']:22} {sizes + workers:40} {rates}"


def targets(_section: Row) -> list[Target]:
    """2x redis-py with hiredis on unix, one caller each; level with LMCache's connector on TCP at 1 and 4 MiB."""
    wanted = []
    for figure in ("set_gb_s", "get_gb_s"):
        name = figure[:3].upper()
        redis_py, lmcache = partial(_over_redis_py, figure), partial(_over_lmcache, figure)
        wanted.append(_all_at_least(f"Redis {name} over redis-py with hiredis, unix", 2.0, redis_py))
        wanted.append(_all_at_least(f"Redis {name} over LMCache's connector, TCP", 0.95, lmcache))
    return wanted


def _all_at_least(name: str, bound: float, measure: Callable[[Row], dict[str, float]]) -> Target:
    return Target(name, f">= {bound}", measure, lambda ratios: min(ratios.values()) >= bound)


def _over_redis_py(figure: str, section: Row) -> dict[str, float]:
    """By object size, in parts of the default size; redis-py has values of the parts' size, and its faster way."""
    rows = [row for row in _full(section) if row["transport"] == "unix"]
    ratios = {}
    for size in _OBJECTS_MIB:
        part = min(size, _PART_MIB)
        ours = one(rows, contender="kvblend", object_mib=size, part_mib=part, callers=1, together=_together(size))
        theirs = [row for row in rows if row["contender"] == "redis-py with hiredis" and row["value_mib"] == part]
        ratios[f"{size} MiB"] = ours[figure] / max(row[figure] for row in theirs)
    return ratios


def _over_lmcache(figure: str, section: Row) -> dict[str, float]:
    """By size of object and value, each at its best number of callers and workers."""
    rows = [row for row in _full(section) if row["transport"] == "tcp"]
    ratios = {}
    for size in (1, 4):
        ours = [row[figure] for row in rows if row["contender"] == "kvblend" and row["object_mib"] == size]
        theirs = [row[figure] for row in rows if row["contender"] == "LMCache" and row["value_mib"] == size]
        if not theirs:
            raise LookupError(size)
        ratios[f"{size} MiB"] = max(ours) / max(theirs)
    return ratios


def _full(section: Row) -> list[Row]:
    if section["quick"]:
        raise LookupError("was run small")
    rows: list[Row] = section["rows"]
    return rows

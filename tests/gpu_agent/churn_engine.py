"""Engines by the hundred, for churn.py: one process imports everything, and forks an engine whenever it is asked to.

KV is a function of token and position, so that an engine knows every byte that it may get back. It speaks to the GPU's
driver itself: nothing of CUDA may be there before the fork, and importing torch would take too long.

    python churn_engine.py SOCKET DEVICE AGENT DIRECTORY
"""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvblend.client import KvblendClient
from kvblend.cuda_memory import cuda_handle
from kvblend.layouts import KvShape, buffer_bytes, build_layout
from kvblend.memory import SharedBuffer
from kvblend.results import LookupResult
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]

ARRANGEMENT = "paged_nhd"
# 8 KiB a token, 4 MiB in all.
SHAPE = KvShape(layers=8, heads=4, head_size=32, blocks=128, block_tokens=4, dtype=common.DTYPE_FLOAT32)
SLOTS = SHAPE.blocks * SHAPE.block_tokens
CHUNK_TOKENS = 16
PAIRS = 8
FREQUENCIES = 1e4 ** (-np.arange(PAIRS) / PAIRS)
ROPE = common.Rope(style=common.ROPE_STYLE_NEOX, rotary_size=2 * PAIRS, inv_freq=FREQUENCIES.astype("<f8").tobytes())
# Of K that was moved in fp32; its values are below 1.
TOLERANCE = 1e-4
UNTOUCHED = np.float32(123.0)
CALL_SECONDS = 5.0


def kv_of(tokens: Numbers, positions: Numbers) -> Floats:
    """[layers, 2, n, heads, size]: what these tokens' KV is when they are computed there."""
    index = np.arange(SHAPE.layers * SHAPE.heads * SHAPE.head_size).reshape(SHAPE.layers, 1, SHAPE.heads, -1)
    token = tokens[None, :, None, None]
    key = _noise(token * 7919 + index * 104_729)
    angles = positions[:, None] * FREQUENCIES
    cos, sin = (of(angles).astype(np.float32)[None, :, None] for of in (np.cos, np.sin))
    one, two = key[..., :PAIRS].copy(), key[..., PAIRS : 2 * PAIRS].copy()
    key[..., :PAIRS], key[..., PAIRS : 2 * PAIRS] = one * cos - two * sin, two * cos + one * sin
    value = _noise(token * 15_485_863 + positions[None, :, None, None] * 32_452_843 + index * 49_979_687)
    return np.stack([key, value], axis=1)


def _noise(seed: Numbers) -> Floats:
    """From -0.5 to 0.5."""
    mixed = (seed.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
    return (mixed.astype(np.float64) / (1 << 24) - 0.5).astype(np.float32)


class CpuMemory:
    def __init__(self, nbytes: int, directory: Path) -> None:
        self._buffer = SharedBuffer(nbytes, directory)

    def handle(self, offset: int, nbytes: int) -> pb.DeviceHandle:
        handle = self._buffer.handle()
        handle.allocation_offset, handle.bytes = offset, nbytes
        return handle

    def read(self) -> Floats:
        return self._buffer.array.view(np.float32).copy()

    def write(self, content: Floats) -> None:
        self._buffer.array.view(np.float32)[:] = content


class GpuMemory:
    def __init__(self, nbytes: int) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._nbytes = nbytes
        self._address = ctypes.c_uint64()
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(self._address), ctypes.c_size_t(nbytes))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        assert code == 0, f"{name}: {code}"

    def handle(self, offset: int, nbytes: int) -> pb.DeviceHandle:
        return cuda_handle(self._address.value + offset, nbytes)

    def read(self) -> Floats:
        content = np.empty(self._nbytes // 4, np.float32)
        host, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(self._nbytes)
        self._call("cuMemcpyDtoH_v2", host, self._address, size)
        return content

    def write(self, content: Floats) -> None:
        host, size = ctypes.c_void_p(content.ctypes.data), ctypes.c_size_t(self._nbytes)
        self._call("cuMemcpyHtoD_v2", self._address, host, size)
        self._call("cuCtxSynchronize")


class Engine:
    """Every verb answers with what is to be counted, and `wrong`: what must never happen.

    `unsure`: a copy was given up and the agent may still be at it. Memory of which that is true is never used again.
    """

    def __init__(self, device: str, agent: str, directory: Path) -> None:
        sizes = buffer_bytes(ARRANGEMENT, SHAPE)
        self._memory = CpuMemory(sum(sizes), directory) if device == "cpu" else GpuMemory(sum(sizes))
        self._handles = [self._memory.handle(sum(sizes[:number]), size) for number, size in enumerate(sizes)]
        self._client = KvblendClient(agent, f"engine-{os.getpid()}")

    def register(self) -> dict[str, Any]:
        group = common.LayerGroup(
            attention=common.ATTENTION_KIND_FULL,
            layers=SHAPE.layers,
            kv_heads=SHAPE.heads,
            head_size=SHAPE.head_size,
            rope=ROPE,
        )
        space = common.ModelSpace(
            weights_fingerprint=b"w" * 32, kv_dtype=SHAPE.dtype, groups=[group], chunk_tokens=CHUNK_TOKENS
        )
        layout = build_layout(ARRANGEMENT, SHAPE)
        done = self._client.register_kv_cache(space, self._handles, layout, timeout=CALL_SECONDS)
        if done:
            keys = [kv_of(np.array([5]), np.array([position]))[0, 0, 0] for position in (3, 900)]
            proof = pb.RopeProof(position_a=3, key_a=keys[0].tobytes(), position_b=900, key_b=keys[1].tobytes())
            done = self._client.register_rope([ROPE], [proof], timeout=CALL_SECONDS)
        return {"failed": done.reason}

    def unregister(self) -> dict[str, Any]:
        return {"failed": self._client.unregister_kv_cache(timeout=CALL_SECONDS).reason}

    def store(self, name: str, tokens: list[int], blocks: list[int], first: int) -> dict[str, Any]:
        """A document behind `first` tokens of context, a prompt if there are none."""
        content = np.full((SHAPE.layers, 2, SLOTS, SHAPE.heads, SHAPE.head_size), UNTOUCHED)
        content[:, :, slots_of(blocks, len(tokens))] = kv_of(np.array(tokens), first + np.arange(len(tokens)))
        self._memory.write(content.ravel())
        kind = {"kind": "document", "first_position": first, "context": [1] * first, "document": name} if first else {}
        done = self._client.store(tokens, name, block_ids=blocks, timeout=CALL_SECONDS, **kind)
        stored = sum(chunk.outcome == "STORED" for chunk in done.chunks)
        return {"failed": done.reason, "unsure": bool(done.reason and not done.chunks), "stored": stored}

    def lookup(self, name: str, tokens: list[int]) -> dict[str, Any]:
        """And leaves its leases to whoever finds that the engine has gone."""
        return {"failed": self._client.lookup(tokens, name, timeout=CALL_SECONDS).reason}

    def retrieve(self, name: str, tokens: list[int], blocks: list[int]) -> dict[str, Any]:
        content = np.full(SLOTS * SHAPE.layers * 2 * SHAPE.heads * SHAPE.head_size, UNTOUCHED)
        self._memory.write(content)
        found = self._client.lookup(tokens, name, timeout=CALL_SECONDS)
        done = self._client.retrieve(name, block_ids=blocks, timeout=CALL_SECONDS)
        unsure = bool(done.reason and not done.failed)
        answer = {"failed": found.reason or done.reason, "unsure": unsure}
        if found and not unsure:
            answer |= self._check(np.array(tokens), blocks, found, done.written)
        self._client.end_session(name, timeout=CALL_SECONDS)
        return answer

    def _check(
        self, tokens: Numbers, blocks: list[int], found: LookupResult, written: tuple[tuple[int, int], ...]
    ) -> dict[str, Any]:
        """Every byte that is said to be written, and every byte that nobody had a reason to touch."""
        kv = self._memory.read().reshape(SHAPE.layers, 2, SLOTS, SHAPE.heads, SHAPE.head_size)
        stored = np.full(len(tokens), -1)
        stored[: found.prefix_tokens] = np.arange(found.prefix_tokens)
        for segment in found.segments:
            stored[segment.query_position :][: segment.length] = segment.stored_position + np.arange(segment.length)
        places = np.concatenate([np.arange(0), *[np.arange(first, first + length) for first, length in written]])
        if (stored[places] < 0).any():
            return {"wrong": "something is called written that was not found"}
        slots = slots_of(blocks, len(tokens))
        got = kv[:, :, slots[places]]
        made, moved = kv_of(tokens[places], stored[places]), places != stored[places]
        if (got[:, 1] != made[:, 1]).any():
            return {"wrong": "V is another token's or another position's"}
        if (got[:, 0, ~moved] != made[:, 0, ~moved]).any():
            return {"wrong": "K that stayed where it was differs"}
        there = kv_of(tokens[places], places)
        if not (np.abs(got[:, 0, moved] - there[:, 0, moved]) < TOLERANCE).all():
            return {"wrong": "K that was moved differs from K made there"}
        if (got[:, 0, :, :, 2 * PAIRS :] != there[:, 0, :, :, 2 * PAIRS :]).any():
            return {"wrong": "the part of K that is not rotated differs"}
        kv[:, :, slots] = UNTOUCHED
        if (kv != UNTOUCHED).any():
            return {"wrong": "slots outside the request were written"}
        return {"prefix": int((~moved).sum()), "moved": int(moved.sum())}

    def close(self) -> None:
        self._client.close()


def slots_of(blocks: list[int], count: int) -> Numbers:
    table = np.array(blocks)[:, None] * SHAPE.block_tokens + np.arange(SHAPE.block_tokens)
    return table.ravel()[:count]


def serve_engine(channel: socket.socket, device: str, agent: str, directory: Path) -> None:
    engine = Engine(device, agent, directory)
    while message := channel.recv(1 << 16):
        verb, arguments = json.loads(message)
        channel.send(json.dumps(getattr(engine, verb)(**arguments)).encode())
    engine.close()


def main(channel: socket.socket, device: str, agent: str, directory: Path) -> None:
    """Every message brings an engine's end of a socket, and is answered with its pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, (*ends,), _, _ = socket.recv_fds(channel, 16, 1)
        if not message:
            return
        pid = os.fork()
        if not pid:
            channel.close()
            code = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve_engine(socket.socket(fileno=ends[0]), device, agent, directory)
                code = 0
            finally:
                sys.stderr.flush()
                # No interpreter's end: what is left of an engine must not depend on it.
                os._exit(code)
        os.close(ends[0])
        channel.send(str(pid).encode())


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], sys.argv[3], Path(sys.argv[4]))

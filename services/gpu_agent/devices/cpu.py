"""The cpu device: the engine's tensors live in shared memory, copies are strided torch operations."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import Checksum, checksum_of
from services.common.errors import KvblendError
from services.common.populate import populate
from services.gpu_agent.devices.base import SEMAPHORE_BYTES, Bytes, KvMemory, Piece, Steps, Transfer, Watch
from services.gpu_agent.devices.shared_memory import SharedMemoryFile
from services.gpu_agent.engines.descriptors import NO_DESCRIPTORS, Descriptors
from services.gpu_agent.engines.layouts import GroupShape, Layout
from services.gpu_agent.engines.rope import RopeSpec

_DTYPES: dict[int, torch.dtype] = {
    common.DTYPE_FLOAT32: torch.float32,
    common.DTYPE_FLOAT16: torch.float16,
    common.DTYPE_BFLOAT16: torch.bfloat16,
    common.DTYPE_FLOAT8_E4M3: torch.float8_e4m3fn,
    common.DTYPE_FLOAT8_E5M2: torch.float8_e5m2,
}

_KEY_KINDS = (pb.PLANE_KIND_KEY, pb.PLANE_KIND_LATENT)


class CpuDevice:
    """KV in shared memory."""

    name = "cpu"

    def __init__(self, shm_dir: Path, copy_threads: int) -> None:
        self._shm_dir = shm_dir
        torch.set_num_threads(copy_threads)

    def adopt(self, memory: Bytes) -> None:
        """Fills the page tables, beside whatever is copied already."""
        threading.Thread(target=populate, args=(memory,), name="populate", daemon=True).start()

    def release(self, memory: Bytes) -> None:
        """Nothing was kept of it."""

    def open(
        self,
        handles: Sequence[pb.DeviceHandle],
        layout: Layout,
        semaphores: pb.DeviceHandle | None = None,
        descriptors: Descriptors = NO_DESCRIPTORS,
    ) -> KvMemory:
        del descriptors
        files: list[SharedMemoryFile] = []
        try:
            for handle in (*handles, *([semaphores] if semaphores is not None else [])):
                files.append(SharedMemoryFile(handle, self._shm_dir))
            return CpuKvMemory(files, handles, layout, semaphores)
        except BaseException:
            for file in files:
                file.close()
            raise

    def opened(self, event: pb.Event) -> AbstractContextManager[Callable[[], bool]]:
        raise KvblendError(
            "HANDLE_UNUSABLE",
            f"an event of kind {event.kind} needs the cuda device; this agent runs the cpu device",
        )


class CpuKvMemory:
    """Every plane as a strided view [blocks, block_tokens, heads, size] of its file."""

    def __init__(
        self,
        files: list[SharedMemoryFile],
        handles: Sequence[pb.DeviceHandle],
        layout: Layout,
        semaphores: pb.DeviceHandle | None,
    ) -> None:
        """`files` are those of the handles, and then that of the semaphores if there are any."""
        self.mapped_bytes = sum(handle.bytes for handle in handles)
        self.semaphores = semaphores.bytes // SEMAPHORE_BYTES if semaphores is not None else 0
        self._semaphores = np.empty(0, np.uint64)
        if semaphores is not None:
            self._semaphores = np.frombuffer(files[-1].map, np.uint64, self.semaphores, semaphores.allocation_offset)
        self._files = files
        self._layout = layout
        self._dtype = _DTYPES[layout.dtype]
        self._views = [
            [[self._view(plane, handles) for plane in of_layer] for of_layer in by_layer] for by_layer in layout.planes
        ]

    def _view(self, plane: pb.Plane, handles: Sequence[pb.DeviceHandle]) -> torch.Tensor:
        handle = handles[plane.handle]
        usable = memoryview(self._files[plane.handle].map)[handle.allocation_offset :][: handle.bytes]
        count = (handle.bytes - plane.byte_offset) // self._dtype.itemsize
        flat = torch.frombuffer(usable, dtype=self._dtype, count=count, offset=plane.byte_offset)
        return flat.as_strided(
            (self._layout.blocks, self._layout.block_tokens, plane.heads, plane.head_size),
            (plane.block_stride, plane.token_stride, plane.head_stride, plane.element_stride),
        )

    def prepare(self, ropes: Sequence[RopeSpec]) -> None:
        """Nothing is compiled here."""

    def scatter(self, group: int, pieces: Sequence[Piece], rope: RopeSpec, watch: Watch) -> list[int | None]:
        checksums = [checksum_of(piece.block.data) if piece.checked and piece.whole else None for piece in pieces]
        self._scattering(Transfer(group, pieces, rope))(range(len(self._views[group])), watch)
        return checksums

    def scatter_in_steps(self, transfers: Sequence[Transfer], steps: Steps, watch: Watch) -> list[list[int | None]]:
        scattering = [self._scattering(transfer) for transfer in transfers]
        for step in range(steps.count):
            for transfer, scatter in zip(transfers, scattering, strict=True):
                scatter(steps.layers(step, len(self._views[transfer.group])), watch)
            self._semaphores[steps.first + step] = steps.value
        return [[None] * len(transfer.pieces) for transfer in transfers]

    def set_semaphores(self, steps: Steps) -> None:
        self._semaphores[steps.first : steps.first + steps.count] = steps.value

    def semaphore(self, index: int, watch: Watch) -> int:
        del watch
        return int(self._semaphores[index])

    def _scattering(self, transfer: Transfer) -> Callable[[range, Watch], None]:
        """What writes some of the layers."""
        group = transfer.group
        # Pieces that stay come first: what follows is rotated in one stretch, and they are never touched by arithmetic.
        pieces = sorted(transfer.pieces, key=lambda piece: piece.delta != 0)
        blocks = [self._object(group, piece) for piece in pieces]
        index = self._index(pieces)
        staging = self._staging(group, pieces)
        rotation = _Rotation(pieces, transfer.rope)

        def scatter(layers: range, watch: Watch) -> None:
            for layer in layers:
                for plane, view in enumerate(self._views[group][layer]):
                    watch()
                    parts = [
                        block[layer, plane, piece.first : piece.first + len(piece.slots)]
                        for block, piece in zip(blocks, pieces, strict=True)
                    ]
                    torch.cat(parts, out=staging)
                    if self._layout.planes[group][layer][plane].kind in _KEY_KINDS:
                        rotation.apply(staging)
                    view[index] = staging

        return scatter

    def gather(self, group: int, pieces: Sequence[Piece], watch: Watch) -> list[int | None]:
        checksums = [Checksum() if piece.checked and piece.whole else None for piece in pieces]
        blocks = [self._object(group, piece) for piece in pieces]
        index = self._index(pieces)
        sizes = [len(piece.slots) for piece in pieces]
        for layer, views in enumerate(self._views[group]):
            for plane, view in enumerate(views):
                watch()
                parts = view[index].split(sizes)
                for block, piece, part, checksum in zip(blocks, pieces, parts, checksums, strict=True):
                    written = block[layer, plane, piece.first : piece.first + len(piece.slots)]
                    written.copy_(part)
                    if checksum is not None:
                        # Planes follow each other in the block, and this one is in the cache now.
                        checksum.update(written.view(torch.uint8).numpy().data)
        return [checksum.value() if checksum is not None else None for checksum in checksums]

    def check(self) -> None:
        for file in self._files:
            file.check()

    def close(self) -> None:
        self._views.clear()
        self._semaphores = np.empty(0, np.uint64)
        for file in self._files:
            file.close()
        self._files = []

    def _object(self, group: int, piece: Piece) -> torch.Tensor:
        return object_view(piece.block, self._layout.groups[group], piece.tokens, self._dtype)

    def _index(self, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        slots = np.concatenate([piece.slots for piece in pieces])
        block_tokens = self._layout.block_tokens
        return torch.from_numpy(slots // block_tokens), torch.from_numpy(slots % block_tokens)

    def _staging(self, group: int, pieces: Sequence[Piece]) -> torch.Tensor:
        shape = self._layout.groups[group]
        return torch.empty((sum(len(piece.slots) for piece in pieces), shape.heads, shape.head_size), dtype=self._dtype)


def object_view(block: Bytes, shape: GroupShape, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """An object's payload as [layers, planes, tokens, heads, size]."""
    flat = torch.frombuffer(block, dtype=dtype)
    return flat.view(shape.layers, shape.planes, tokens, shape.heads, shape.head_size)


class _Rotation:
    """Rotates the trailing tokens of a staging buffer, those whose delta is not 0."""

    def __init__(self, pieces: Sequence[Piece], rope: RopeSpec) -> None:
        moved = [piece for piece in pieces if piece.delta]
        self._first = sum(len(piece.slots) for piece in pieces if not piece.delta)
        self._active = bool(moved) and rope.rotates
        if self._active:
            counts = torch.tensor([len(piece.slots) for piece in moved])
            cos, sin = rope.tables(np.array([piece.delta for piece in moved], np.int64))
            # [tokens, 1, pairs], one row a token.
            self._cos = torch.from_numpy(cos).repeat_interleave(counts, 0).unsqueeze(1)
            self._sin = torch.from_numpy(sin).repeat_interleave(counts, 0).unsqueeze(1)
            self._one, self._two = rope.pairs()

    def apply(self, keys: torch.Tensor) -> None:
        """In place on [tokens, heads, size]: fp32 arithmetic, one rounding to the KV dtype; fp8 saturates."""
        if not self._active:
            return
        keys = keys[self._first :]
        one = keys[..., self._one].float()
        two = keys[..., self._two].float()
        # Both results before either is written: in fp32 `one` and `two` are views of `keys`.
        moved = one * self._cos - two * self._sin, two * self._cos + one * self._sin
        keys[..., self._one], keys[..., self._two] = (rounded(part, keys.dtype) for part in moved)


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f32 in the KV's dtype, to nearest even. fp8 saturates at its largest finite value; NaN stays NaN."""
    if dtype.itemsize == 1:
        # What torch makes of more than that differs between its versions.
        largest = torch.finfo(dtype).max
        values = values.clamp(-largest, largest)
    return values.to(dtype)

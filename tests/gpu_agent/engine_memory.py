"""An engine's KV memory for tests, read and written by plain indexing that knows nothing of strides."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from kvblend.layouts import KvShape, buffer_shapes, build_layout
from kvblend.memory import SHM_DIR, SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common

DTYPES = {
    common.DTYPE_FLOAT32: torch.float32,
    common.DTYPE_FLOAT16: torch.float16,
    common.DTYPE_BFLOAT16: torch.bfloat16,
    common.DTYPE_FLOAT8_E4M3: torch.float8_e4m3fn,
    common.DTYPE_FLOAT8_E5M2: torch.float8_e5m2,
}
FP8 = (common.DTYPE_FLOAT8_E4M3, common.DTYPE_FLOAT8_E5M2)
BITS = {4: torch.int32, 2: torch.int16, 1: torch.int8}


class EngineMemory:
    """Buffers of one named arrangement, filled with arbitrary bits."""

    def __init__(self, arrangement: str, shape: KvShape, seed: int = 0, directory: Path = SHM_DIR) -> None:
        self.arrangement = arrangement
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        self.shapes = buffer_shapes(arrangement, shape)
        self.buffers = [SharedBuffer(prod(dims) * self.dtype.itemsize, directory) for dims in self.shapes]
        self._views = [
            torch.frombuffer(buffer.array, dtype=self.dtype).view(dims)
            for buffer, dims in zip(self.buffers, self.shapes, strict=True)
        ]
        generator = torch.Generator().manual_seed(seed)
        for tensor in self._views:
            tensor.copy_(arbitrary(tensor.numel(), self.dtype, generator).view(tensor.shape))

    def _tensors(self) -> list[torch.Tensor]:
        return self._views

    @property
    def handles(self) -> list[pb.DeviceHandle]:
        return [buffer.handle() for buffer in self.buffers]

    @property
    def layout(self) -> pb.KvLayout:
        return build_layout(self.arrangement, self.shape)

    def token(self, layer: int, kind: int, slot: int) -> torch.Tensor:
        """K (kind 0) or V (1) of one slot, a view [heads, size]."""
        block, place = divmod(slot, self.shape.block_tokens)
        tensors = self._tensors()
        match self.arrangement:
            case "contiguous":
                return tensors[0][layer, kind, 0, slot]
            case "paged_nhd":
                return tensors[2 * layer + kind][block, place]
            case "paged_nhd_kv_outer":
                return tensors[layer][kind, block, place]
            case "paged_nhd_kv_inner":
                return tensors[layer][block, kind, place]
            case "paged_hnd":
                return tensors[2 * layer + kind][block, :, place]
            case "paged_hnd_kv_inner":
                return tensors[layer][block, kind, :, place]
            case "interleaved":
                return tensors[layer][block, place, :, kind]
            case "vllm_cpu":
                size, tokens = self.shape.head_size, self.shape.block_tokens
                halves = tensors[layer].view(self.shape.blocks, self.shape.heads, 2, size * tokens)[block, :, kind]
                if kind == 0:
                    return halves.view(self.shape.heads, size, tokens)[:, :, place]
                return halves.view(self.shape.heads, tokens, size)[:, place]
        raise AssertionError(self.arrangement)

    def read(self, slots: list[int]) -> torch.Tensor:
        """[layers, 2, tokens, heads, size], a copy."""
        return torch.stack(
            [
                torch.stack([torch.stack([self._bits(layer, kind, slot) for slot in slots]) for kind in (0, 1)])
                for layer in range(self.shape.layers)
            ]
        ).view(self.dtype)

    def write(self, slots: list[int], values: torch.Tensor) -> None:
        bits = values.view(BITS[self.dtype.itemsize])
        for layer in range(self.shape.layers):
            for kind in (0, 1):
                for index, slot in enumerate(slots):
                    self._bits(layer, kind, slot).copy_(bits[layer, kind, index])

    def _bits(self, layer: int, kind: int, slot: int) -> torch.Tensor:
        return self.token(layer, kind, slot).view(BITS[self.dtype.itemsize])

    def rounded(self, keys: torch.Tensor) -> torch.Tensor:
        """To the engine's dtype; what is smaller than that of its arithmetic is rounded elsewhere."""
        return keys.to(self.dtype) if self.dtype.itemsize > 1 else keys

    def snapshot(self) -> list[bytes]:
        return [bytes(buffer.array) for buffer in self.buffers]

    def close(self) -> None:
        self._views = []
        for buffer in self.buffers:
            buffer.close()


def arbitrary(count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """[count] values on the generator's device; of fp8 every finite one, and many so large that a pair saturates."""
    device = generator.device
    if dtype.itemsize > 1:
        return torch.randn(count, generator=generator, device=device).to(dtype)
    bits, large = torch.randint(0, 256, (2, count), generator=generator, device=device, dtype=torch.uint8)
    bits = torch.where(large < 64, bits | 0x70, bits)
    bits[~bits.view(dtype).float().isfinite()] = 0
    return bits.view(dtype)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    kind = BITS[one.dtype.itemsize]
    return torch.equal(one.contiguous().view(kind), two.contiguous().view(kind))


def model_space(shape: KvShape, rope: common.Rope, chunk_tokens: int = 16) -> common.ModelSpace:
    group = common.LayerGroup(
        attention=common.ATTENTION_KIND_FULL,
        layers=shape.layers,
        kv_heads=shape.heads,
        head_size=shape.head_size,
        rope=rope,
    )
    return common.ModelSpace(
        weights_fingerprint=b"w" * 32, kv_dtype=shape.dtype, groups=[group], chunk_tokens=chunk_tokens
    )


def make_rope(
    style: common.RopeStyle, head_size: int, *, rotary_size: int = 0, offset: int = 0, theta: float = 1e4
) -> common.Rope:
    if style not in (common.ROPE_STYLE_NEOX, common.ROPE_STYLE_GPTJ):
        return common.Rope(style=style)
    size = rotary_size or head_size
    inv_freq = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    return common.Rope(
        style=style, rotary_size=rotary_size, rotary_offset=offset, inv_freq=inv_freq.numpy().astype("<f8").tobytes()
    )


def rotate_slowly(keys: torch.Tensor, rope: common.Rope, delta: int) -> torch.Tensor:
    """K [..., size] moved by `delta` positions, in f64, one pair after the other."""
    out = keys.to(torch.float64).clone()
    for one, two, frequency in pairs_of(rope):
        angle = torch.tensor(delta * frequency, dtype=torch.float64)
        x, y = keys[..., one].to(torch.float64), keys[..., two].to(torch.float64)
        out[..., one] = x * angle.cos() - y * angle.sin()
        out[..., two] = x * angle.sin() + y * angle.cos()
    return out


def pairs_of(rope: common.Rope) -> Iterator[tuple[int, int, float]]:
    """The two elements of each pair and its frequency."""
    inv_freq = torch.frombuffer(bytearray(rope.inv_freq), dtype=torch.float64).tolist() if rope.inv_freq else []
    for pair, frequency in enumerate(inv_freq):
        if rope.style == common.ROPE_STYLE_GPTJ:
            yield rope.rotary_offset + 2 * pair, rope.rotary_offset + 2 * pair + 1, frequency
        else:
            yield rope.rotary_offset + pair, rope.rotary_offset + pair + len(inv_freq), frequency


def lengths(keys: torch.Tensor, rope: common.Rope) -> torch.Tensor:
    """Of each element of K [..., size] the length of its pair, which a rotation keeps, in f64; 0 without a pair."""
    found = torch.zeros(keys.shape, dtype=torch.float64)
    for one, two, _ in pairs_of(rope):
        length = torch.hypot(keys[..., one].to(torch.float64), keys[..., two].to(torch.float64))
        found[..., one] = found[..., two] = length
    return found


def rotated_elements(rope: common.Rope) -> slice:
    size = 2 * len(rope.inv_freq) // 8
    return slice(rope.rotary_offset, rope.rotary_offset + size)

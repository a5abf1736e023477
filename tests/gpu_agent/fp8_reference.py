"""fp8 by its definition, one code after the other: sign, exponent and mantissa of eight bits."""

import math
from bisect import bisect_left
from functools import cache
from math import inf, nan

import torch

# dtype -> (bits of the mantissa, bias of the exponent, codes above the largest finite one, of each sign)
FORMATS = {torch.float8_e4m3fn: (3, 7, (nan,)), torch.float8_e5m2: (2, 15, (inf, nan, nan, nan))}


@cache
def magnitudes(dtype: torch.dtype) -> list[float]:
    """The finite values of codes 0, 1, 2, ..., which ascend."""
    mantissa_bits, bias, special = FORMATS[dtype]
    found = []
    for code in range(128 - len(special)):
        exponent, mantissa = divmod(code, 1 << mantissa_bits)
        # A subnormal has the smallest normal exponent and no leading one.
        significand = mantissa + (1 << mantissa_bits if exponent else 0)
        found.append(significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    return found


def decode(code: int, dtype: torch.dtype) -> float:
    values = [*magnitudes(dtype), *FORMATS[dtype][2]]
    return -values[code - 128] if code & 128 else values[code]


def nearest(value: float, dtype: torch.dtype) -> float:
    """The nearest finite value, of two as near that of the even code; beyond the largest the largest."""
    values = magnitudes(dtype)
    size = min(abs(value), values[-1])
    above = bisect_left(values, size)
    below = max(above - 1, 0)
    # Exact in f64: fp8 values have few bits.
    middle = (values[below] + values[above]) / 2
    code = above if size > middle or (size == middle and above % 2 == 0) else below
    return math.copysign(values[code], value)


def is_rounded(found: torch.Tensor, exact: torch.Tensor, unsure: torch.Tensor) -> bool:
    """Whether `found` (fp8) is what some value within `unsure` of `exact` (both f64) is rounded to."""
    best = torch.tensor([nearest(value, found.dtype) for value in exact.flatten().tolist()], dtype=torch.float64)
    farther = (found.to(torch.float64) - exact).abs() - (best.view(exact.shape) - exact).abs()
    return bool((farther <= 2 * unsure).all())

"""The CUDA driver on the engine's side, through ctypes: no torch."""

import ctypes
from functools import cache
from typing import Any

_DEVICE_ORDINAL = 9


class CudaUnavailable(RuntimeError):
    """There is no CUDA driver, or it refused; the text names the call, or the setting to change."""


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaUnavailable(f"there is no CUDA driver: {error}") from error


def call(name: str, *arguments: Any) -> None:
    """Raises CudaUnavailable."""
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise CudaUnavailable(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def uuid_at(address: int) -> str:
    """UUID of the GPU that holds this memory, as nvidia-smi prints it. Raises CudaUnavailable."""
    ordinal, device = ctypes.c_int(), ctypes.c_int()
    call("cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(_DEVICE_ORDINAL), ctypes.c_uint64(address))
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    raw = (ctypes.c_ubyte * 16)()
    call("cuDeviceGetUuid_v2", ctypes.byref(raw), device)
    text = bytes(raw).hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))

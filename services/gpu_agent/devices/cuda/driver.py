"""The CUDA driver, as far as torch does not offer it: memory of other processes, host registration, raw copies.

Every call is checked, and a failure names the call and the driver's own name for the error.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

IPC_HANDLE_BYTES = 64

_SUCCESS = 0
_NOT_READY = 600
_LAZY_PEER_ACCESS = 1
_REGISTER_PORTABLE = 1
_HOST, _DEVICE = 1, 2
_POSIX_FILE_DESCRIPTOR = 1
_ON_A_DEVICE, _READ_AND_WRITE = 1, 3


class CudaError(Exception):
    """A driver call failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name} ({code})")
        self.call = call
        self.code = code


class _Handle(ctypes.Structure):
    """Opaque; passed by value."""

    _fields_ = (("bytes", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_kind", ctypes.c_int), ("location", ctypes.c_int), ("flags", ctypes.c_int))


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("src_x", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_kind", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_kind", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Driver:
    """libcuda and the primary context of one GPU, the one that torch uses too.

    Raises:
        OSError: there is no CUDA driver.
        CudaError: it does not work, or has no GPU of that number.
    """

    def __init__(self, ordinal: int) -> None:
        self._cuda = load()
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ctypes.c_int(ordinal))
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.bind()
        # A layer-wise transfer makes hundreds of these calls: with their types known they take a third of the time.
        host, device = ctypes.c_void_p, ctypes.c_uint64
        self._to_device = self._cuda.cuMemcpyHtoDAsync_v2
        self._to_device.argtypes = (device, host, ctypes.c_size_t, ctypes.c_void_p)
        self._to_host = self._cuda.cuMemcpyDtoHAsync_v2
        self._to_host.argtypes = (host, device, ctypes.c_size_t, ctypes.c_void_p)

    def _call(self, name: str, *arguments: Any) -> None:
        check(self._cuda, name, *arguments)

    def bind(self) -> None:
        """Makes the GPU's context this thread's. Every thread must, before its first call."""
        self._call("cuCtxSetCurrent", self._context)

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the GPU."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def problem(self) -> str:
        """Why the context is of no use any more, whatever is asked of it; empty: it works.

        A context that an illegal address or an uncorrectable error has broken answers every call with that.
        """
        try:
            self.bind()
            code = self._cuda.cuStreamQuery(ctypes.c_void_p(0))
            if code != _NOT_READY:
                _raise_if(self._cuda, "cuStreamQuery", code)
        except CudaError as error:
            return str(error)
        return ""

    # Memory of other processes by IPC handles

    def open_memory(self, handle: bytes) -> int:
        """The address at which another process's allocation begins here."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _handle(handle), ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value

    def close_memory(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def allocation(self, address: int) -> tuple[int, int]:
        """(first address, bytes) of the allocation that holds `address`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    # Memory of other processes by descriptors, one for each of its physical chunks

    def reserve(self, nbytes: int) -> int:
        """The first of so many addresses with nothing behind them."""
        address = ctypes.c_uint64()
        anywhere = (ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0))
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(nbytes), *anywhere)
        return address.value

    def map_descriptor(self, descriptor: int, address: int, nbytes: int) -> None:
        """Maps a whole chunk into reserved addresses, where it stays until `unmap`. The descriptor remains open."""
        chunk = ctypes.c_uint64()
        kind = ctypes.c_int(_POSIX_FILE_DESCRIPTOR)
        self._call("cuMemImportFromShareableHandle", ctypes.byref(chunk), ctypes.c_void_p(descriptor), kind)
        try:
            place = (ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_size_t(0))
            self._call("cuMemMap", *place, chunk, ctypes.c_ulonglong(0))
        finally:
            self._call("cuMemRelease", chunk)

    def allow_access(self, address: int, nbytes: int) -> None:
        """Lets this GPU read and write what is mapped there."""
        access = _Access(_ON_A_DEVICE, self._device.value, _READ_AND_WRITE)
        one = (ctypes.byref(access), ctypes.c_size_t(1))
        self._call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(nbytes), *one)

    def unmap(self, address: int, nbytes: int) -> None:
        """One whole chunk."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def free_addresses(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    # Events of other processes

    @contextmanager
    def opened_event(self, handle: bytes) -> Iterator[ctypes.c_void_p]:
        event = ctypes.c_void_p()
        self._call("cuIpcOpenEventHandle", ctypes.byref(event), _handle(handle))
        try:
            yield event
        finally:
            self._call("cuEventDestroy_v2", event)

    def event_done(self, event: ctypes.c_void_p) -> bool:
        code = self._cuda.cuEventQuery(event)
        if code == _NOT_READY:
            return False
        _raise_if(self._cuda, "cuEventQuery", code)
        return True

    def write_value(self, address: int, value: int, stream: int) -> None:
        """A u64 in GPU memory, in the stream's order, behind a fence for everything before it."""
        self._call(
            "cuStreamWriteValue64_v2",
            ctypes.c_void_p(stream),
            ctypes.c_uint64(address),
            ctypes.c_uint64(value),
            ctypes.c_uint(0),
        )

    # Host memory

    def register(self, address: int, nbytes: int) -> None:
        """Pins host memory, so that the GPU copies from and to it at the link's speed."""
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(_REGISTER_PORTABLE),
        )

    def unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    # Copies of `rows` rows of `width` bytes; a host row begins `pitch` bytes after the one before, device rows touch.

    def to_device(self, host: int, pitch: int, device: int, width: int, rows: int, stream: int) -> None:
        if rows == 1 or pitch == width:
            _raise_if(self._cuda, "cuMemcpyHtoDAsync_v2", self._to_device(device, host, width * rows, stream))
            return
        copy = _Copy2D(src_kind=_HOST, src_host=host, src_pitch=pitch, width=width, height=rows)
        copy.dst_kind, copy.dst_device, copy.dst_pitch = _DEVICE, device, width
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def to_host(self, device: int, host: int, pitch: int, width: int, rows: int, stream: int) -> None:
        if rows == 1 or pitch == width:
            _raise_if(self._cuda, "cuMemcpyDtoHAsync_v2", self._to_host(host, device, width * rows, stream))
            return
        copy = _Copy2D(src_kind=_DEVICE, src_device=device, src_pitch=width, width=width, height=rows)
        copy.dst_kind, copy.dst_host, copy.dst_pitch = _HOST, host, pitch
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))


def load() -> ctypes.CDLL:
    """Raises OSError without a driver, CudaError if it cannot start."""
    cuda = ctypes.CDLL("libcuda.so.1")
    check(cuda, "cuInit", ctypes.c_uint(0))
    return cuda


def visible_gpus() -> list[str]:
    """UUIDs of the GPUs that this process may use, by ordinal."""
    cuda = load()
    count = ctypes.c_int()
    check(cuda, "cuDeviceGetCount", ctypes.byref(count))
    found = []
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(), _Uuid()
        check(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        check(cuda, "cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        found.append(uuid_text(bytes(uuid.bytes)))
    return found


def uuid_text(raw: bytes) -> str:
    """As nvidia-smi prints it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx."""
    text = raw.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def check(cuda: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Calls one function of the driver. Raises CudaError."""
    _raise_if(cuda, name, getattr(cuda, name)(*arguments))


def _raise_if(cuda: ctypes.CDLL, name: str, code: int) -> None:
    if code != _SUCCESS:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
        raise CudaError(name, code, (text.value or b"unknown error").decode())


def _handle(raw: bytes) -> _Handle:
    return _Handle.from_buffer_copy(raw)

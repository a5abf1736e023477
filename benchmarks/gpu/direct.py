"""The lanes' kernel without their staging slots: it reads and writes the registered arena itself, over the link."""

import ctypes

import torch

from benchmarks.gpu.copies import Bench
from benchmarks.gpu.plans import placed
from benchmarks.gpu.transfer import Absent, Transfer
from services.gpu_agent.devices.base import Piece
from services.gpu_agent.devices.cuda.batches import pack, table_bytes
from services.gpu_agent.devices.cuda.driver import CudaError, Driver, check, load
from services.gpu_agent.devices.cuda.lane import MAX_PAIRS
from services.gpu_agent.devices.cuda.memory import CudaKvMemory


class DirectKernel:
    """Pieces must lie in the arena one after the other: so each batch is a stretch of it that looks like a slot."""

    name = "direct kernel"
    rotates = True

    def __init__(self, made: Bench) -> None:
        """Raises Absent where the GPU sees registered memory at another address than the host."""
        assert isinstance(made.memory, CudaKvMemory)
        self._memory = made.memory
        self._rope = made.rope
        self._driver = Driver(0)
        self._arena = torch.from_numpy(made.arena.memory)
        self._stretches: dict[int, torch.Tensor] = {}
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.inbound, self.outbound = Transfer(), Transfer()
        _require_one_address(made.arena.address)

    def retrieve(self, pieces: list[Piece]) -> None:
        self._run(self.inbound, pieces, gather=False)

    def store(self, pieces: list[Piece]) -> None:
        self._run(self.outbound, pieces, gather=True)

    def _run(self, transfer: Transfer, pieces: list[Piece], *, gather: bool) -> None:
        launch = self._memory.launch(0, self._rope, gather=gather)
        batches = self._memory.batches(0, self._rope, self._arena.nbytes, pieces)

        def enqueue(stream: int) -> None:
            for number, (start, batch) in enumerate(placed(batches.of())):
                host, tables = self._table(number)
                packed = pack(batch, host.numpy())
                self._driver.to_device(host.data_ptr(), packed.nbytes, tables.data_ptr(), packed.nbytes, 1, stream)
                launch(self._stretch(start), tables, packed, (len(batch.tables.tiles), batch.most_planes))

        transfer.run(enqueue)

    def _stretch(self, start: int) -> torch.Tensor:
        """The arena from byte `start` on, kept: a launch knows a slot by its identity."""
        return self._stretches.setdefault(start, self._arena[start:])

    def _table(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of a transfer's batch, on the host and on the GPU."""
        while len(self._tables) <= number:
            nbytes = table_bytes(MAX_PAIRS)
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._tables.append((host, torch.empty(nbytes, dtype=torch.uint8, device="cuda")))
        return self._tables[number]


def _require_one_address(address: int) -> None:
    seen = ctypes.c_uint64()
    try:
        check(load(), "cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(address), ctypes.c_uint(0))
    except CudaError as error:
        raise Absent(DirectKernel.name, f"absent: {error}") from error
    if seen.value != address:
        raise Absent(DirectKernel.name, "absent: the GPU sees registered memory at another address than the host")

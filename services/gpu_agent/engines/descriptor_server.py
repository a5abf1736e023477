"""The socket over which engines send descriptors of their memory, beside gRPC's (DescriptorsPacket in agent.proto).

What is sent belongs to the connection: when that ends, or has lasted too long, everything that was not registered is
closed. An engine that dies halfway leaves nothing behind.
"""

import socket
import socketserver
import time
from contextlib import ExitStack
from pathlib import Path

from google.protobuf.message import DecodeError

from kvblend.v1 import agent_pb2 as pb
from services.common.logs import get_logger
from services.common.unix_server import UnixServer
from services.gpu_agent.engines.descriptors import Chunk, DescriptorSlots, Refused, most_descriptors
from services.gpu_agent.settings import AgentSettings

_log = get_logger("descriptors")

_SUFFIX = ".fds"
# What the kernel lets a packet carry.
_PACKET_DESCRIPTORS = 253
_PACKET_BYTES = 8192
_MOST_CONNECTIONS = 32
_CONNECTION_SECONDS = 60.0


class DescriptorServer(UnixServer):
    """Fills slots from the socket beside that of gRPC, for whoever may connect to that one.

    Raises OSError: the path is too long or not to be written.
    """

    socket_type = socket.SOCK_SEQPACKET

    def __init__(self, beside: Path, slots: DescriptorSlots, seconds: float = _CONNECTION_SECONDS) -> None:
        """`beside` is the bound socket of gRPC; a connection lasts no longer than `seconds`."""
        self.slots = slots
        self.seconds = seconds
        super().__init__(beside, _SUFFIX, _Connection, _MOST_CONNECTIONS)


class _Connection(socketserver.BaseRequestHandler):
    server: DescriptorServer

    def setup(self) -> None:
        self._deadline = time.monotonic() + self.server.seconds
        self._instance_id = ""
        # Of an allocation that is not complete.
        self._descriptors: list[int] = []
        self._sizes: list[int] = []
        self._filled: list[bytes] = []

    def handle(self) -> None:
        answer = pb.DescriptorsAnswer()
        try:
            while not answer.refusal and (received := self._receive()) is not None:
                try:
                    answer = self._take(*received)
                except Refused as refused:
                    answer = pb.DescriptorsAnswer(refusal=str(refused))
                self._patience()
                self.request.send(answer.SerializeToString())
        except OSError as error:
            _log.info("a connection has ended", reason=str(error))

    def finish(self) -> None:
        self.server.slots.close(self._descriptors)
        for slot in self._filled:
            self.server.slots.drop(slot)

    def _patience(self) -> None:
        self.request.settimeout(max(0.001, self._deadline - time.monotonic()))

    def _receive(self) -> tuple[bytes, list[int], bool] | None:
        """A packet, its descriptors, and whether anything of it is missing; None: the engine has ended."""
        self._patience()
        data, descriptors, flags, _ = socket.recv_fds(
            self.request, _PACKET_BYTES, _PACKET_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        if not data and not descriptors:
            return None
        return data, descriptors, bool(flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC))

    def _take(self, data: bytes, descriptors: list[int], truncated: bool) -> pb.DescriptorsAnswer:
        """Raises Refused."""
        self.server.slots.hold(descriptors)
        self._descriptors += descriptors
        if truncated:
            raise Refused("a packet was cut short: it is too large, or the agent has too many open files")
        try:
            packet = pb.DescriptorsPacket.FromString(data)
        except DecodeError as error:
            raise Refused("this is no DescriptorsPacket") from error
        if not descriptors or len(descriptors) != len(packet.chunk_bytes):
            raise Refused(f"{len(descriptors)} descriptors came with the sizes of {len(packet.chunk_bytes)} chunks")
        if not packet.instance_id or self._instance_id not in ("", packet.instance_id):
            raise Refused("a slot is for one instance, which every packet names")
        self._sizes += packet.chunk_bytes
        self._instance_id = packet.instance_id if packet.more else ""
        answer = pb.DescriptorsAnswer(chunks=len(self._descriptors))
        if not packet.more:
            answer.slot = self._fill(packet.instance_id)
        return answer

    def _fill(self, instance_id: str) -> bytes:
        chunks = [Chunk(*chunk) for chunk in zip(self._descriptors, self._sizes, strict=True)]
        self._descriptors, self._sizes = [], []
        self._filled.append(self.server.slots.add(instance_id, chunks))
        return self._filled[-1]


def open_slots(settings: AgentSettings, stack: ExitStack) -> DescriptorSlots:
    """Slots that the cuda device fills from a socket beside each unix socket of gRPC, which must be bound.

    Exits with one line where there can be no such socket; the stack closes it.
    """
    paths = [Path(address.removeprefix("unix:")) for address in settings.addresses if address.startswith("unix:")]
    if settings.device != "cuda" or not paths:
        return DescriptorSlots(0)
    slots = DescriptorSlots(most_descriptors())
    for path in paths:
        try:
            server = DescriptorServer(path, slots)
        except OSError as error:
            raise SystemExit(
                f"kvblend gpu_agent: setting listen = unix:{path} is refused: a socket for descriptors, with {_SUFFIX} "
                f"behind this name, cannot be made: {error}"
            ) from error
        stack.callback(server.close)
        server.start()
    return slots

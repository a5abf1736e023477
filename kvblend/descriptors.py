"""Sends descriptors of an engine's memory to its agent, beside gRPC, which carries none."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from kvblend.cuda_driver import CudaUnavailable
from kvblend.v1 import agent_pb2 as pb

# The kernel takes 253 in a packet. So few that neither process needs many descriptors at once.
_PACKET_CHUNKS = 128
_ANSWER_BYTES = 4096
_SUFFIX = ".fds"


class Exportable(Protocol):
    """Memory that has no handle before its descriptors are sent, such as VmmMemory."""

    @property
    def chunk_bytes(self) -> Sequence[int]:
        """Of the physical chunks, in the order of their addresses."""

    def export(self, chunk: int) -> int:
        """A new descriptor. Raises CudaUnavailable."""

    def handle(self, slot: bytes) -> pb.DeviceHandle: ...


Memory = pb.DeviceHandle | Exportable


class NotSent(Exception):
    """The agent does not have the descriptors; `reason` as in every result."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@contextmanager
def sent(target: str, instance_id: str, memories: Sequence[Memory], timeout: float) -> Iterator[list[pb.DeviceHandle]]:
    """The memories as a registration names them, which must be made before this ends.

    `target` is that of the agent; `timeout`, in seconds, is for the sending. Raises NotSent.
    """
    handles = [memory for memory in memories if isinstance(memory, pb.DeviceHandle)]
    if len(handles) == len(memories):
        yield handles
        return
    sender = _Sender(target, instance_id, timeout)
    try:
        yield [memory if isinstance(memory, pb.DeviceHandle) else sender.send(memory) for memory in memories]
    finally:
        # The agent then forgets what was not registered.
        sender.close()


class _Sender:
    def __init__(self, target: str, instance_id: str, timeout: float) -> None:
        self._instance_id = instance_id
        self._deadline = time.monotonic() + timeout
        if not target.startswith("unix:"):
            raise NotSent(
                "HANDLE_UNUSABLE",
                f"memory that is shared by descriptors needs the agent's unix socket, not {target}: have it listen on "
                "unix:/path as well, or allocate with cudaMalloc (PyTorch: expandable_segments:False)",
            )
        self._path = target.removeprefix("unix:") + _SUFFIX
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(self._path)
        except OSError as error:
            self._socket.close()
            raise self._lost(error) from error

    def send(self, memory: Exportable) -> pb.DeviceHandle:
        """Raises NotSent."""
        sizes = list(memory.chunk_bytes)
        slot = b""
        for first in range(0, len(sizes), _PACKET_CHUNKS):
            chunks = range(first, min(first + _PACKET_CHUNKS, len(sizes)))
            packet = pb.DescriptorsPacket(
                instance_id=self._instance_id,
                chunk_bytes=[sizes[chunk] for chunk in chunks],
                more=chunks.stop < len(sizes),
            )
            slot = self._send_packet(packet, memory, chunks)
        return memory.handle(slot)

    def _send_packet(self, packet: pb.DescriptorsPacket, memory: Exportable, chunks: range) -> bytes:
        descriptors: list[int] = []
        try:
            for chunk in chunks:
                descriptors.append(memory.export(chunk))
            self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
            socket.send_fds(self._socket, [packet.SerializeToString()], descriptors)
            answer = self._socket.recv(_ANSWER_BYTES)
        except CudaUnavailable as error:
            raise NotSent("HANDLE_UNUSABLE", str(error)) from error
        except OSError as error:
            raise self._lost(error) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not answer:
            raise self._lost(ConnectionResetError())
        parsed = pb.DescriptorsAnswer.FromString(answer)
        if parsed.refusal:
            raise NotSent("HANDLE_UNUSABLE", parsed.refusal)
        return parsed.slot

    def _lost(self, error: OSError) -> NotSent:
        if isinstance(error, TimeoutError):
            return NotSent("DEADLINE", f"the agent did not take the descriptors at {self._path} in time")
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return NotSent("AGENT_UNAVAILABLE", f"the agent at {self._path} is closing, busy, or not for this user")
        return NotSent("AGENT_UNAVAILABLE", f"no descriptors can be sent to {self._path}: {error}")

    def close(self) -> None:
        self._socket.close()

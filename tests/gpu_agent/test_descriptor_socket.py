"""Descriptors reach their instance's registration, once; whatever goes wrong, none stays open."""

import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from memfd_memory import MemfdMemory, open_files

from kvblend.cuda_driver import CudaUnavailable
from kvblend.descriptors import NotSent, sent
from kvblend.v1 import agent_pb2 as pb
from services.gpu_agent.engines.descriptor_server import DescriptorServer, open_slots
from services.gpu_agent.engines.descriptors import DescriptorSlots
from services.gpu_agent.settings import AgentSettings

PEER = Path(__file__).with_name("descriptor_peer.py")
ENGINE, OTHER = "engine-1", "engine-2"
PAGE = 4096
MOST = 400


class Served:
    """A server beside a socket as gRPC's is."""

    def __init__(self, path: Path, slots: DescriptorSlots, seconds: float = 30.0) -> None:
        self.path = path
        self.target = f"unix:{path}"
        self.slots = slots
        self.server = DescriptorServer(path, slots, seconds)
        self.server.start()

    def claim(self, instance_id: str, *handles: pb.DeviceHandle) -> dict[bytes, list[tuple[int, int]]]:
        """(inode, bytes) of the chunks in each slot that the instance gets."""
        with self.slots.claimed(instance_id, handles) as descriptors:
            return {
                slot: [(os.fstat(chunk.descriptor).st_ino, chunk.nbytes) for chunk in chunks]
                for slot, chunks in descriptors.items()
            }

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(10)
        connection.connect(f"{self.path}.fds")
        return connection


@contextmanager
def serving(shm_dir: Path, most: int = MOST, seconds: float = 30.0) -> Iterator[Served]:
    path = shm_dir / "agent.sock"
    with closing(socket.socket(socket.AF_UNIX)) as grpc_socket:
        grpc_socket.bind(str(path))
        served = Served(path, DescriptorSlots(most), seconds)
        try:
            yield served
        finally:
            served.server.close()


@pytest.fixture
def served(shm_dir: Path) -> Iterator[Served]:
    """Nothing that it was sent is open at the end of a test."""
    before = open_files()
    with serving(shm_dir) as running:
        yield running
    eventually(lambda: open_files() <= before)
    assert not list(shm_dir.glob("*.fds"))


@pytest.fixture
def memory() -> Iterator[MemfdMemory]:
    with closing(MemfdMemory([PAGE, 3 * PAGE, 2 * PAGE], 512)) as made:
        yield made


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


def chunks_of(memory: MemfdMemory) -> list[tuple[int, int]]:
    return list(zip(memory.inodes(), memory.chunk_bytes, strict=True))


def test_a_registration_gets_every_chunk_in_order(served: Served, memory: MemfdMemory) -> None:
    """Also of more than one packet; memory that has a handle already is left as it is."""
    ready = pb.DeviceHandle(kind=pb.HANDLE_KIND_CUDA_IPC, handle=b"h" * 64)
    with closing(MemfdMemory([PAGE * (1 + number % 3) for number in range(300)])) as large:
        with sent(served.target, ENGINE, [memory, ready, large], 10) as handles:
            first, second, third = handles
            assert second == ready
            assert first == memory.handle(first.handle)
            found = served.claim(ENGINE, *handles)
            assert found == {first.handle: chunks_of(memory), third.handle: chunks_of(large)}


def test_a_slot_is_good_once_and_for_its_instance_alone(served: Served, memory: MemfdMemory) -> None:
    with sent(served.target, ENGINE, [memory], 10) as (handle,):
        assert not served.claim(OTHER, handle)
        assert not served.claim(ENGINE, memory.handle(bytes(len(handle.handle))))
        assert not served.claim(ENGINE, pb.DeviceHandle(kind=pb.HANDLE_KIND_CUDA_IPC, handle=handle.handle))
        assert served.claim(ENGINE, handle, handle) == {handle.handle: chunks_of(memory)}
        assert not served.claim(ENGINE, handle)


def test_slots_cannot_be_guessed(served: Served, memory: MemfdMemory) -> None:
    with sent(served.target, ENGINE, [memory] * 50, 10) as handles:
        assert len({handle.handle for handle in handles}) == 50
        assert {len(handle.handle) for handle in handles} == {16}


def test_what_is_not_registered_ends_with_the_connection(served: Served, memory: MemfdMemory) -> None:
    before = open_files()
    with sent(served.target, ENGINE, [memory], 10) as (handle,):
        assert open_files() >= before + 3
    eventually(lambda: open_files() <= before)
    assert not served.claim(ENGINE, handle)


@pytest.mark.parametrize("way", ["halfway", "filled"])
def test_an_engine_that_is_killed_leaves_nothing(served: Served, way: str) -> None:
    """In the middle of an allocation, and between its sending and its registration."""
    before = open_files()
    with subprocess.Popen([sys.executable, str(PEER), way, served.target], stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdout is not None
        assert peer.stdout.readline().strip() == "sent"
        assert open_files() > before + 10
        peer.kill()
    eventually(lambda: open_files() <= before)


def test_an_engine_that_stalls_keeps_nothing_for_long(shm_dir: Path, memory: MemfdMemory) -> None:
    with serving(shm_dir, seconds=0.3) as served:
        before = open_files()
        with sent(served.target, ENGINE, [memory], 10) as (handle,), closing(served.connect()) as halfway:
            packet = pb.DescriptorsPacket(instance_id=ENGINE, chunk_bytes=[PAGE], more=True)
            socket.send_fds(halfway, [packet.SerializeToString()], memory.files[:1])
            assert pb.DescriptorsAnswer.FromString(halfway.recv(100)) == pb.DescriptorsAnswer(chunks=1)
            # The test's ends of both connections are what stays.
            eventually(lambda: open_files() <= before + 2)
            assert not served.claim(ENGINE, handle)


def test_too_many_are_refused_and_closed(served: Served) -> None:
    """However they are spread over packets, slots and connections; afterwards there is room again."""
    with closing(MemfdMemory([PAGE] * (MOST // 2))) as half, closing(MemfdMemory([PAGE])) as one:
        before = open_files()
        with sent(served.target, ENGINE, [half], 10):
            with pytest.raises(NotSent, match="limit of open files") as caught:
                with sent(served.target, ENGINE, [half, one], 10):
                    pass
            assert caught.value.reason == "HANDLE_UNUSABLE"
        eventually(lambda: open_files() <= before)
        for _ in range(3):
            with sent(served.target, ENGINE, [half, half], 10) as handles:
                assert len(served.claim(ENGINE, *handles)) == 2


def raw(served: Served, *packets: tuple[bytes, int]) -> pb.DescriptorsAnswer:
    """The last answer to packets of these bytes with so many descriptors."""
    with closing(served.connect()) as connection, closing(MemfdMemory([PAGE])) as memory:
        for data, count in packets:
            socket.send_fds(connection, [data], memory.files * count)
            answer = pb.DescriptorsAnswer.FromString(connection.recv(4096))
        if answer.refusal:
            assert connection.recv(1) == b"", "the connection has not ended"
        return answer


def packet(**changes: Any) -> bytes:
    return pb.DescriptorsPacket(**({"instance_id": ENGINE, "chunk_bytes": [PAGE]} | changes)).SerializeToString()


@pytest.mark.parametrize(
    ("packets", "words"),
    [
        ([(packet(), 2)], "2 descriptors came with the sizes of 1"),
        ([(packet(chunk_bytes=[PAGE, PAGE]), 1)], "1 descriptors came with the sizes of 2"),
        ([(packet(chunk_bytes=[]), 0)], "0 descriptors"),
        ([(packet(instance_id=""), 1)], "one instance"),
        ([(packet(more=True), 1), (packet(instance_id=OTHER), 1)], "one instance"),
        ([(b"\xff" * 20, 1)], "no DescriptorsPacket"),
        ([(packet(instance_id="i" * 9000), 1)], "cut short"),
        ([(packet(), 1), (packet(), 2)], "2 descriptors"),
    ],
)
def test_what_is_malformed_is_refused(served: Served, packets: list[tuple[bytes, int]], words: str) -> None:
    before = open_files()
    assert raw(served, (packet(chunk_bytes=[PAGE] * 253), 253)).slot
    assert words in raw(served, *packets).refusal
    eventually(lambda: open_files() <= before)


def test_an_agent_out_of_open_files_says_so_and_leaks_none(shm_dir: Path) -> None:
    """The kernel then hands over only some of a packet's descriptors."""
    path = shm_dir / "agent.sock"
    with closing(socket.socket(socket.AF_UNIX)) as grpc_socket, closing(MemfdMemory([PAGE] * 100)) as memory:
        grpc_socket.bind(str(path))
        command = [sys.executable, str(PEER), "serve", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as agent:
            assert agent.stdout is not None
            assert agent.stdin is not None
            before = agent.stdout.readline()
            for _ in range(3):
                with pytest.raises(NotSent, match="too many open files"):
                    with sent(f"unix:{path}", ENGINE, [memory], 10):
                        pass
            agent.stdin.close()
            assert agent.stdout.read() == before


def test_the_socket_is_as_open_as_that_of_grpc(shm_dir: Path) -> None:
    old = os.umask(0o007)
    try:
        with serving(shm_dir) as served:
            assert (stat.S_IMODE(Path(f"{served.path}.fds").stat().st_mode)) == 0o770
    finally:
        os.umask(old)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
@pytest.mark.parametrize(
    ("mode", "group", "may"), [(0o700, 0, False), (0o770, 0, False), (0o707, 0, True), (0o770, 4242, True)]
)
def test_a_user_who_may_not_use_the_agent_sends_nothing(served: Served, mode: int, group: int, may: bool) -> None:
    """Even where the second socket itself would let him."""
    for directory in (served.path.parent, Path(f"{served.path}.fds")):
        directory.chmod(0o777)
    served.path.chmod(mode)
    os.chown(served.path, -1, group)
    command = [sys.executable, str(PEER), "as-nobody", served.target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == ("sent" if may else "AGENT_UNAVAILABLE")


def test_connections_are_limited(served: Served, memory: MemfdMemory) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(closing(served.connect())) for _ in range(32)]
        with pytest.raises(NotSent, match="busy") as caught:
            with sent(served.target, ENGINE, [memory], 10):
                pass
        assert caught.value.reason == "AGENT_UNAVAILABLE"
        idle[0].close()
        eventually(lambda: can_send(served, memory))


def can_send(served: Served, memory: MemfdMemory) -> bool:
    try:
        with sent(served.target, ENGINE, [memory], 10):
            return True
    except NotSent:
        return False


def test_a_closing_agent_closes_everything_and_leaves_its_successors_socket(
    served: Served, memory: MemfdMemory
) -> None:
    before = open_files()
    with sent(served.target, ENGINE, [memory], 10):
        successor = Served(served.path, DescriptorSlots(MOST))
        served.server.close()
        try:
            assert can_send(successor, memory)
        finally:
            successor.server.close()
    # Without its listening socket.
    eventually(lambda: open_files() < before)


def test_an_engine_is_told_why_nothing_was_sent(shm_dir: Path, memory: MemfdMemory) -> None:
    silent = shm_dir / "silent"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as listening:
        listening.bind(f"{silent}.fds")
        listening.listen()
        cases = [
            ("127.0.0.1:50053", "HANDLE_UNUSABLE", "unix:/path"),
            (f"unix:{shm_dir}/nobody", "AGENT_UNAVAILABLE", "nobody.fds"),
            (f"unix:{silent}", "DEADLINE", "in time"),
        ]
        for target, reason, words in cases:
            with pytest.raises(NotSent, match=words) as caught:
                with sent(target, ENGINE, [memory], 0.2):
                    pass
            assert caught.value.reason == reason


def test_an_export_that_fails_closes_what_was_exported(served: Served, memory: MemfdMemory) -> None:
    class Failing(MemfdMemory):
        def export(self, chunk: int) -> int:
            if chunk == 2:
                raise CudaUnavailable("cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED (801)")
            return super().export(chunk)

    with closing(Failing([PAGE] * 3)) as failing:
        before = open_files()
        with pytest.raises(NotSent, match="NOT_SUPPORTED") as caught:
            with sent(served.target, ENGINE, [memory, failing], 10):
                pass
        assert caught.value.reason == "HANDLE_UNUSABLE"
        eventually(lambda: open_files() <= before)


def test_only_the_cuda_device_listens_and_only_beside_unix_sockets(shm_dir: Path) -> None:
    path = shm_dir / "agent.sock"
    with closing(socket.socket(socket.AF_UNIX)) as grpc_socket, ExitStack() as stack:
        grpc_socket.bind(str(path))
        listen = f"127.0.0.1:1,unix:{path}"
        open_slots(AgentSettings(listen=listen, device="cpu"), stack)
        assert not list(shm_dir.glob("*.fds"))
        open_slots(AgentSettings(listen=listen, device="cuda"), stack)
        assert [found.name for found in shm_dir.glob("*.fds")] == ["agent.sock.fds"]


def test_a_socket_path_that_is_too_long_is_refused_at_start(shm_dir: Path) -> None:
    long = shm_dir / ("a" * (107 - len(str(shm_dir)) - 1))
    with ExitStack() as stack, pytest.raises(SystemExit, match=r"\.fds"):
        open_slots(AgentSettings(listen=f"unix:{long}", device="cuda"), stack)

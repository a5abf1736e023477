"""python descriptor_peer.py MODE ADDRESS: the other end of a descriptor socket, in a process of its own.

halfway TARGET: sends a part of an allocation, says so, and waits.
filled TARGET: sends a whole one, says so, and waits.
as-nobody TARGET: tries to, as another user, and says how it went.
serve PATH: takes descriptors, with hardly any open files allowed; says how many are open first and last.
"""

import os
import resource
import socket
import sys
import threading
import time
from pathlib import Path

from memfd_memory import MemfdMemory, open_files

from kvblend.descriptors import NotSent, sent
from kvblend.v1 import agent_pb2 as pb
from services.gpu_agent.engines.descriptor_server import DescriptorServer
from services.gpu_agent.engines.descriptors import DescriptorSlots

PAGE = 4096


def halfway(target: str) -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(target.removeprefix("unix:") + ".fds")
    packet = pb.DescriptorsPacket(instance_id="engine-1", chunk_bytes=[PAGE] * 20, more=True)
    socket.send_fds(connection, [packet.SerializeToString()], MemfdMemory([PAGE] * 20).files)
    assert pb.DescriptorsAnswer.FromString(connection.recv(100)).chunks == 20
    print("sent", flush=True)
    threading.Event().wait()


def filled(target: str) -> None:
    with sent(target, "engine-1", [MemfdMemory([PAGE] * 20)], 10):
        print("sent", flush=True)
        threading.Event().wait()


def as_nobody(target: str) -> None:
    memory = MemfdMemory([PAGE])
    os.setgroups([4242])
    os.setgid(65534)
    os.setuid(65534)
    try:
        with sent(target, "engine-1", [memory], 10):
            print("sent")
    except NotSent as error:
        print(error.reason)


def serve(path: str) -> None:
    server = DescriptorServer(Path(path), DescriptorSlots(1000))
    server.start()
    before = open_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 20, hard))
    print(before, flush=True)
    sys.stdin.read()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    give_up_at = time.monotonic() + 10
    while open_files() > before and time.monotonic() < give_up_at:
        time.sleep(0.01)
    print(open_files(), flush=True)


MODES = {"halfway": halfway, "filled": filled, "as-nobody": as_nobody, "serve": serve}

if __name__ == "__main__":
    MODES[sys.argv[1]](sys.argv[2])

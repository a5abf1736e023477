"""python host_peer.py WHO MODE PATH [METHOD REQUEST TIMEOUT]: the other end, in a process of its own.

WHO is self, or nobody (another user). MODE call: calls a method over the host's socket alone, says how it went.
MODE squat: serves the host's socket beside gRPC's at PATH, and says who has called.
"""

import os
import sys
from pathlib import Path

import grpc
from host_service import host_alone, unary
from host_wire import ScriptedService

from kvblend.host_calls.frames import Frames

NOBODY = 65534


def call(path: Path, method: str, request: str, timeout: str) -> None:
    with host_alone(path) as channel:
        print("calling", flush=True)
        try:
            answer = unary(channel, method)(request.encode(), timeout=float(timeout))
        except grpc.RpcError as error:
            print(error.code().name, flush=True)
        else:
            print(f"answer {answer.decode()}", flush=True)


def squat(path: Path) -> None:
    def take(connection, head: bytes, body: bytes) -> None:
        print(f"taken {body.decode()}", flush=True)
        Frames(connection).send(b"", b"forged")

    service = ScriptedService(path, take)
    print("ready", flush=True)
    sys.stdin.read()
    service.close()


if __name__ == "__main__":
    if sys.argv[1] == "nobody":
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    {"call": call, "squat": squat}[sys.argv[2]](Path(sys.argv[3]), *sys.argv[4:])

"""The client imports in an engine's environment, whatever protobuf that one pins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
OLDEST = "6.33.6"

PROGRAM = """
import google.protobuf
import kvblend
from kvblend.v1 import agent_pb2, agent_pb2_grpc, common_pb2, matcher_pb2_grpc, object_pb2, store_pb2_grpc
message = agent_pb2.AgentServiceLookupRequest(tokens=b"1234")
assert agent_pb2.AgentServiceLookupRequest.FromString(message.SerializeToString()) == message
import sys
heavy = {"torch", "transformers", "numba", "services", "blake3"} & set(sys.modules)
print(google.protobuf.__version__, sorted(heavy))
"""


@pytest.fixture(scope="session")
def old_protobuf() -> Path:
    """A folder with only the oldest runtime that the client promises to work with, kept under build/."""
    folder = ROOT / "build" / f"protobuf-{OLDEST}"
    if not (folder / "google" / "protobuf").exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"protobuf=={OLDEST}"], check=True, timeout=120)
    return folder


def run(path: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": path}
    output = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return output.stdout.split(maxsplit=1)


def test_the_client_imports_under_the_oldest_protobuf_and_nothing_heavy_comes_with_it(old_protobuf: Path) -> None:
    version, heavy = run(str(old_protobuf))
    assert version == OLDEST
    assert heavy.strip() == "[]"


def test_the_client_imports_under_the_current_protobuf() -> None:
    version, heavy = run("")
    assert version.startswith("7.")
    assert heavy.strip() == "[]"

"""A process to supervise: touches FOLDER/ready when it is up, and misbehaves on request.

Usage: python fake_service.py FOLDER NAME MODE [SECONDS]
MODE: serve (until SIGTERM) | stubborn (ignores SIGTERM) | refuse (one line, exit 1) | crash (ready, then exit 3).
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    folder, name, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with (folder / "events").open("a") as events:
        events.write(f"start {name} {os.getpid()} {time.monotonic()}\n")
    if mode == "refuse":
        print("some earlier line")
        sys.exit(f"{name}: setting chunk_tokens = 0 is refused: must be a power of two")
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: None if mode == "stubborn" else stopping.set())
    (folder / f"{name}.ready").write_text(str(os.getpid()))
    if mode == "crash":
        time.sleep(0.2)
        os._exit(3)
    while not stopping.wait(0.1):
        pass
    with (folder / "events").open("a") as events:
        events.write(f"stop {name} {os.getpid()} {time.monotonic()}\n")


main()

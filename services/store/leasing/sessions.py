"""Agents' sessions: which are open, which are lost, and which of the lost are proven dead."""

import fcntl
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.arena_format import SESSION_ID_BYTES, session_path
from services.common.errors import KvblendError


def is_held(directory: Path, session_id: bytes) -> bool:
    """The session's agent may be alive: it holds the lock that the kernel drops when it ends.

    A file that is gone was removed by its agent, which does so only when no copy of it can run.
    """
    try:
        fd = os.open(session_path(directory, session_id), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@dataclass
class _Session:
    agent: str
    # Streams that are open; an agent that reconnects may overlap with its old stream.
    streams: int = 0
    ended_at: float = 0.0
    lost: bool = False


class Sessions:
    """Thread-safe. A session is lost when its stream has been gone for the grace; it may come back."""

    def __init__(self, directory: Path, grace: float, clock: Callable[[], float]) -> None:
        """`grace` and `clock` in seconds."""
        self._directory = directory
        self._grace = grace
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[bytes, _Session] = {}

    def hello(self, session_id: bytes, agent: str) -> None:
        """A stream has opened. Raises KvblendError INVALID_ARGUMENT, UNKNOWN_SESSION without a locked file."""
        if len(session_id) != SESSION_ID_BYTES or not any(session_id):
            raise KvblendError("INVALID_ARGUMENT", f"session_id needs {SESSION_ID_BYTES} bytes that are not all zero")
        if not is_held(self._directory, session_id):
            raise KvblendError("UNKNOWN_SESSION", "the session's file in the arena's directory is not locked")
        with self._lock:
            session = self._sessions.setdefault(session_id, _Session(agent))
            session.streams += 1
            session.lost = False

    def goodbye(self, session_id: bytes) -> None:
        """A stream has ended."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is not None:
                session.streams -= 1
                session.ended_at = self._clock()

    def adopt(self, session_id: bytes) -> None:
        """A session of an earlier start of the store, lost until it says hello."""
        with self._lock:
            self._sessions.setdefault(session_id, _Session("", lost=True))

    def require(self, session_id: bytes) -> None:
        """Raises KvblendError UNKNOWN_SESSION unless the session is open or within its grace."""
        session = self._sessions.get(session_id)
        if session is None or session.lost:
            raise KvblendError("UNKNOWN_SESSION", "this session is not open; open a new one")

    def newly_lost(self) -> list[bytes]:
        """Sessions whose grace has just ended."""
        now = self._clock()
        with self._lock:
            ended = [
                session_id
                for session_id, session in self._sessions.items()
                if not session.lost and not session.streams and session.ended_at + self._grace <= now
            ]
            for session_id in ended:
                self._sessions[session_id].lost = True
        return ended

    def newly_dead(self) -> list[bytes]:
        """Lost sessions whose process is proven to have ended; their files are gone, they are forgotten."""
        with self._lock:
            lost = [session_id for session_id, session in self._sessions.items() if session.lost]
        dead = [session_id for session_id in lost if not is_held(self._directory, session_id)]
        with self._lock:
            return [session_id for session_id in dead if self._sessions[session_id].lost]

    def forget(self, session_id: bytes) -> None:
        """After everything of a dead session has been freed."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or not session.lost:
                return
            del self._sessions[session_id]
        session_path(self._directory, session_id).unlink(missing_ok=True)


def sessions_on_disk(directory: Path) -> list[bytes]:
    """Ids that have a file in the arena's directory."""
    found = []
    for path in (directory / "sessions").iterdir():
        try:
            session_id = bytes.fromhex(path.name)
        except ValueError:
            continue
        if len(session_id) == SESSION_ID_BYTES:
            found.append(session_id)
    return found

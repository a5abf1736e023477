"""This agent's session with its store: resumed when only its stream broke, else opened anew under another id.

All leases and reservations belong to a session. When one is lost its blocks stay quarantined in the store
until this agent reports that no copy of that session runs any more, or is proven dead by its session file.
"""

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.arena_format import SESSION_ID_BYTES, CatalogFormatError, SessionFile, session_path
from services.common.errors import KvblendError, reason_of
from services.common.logs import get_logger
from services.gpu_agent.devices.base import Device
from services.gpu_agent.store.arena import Arena
from services.gpu_agent.store.client import StoreClient, store_error

_log = get_logger("session")

# Heartbeats without an answer after which a session counts as lost.
_SILENT_BEATS = 5
_CALL_SECONDS = 5.0
_RECONNECT_SECONDS = 0.25
# Least time for a call that changes what the store holds for a session: a store that needs longer is not well.
SETTLE_SECONDS = 2.0


class SessionLost(Exception):
    """The session that a request's leases belong to is gone; the leases are too."""


class StoreSession:
    """One session: its id, its proof of life and its view of the arena.

    The arena may be touched only inside `copying`, so that it stays mapped and nobody calls it drained.
    """

    def __init__(self, directory: Path, device: Device) -> None:
        self.session_id = secrets.token_bytes(SESSION_ID_BYTES)
        self.arena = Arena(directory, device)
        self.arena.map_all()
        self._path = session_path(directory, self.session_id)
        self._file = SessionFile(directory, self.session_id)
        self._lock = threading.Lock()
        self._copies = 0
        self._lost = False

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def drained(self) -> bool:
        """It is lost and no copy of it runs: none can begin either."""
        with self._lock:
            return self._lost and not self._copies

    def lose(self) -> None:
        with self._lock:
            self._lost = True

    @contextmanager
    def copying(self) -> Iterator[Arena]:
        """Raises SessionLost if it is lost already."""
        with self._lock:
            if self._lost:
                raise SessionLost
            self._copies += 1
        try:
            yield self.arena
        finally:
            with self._lock:
                self._copies -= 1

    def close(self) -> None:
        """No copy may be running."""
        self.arena.close()
        self._path.unlink(missing_ok=True)
        self._file.close()


class StoreLink:
    """Keeps a session open, registers model spaces again after a restart, reports lost sessions drained."""

    def __init__(
        self, client: StoreClient, device: Device, agent: str, arena_dir: Path | None, heartbeat_seconds: float
    ) -> None:
        """`device` learns of the arena's memory."""
        self.client = client
        self._device = device
        self._agent = agent
        self._arena_dir = arena_dir
        self._heartbeat = heartbeat_seconds
        self._stopping = threading.Event()
        # The session to resume, and while its stream is open also what the store said of its arena.
        self._session: StoreSession | None = None
        self._current: tuple[StoreSession, store.ArenaInfo] | None = None
        self._stream: grpc.Call | None = None
        self._heard = 0.0
        self._lost: list[StoreSession] = []
        self._spaces: dict[bytes, common.ModelSpace] = {}
        self._detail = "not connected yet"
        self._thread = threading.Thread(target=self._run, name="store-session", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def session(self) -> StoreSession:
        """The live session. Raises KvblendError STORE_UNAVAILABLE."""
        return self._require()[0]

    def arena_info(self) -> store.ArenaInfo:
        """Raises KvblendError STORE_UNAVAILABLE."""
        return self._require()[1]

    @property
    def epoch(self) -> int:
        """The arena's epoch; 0 without a session."""
        current = self._current
        return int(current[1].epoch) if current is not None else 0

    def _require(self) -> tuple[StoreSession, store.ArenaInfo]:
        current = self._current
        if current is None or current[0].lost:
            raise KvblendError("STORE_UNAVAILABLE", f"no session with the store: {self._detail}")
        return current

    def dependency(self) -> common.Dependency:
        ready = self._current is not None
        return common.Dependency(name="store", ready=ready, detail="" if ready else self._detail)

    def register(self, space: common.ModelSpace, timeout: float) -> store.RegisterModelSpaceResponse:
        """Registers a model space now and after every restart of the store. Raises KvblendError."""
        self._require()
        answer: store.RegisterModelSpaceResponse = self.client.call(
            "RegisterModelSpace", store.RegisterModelSpaceRequest(model_space=space), timeout
        )
        known = common.ModelSpace()
        known.CopyFrom(space)
        # The default that the store chose belongs to the identity from now on.
        known.chunk_tokens = answer.chunk_tokens
        self._spaces[answer.model_space_id] = known
        return answer

    def register_again(self) -> None:
        """For a store that has forgotten the model spaces. Raises KvblendError."""
        for space in list(self._spaces.values()):
            request = store.RegisterModelSpaceRequest(model_space=space)
            self.client.call("RegisterModelSpace", request, _CALL_SECONDS)

    def settle(self, method: str, request: Any, session: StoreSession) -> None:
        """A call that must arrive: EndCopy or Abort. If it cannot, the session is given up, which frees everything."""
        try:
            self.client.call(method, request, SETTLE_SECONDS)
        except KvblendError as error:
            if session.lost:
                return
            _log.warning("giving up the session", call=method, detail=str(error))
            self.distrust(session)

    def distrust(self, session: StoreSession) -> None:
        """What the store holds for this session is not known: it is lost, and another is opened."""
        session.lose()
        current, stream = self._current, self._stream
        if current is not None and current[0] is session and stream is not None:
            stream.cancel()

    def close(self) -> None:
        self._stopping.set()
        if self._stream is not None:
            self._stream.cancel()
        if self._thread.is_alive():
            self._thread.join(_CALL_SECONDS)
        self._give_up()
        for session in self._lost:
            if session.drained:
                session.close()
        self.client.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._open_and_follow()
            except grpc.RpcError as error:
                if reason_of(error) == "UNKNOWN_SESSION":
                    self._give_up()
                self._disconnected(store_error(error).message)
            except (KvblendError, CatalogFormatError, OSError, ValueError) as error:
                # ValueError: a file of the arena is shorter than it should be, as mmap says.
                self._disconnected(str(error))
            self._stopping.wait(_RECONNECT_SECONDS)

    def _disconnected(self, detail: str) -> None:
        if detail != self._detail and not self._stopping.is_set():
            _log.warning("no session with the store", detail=detail)
        self._detail = detail

    def _open_and_follow(self) -> None:
        """One stream from hello to its end."""
        pong: store.PingStoreResponse = self.client.call("PingStore", store.PingStoreRequest(), _CALL_SECONDS)
        session = self._resume_or_open(pong.arena)
        over = threading.Event()
        self._heard = time.monotonic()
        stream = self._stream = self.client.session(self._beats(session.session_id, over))
        try:
            hello: store.SessionResponse | None = next(stream, None)
            if hello is None:
                raise KvblendError("STORE_UNAVAILABLE", "the store ended the session at once")
            if hello.arena.epoch != session.arena.epoch:
                raise KvblendError("STALE_EPOCH", "the store restarted while this session was opened")
            self.register_again()
            self._current = session, hello.arena
            self._detail = "the session's stream ended"
            _log.info("session with the store", store=hello.arena.store, epoch=hello.arena.epoch)
            for _ in stream:
                self._heard = time.monotonic()
                self._report_drained()
        finally:
            over.set()
            self._current = None
            stream.cancel()

    def _resume_or_open(self, arena: store.ArenaInfo) -> StoreSession:
        if self._session is not None and (self._session.lost or self._session.arena.epoch != arena.epoch):
            self._give_up()
        if self._session is None:
            self._session = StoreSession(self._arena_dir or Path(arena.directory), self._device)
        return self._session

    def _give_up(self) -> None:
        if self._session is not None:
            self._session.lose()
            self._lost.append(self._session)
            self._session = None

    def _beats(self, session_id: bytes, over: threading.Event) -> Iterator[store.SessionRequest]:
        yield store.SessionRequest(session_id=session_id, agent=self._agent)
        while not over.wait(self._heartbeat):
            if time.monotonic() - self._heard > max(_SILENT_BEATS * self._heartbeat, _CALL_SECONDS):
                if self._stream is not None:
                    self._stream.cancel()
                return
            yield store.SessionRequest()

    def _report_drained(self) -> None:
        for session in [session for session in self._lost if session.drained]:
            request = store.ReportDrainedRequest(session_id=session.session_id)
            try:
                self.client.call("ReportDrained", request, _CALL_SECONDS)
            except KvblendError as error:
                if error.reason != "UNKNOWN_SESSION":
                    _log.warning("could not report a session drained", detail=str(error))
                    continue
            session.close()
            self._lost.remove(session)

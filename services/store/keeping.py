"""What the store does by itself, a few times a second: time limits, lost and dead sessions, watermark, scrubbing."""

import threading

from kvblend.v1 import common_pb2 as pb
from services.common.checksums import checksum_of
from services.common.logs import get_logger
from services.store.leasing.sessions import Sessions
from services.store.lookup.answers import Answers
from services.store.state import StoreState
from services.store.writing.writes import Writes

_log = get_logger("keeping")

_EVERY_SECONDS = 0.2
# Longer than any one round takes.
_STOP_SECONDS = 30.0
# Verified at once after a crash: a fraction of a second of one core.
_SCRUB_BYTES = 256 << 20


class Keeper:
    """One thread. `failure` says why its last round failed, or that it has ended: the store must not look well then."""

    def __init__(
        self,
        state: StoreState,
        writes: Writes,
        sessions: Sessions,
        answers: Answers,
        *,
        high_bytes: int,
        low_bytes: int,
        request_ttl: float,
    ) -> None:
        """Over `high_bytes` in use, eviction brings it down to `low_bytes`. `request_ttl` in seconds."""
        self._state = state
        self._writes = writes
        self._sessions = sessions
        self._answers = answers
        self._high_bytes = high_bytes
        self._low_bytes = low_bytes
        self._request_ttl = request_ttl
        self._failure = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="keeper", daemon=True)

    @property
    def failure(self) -> str:
        ended = self._thread.ident is not None and not self._thread.is_alive()
        return self._failure or ("its thread has ended" if ended else "")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(_STOP_SECONDS)

    def _loop(self) -> None:
        while not self._stopping.wait(_EVERY_SECONDS):
            try:
                self.step()
                self._failure = ""
            except Exception as error:
                self._failure = f"{type(error).__name__}: {error}"
                _log.error("keeping failed", exc_info=error)

    def step(self) -> None:
        """Everything that is due."""
        state = self._state
        self._writes.expire()
        for session in self._sessions.newly_lost():
            _log.info("session lost", session=session.hex())
            self._answers.end_session(session)
            self._writes.session_lost(session)
            with state.lock:
                state.leases.session_lost(session)
        for session in self._sessions.newly_dead():
            freed = copies_stopped(state, self._writes, session)
            _log.info("session ended", session=session.hex(), freed_objects=freed)
            self._sessions.forget(session)
        now = state.clock.now()
        self._answers.forget_before(now - self._request_ttl)
        with state.lock:
            state.leases.expire(now)
            state.leases.forget_before(now - self._request_ttl)
            state.drop_expired()
            if state.pool.used_bytes > self._high_bytes:
                state.evict_down_to(self._low_bytes)
        self._scrub()

    def _scrub(self) -> None:
        """Verifies what a crash left, so that agents need not; damaged chunks leave."""
        budget = _SCRUB_BYTES
        while self._state.unverified and budget > 0:
            budget -= verify_one(self._state)


def copies_stopped(state: StoreState, writes: Writes, session: bytes) -> int:
    """All copies of a lost session are known to have stopped: how many objects that frees."""
    with state.lock:
        return writes.copies_stopped(session) + state.leases.copies_stopped(session)


def verify_one(state: StoreState) -> int:
    """Compares one unverified object with its checksum; how many bytes it read. Takes the lock for moments."""
    with state.lock:
        header = next(iter(state.unverified), None)
        chunk = state.catalog.of_header(header) if header is not None else None
        if header is None or chunk is None:
            state.unverified.discard(header or 0)
            return 0
        state.leases.pin(chunk, header)
        payload, expected = state.pool.payload(header), state.pool.headers.get(header, "checksum")
    intact = checksum_of(payload) == expected
    with state.lock:
        state.leases.unpin(chunk, header)
        if chunk.resident:
            state.unverified.discard(header)
            if not intact:
                state.stats.add("checksum_failures")
                state.remove(chunk, pb.REASON_CHECKSUM_MISMATCH)
    return len(payload)

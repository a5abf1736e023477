"""One answer for each attempt of a request, made once and read by all its ranks."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvblend.v1 import store_pb2
from services.common.errors import KvblendError
from services.store.catalog import Chunk
from services.store.leasing.leases import HolderKey

# (request id, attempt, digest of the question).
_Name = tuple[str, int, bytes]


class Answer:
    """Immutable once `done` is set: the summary, and the chunks that serve it."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.summary: store_pb2.LookupSummary | None = None
        self.chunks: list[Chunk] = []
        self.sessions: set[bytes] = set()


class Answers:
    """Thread-safe. The lock is never held while anything else is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[_Name, Answer] = {}
        # What each session's request asks now, and when it last did.
        self._current: dict[tuple[bytes, str], tuple[_Name, float]] = {}

    def enter(
        self, holder: HolderKey, digest: bytes, now: float, gone: Callable[[], bool]
    ) -> tuple[Answer, bool, bool]:
        """(answer, the caller must make it, an older question of this request was superseded).

        Raises:
            KvblendError: SUPERSEDED by a newer attempt, or because the caller is `gone`.
        """
        name = (holder.request_id, holder.attempt, digest)
        place = (holder.session, holder.request_id)
        with self._lock:
            if gone():
                # Its request may have been ended already; nobody would do so again.
                raise KvblendError("SUPERSEDED", "the caller gave up before its lookup began")
            before, _ = self._current.get(place, (None, 0.0))
            if before is not None and before[1] > holder.attempt:
                raise KvblendError("SUPERSEDED", f"attempt {before[1]} of this request came before this call")
            superseded = before is not None and before != name
            if superseded:
                self._leave(place)
            self._current[place] = name, now
            answer = self._answers.get(name)
            leads = answer is None
            if answer is None:
                answer = self._answers[name] = Answer()
            answer.sessions.add(holder.session)
            return answer, leads, superseded

    def _leave(self, place: tuple[bytes, str]) -> None:
        name, _ = self._current.pop(place, (None, 0.0))
        answer = self._answers.get(name) if name else None
        if name is None or answer is None:
            return
        answer.sessions.discard(place[0])
        if not answer.sessions:
            del self._answers[name]

    def is_current(self, holder: HolderKey, digest: bytes) -> bool:
        """The holder's session still wants this answer: leases may be taken for it."""
        with self._lock:
            name, _ = self._current.get((holder.session, holder.request_id), (None, 0.0))
            return name == (holder.request_id, holder.attempt, digest)

    @contextmanager
    def leading(self, holder: HolderKey, digest: bytes, answer: Answer) -> Iterator[None]:
        """While the answer is made. Without a summary at the end, the next call makes it anew."""
        name = (holder.request_id, holder.attempt, digest)
        try:
            yield
        finally:
            with self._lock:
                if answer.summary is None and self._answers.get(name) is answer:
                    del self._answers[name]
            answer.done.set()

    def end_request(self, session: bytes, request_id: str) -> None:
        with self._lock:
            self._leave((session, request_id))

    def end_session(self, session: bytes) -> None:
        with self._lock:
            for place in [place for place in self._current if place[0] == session]:
                self._leave(place)

    def forget_before(self, asked: float) -> None:
        """Requests that were never ended and last asked before then."""
        with self._lock:
            for place in [place for place, (_, at) in self._current.items() if at < asked]:
                self._leave(place)

"""Requests that have ended, and of which the store must hear: what ends while a call is under way goes with the next.

They are not gathered for longer: what an ended request holds counts against the caps of those that follow it.
"""

import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor

from kvblend.v1 import store_pb2 as store
from services.common.errors import KvblendError
from services.common.logs import get_logger
from services.gpu_agent.lookup.requests import LookupJob
from services.gpu_agent.store.sessions import StoreLink, StoreSession

_log = get_logger("endings")

_QUIET_SECONDS = 5.0
_CALL_SECONDS = 2.0
_JOIN_SECONDS = 5.0

_Ended = tuple[LookupJob, "Future[None]"]


class Endings:
    """Thread-safe."""

    def __init__(self, link: StoreLink) -> None:
        self._link = link
        self._changed = threading.Condition()
        self._waiting: list[_Ended] = []
        self._closed = False
        # For those of which a copy still runs.
        self._quieting = ThreadPoolExecutor(4, thread_name_prefix="quiet")
        self._thread = threading.Thread(target=self._run, name="endings", daemon=True)
        self._thread.start()

    def add(self, job: LookupJob) -> "Future[None]":
        """Done when the store has been told that the request of this job, which has ended, is over."""
        told: Future[None] = Future()
        if job.quiet:
            self._put((job, told))
        else:
            self._quieting.submit(self._put_when_quiet, (job, told))
        return told

    def close(self) -> None:
        """All that were added are told first."""
        self._quieting.shutdown(wait=True)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_JOIN_SECONDS)

    def _put(self, ended: _Ended) -> None:
        with self._changed:
            self._waiting.append(ended)
            self._changed.notify_all()

    def _put_when_quiet(self, ended: _Ended) -> None:
        ended[0].wait_quiet(_QUIET_SECONDS)
        self._put(ended)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                batch, self._waiting = self._waiting, []
            self._tell(batch)

    def _tell(self, batch: list[_Ended]) -> None:
        names: dict[StoreSession, list[str]] = defaultdict(list)
        for job, _ in batch:
            if job.session is not None and not job.session.lost:
                names[job.session].append(job.store_key.request_id)
        for session, of_session in names.items():
            request = store.EndRequestsRequest(session_id=session.session_id, request_ids=of_session)
            try:
                self._link.client.call("EndRequests", request, _CALL_SECONDS)
            except KvblendError as error:
                # What they held is HELD: the store's TTL ends what this call could not.
                _log.warning("requests were not ended at the store", requests=len(of_session), detail=str(error))
            except Exception as error:
                # The next ones must be told all the same.
                _log.error("requests were not ended at the store", exc_info=error)
        for _, told in batch:
            told.set_result(None)

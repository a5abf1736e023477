"""The way to the lower tier (L2): asking, fetching, writing, clearing.

Nothing here raises for a tier that is down, slow or full: what is not there in time is a miss.
"""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.errors import KvblendError
from services.store.catalog import in_scope
from services.store.l2.fetching import Fetches
from services.store.l2.found import L2Chunk, objects_of, whole_chunks
from services.store.l2.landing import Fetched, Landing
from services.store.l2.patience import Trust
from services.store.l2.scouting import Scout
from services.store.l2.speed import Speed
from services.store.l2.writing import WritePolicies, Writing
from services.store.objects import ChunkKey
from services.store.publishing.changes import Removed, cleared_of
from services.store.spaces import ResolvedSpace
from services.store.state import StoreState
from services.store.tiers.base import Tier

_ASKING_THREADS = 4


@dataclass(frozen=True)
class L2Options:
    """`patience`: share of the time that computing what is missing takes, which a lookup may lose to L2 at most."""

    policies: WritePolicies
    queue_chunks: int
    write_threads: int
    fetch_threads: int
    # May be on the way at once.
    fetch_bytes: int
    fetched: Fetched
    patience: float
    # The same while L2 is as fast as it was.
    steady_patience: float
    # Seconds that one object's transfer may take.
    timeout: float


class L2:
    """Thread-safe. `close` stops its threads."""

    def __init__(self, tier: Tier, state: StoreState, options: L2Options) -> None:
        self.tier = tier
        self.patience = options.patience
        self.steady_patience = options.steady_patience
        self.trust = Trust()
        self.streams = options.fetch_threads
        self._state = state
        self._timeout = options.timeout
        self.speed = Speed(options.fetch_threads)
        self._landing = Landing(tier, state, self.speed, options.fetched, options.timeout)
        self.fetches = Fetches(
            self._landing.transfer,
            self._landing.release,
            self.speed,
            threads=options.fetch_threads,
            max_bytes=options.fetch_bytes,
        )
        self.writing = Writing(
            tier,
            state,
            options.policies,
            self.fetches.wait_quiet,
            queue_chunks=options.queue_chunks,
            threads=options.write_threads,
            timeout=options.timeout,
        )
        self._asking = ThreadPoolExecutor(_ASKING_THREADS, thread_name_prefix="l2-ask")
        self._scout = Scout(self.fetches, self.ask)

    def start(self) -> None:
        self.fetches.start()
        self.writing.start()

    def close(self) -> None:
        self._asking.shutdown(wait=False, cancel_futures=True)
        self.fetches.close()
        self.writing.close()
        self.tier.close()

    # Asking.

    def find(self, space: ResolvedSpace, keys: Sequence[ChunkKey], timeout: float) -> dict[ChunkKey, L2Chunk]:
        """Chunks that the tier has in full, of those asked for."""
        asked, clears = objects_of(space, keys), self._landing.clears
        if not asked or timeout <= 0:
            return {}
        with self.speed.asking():
            metas = self.tier.find(asked, timeout)
        return whole_chunks(space, asked, metas, clears)

    def ask(self, space: ResolvedSpace, keys: Sequence[ChunkKey]) -> "Future[dict[ChunkKey, L2Chunk]]":
        """`find`, off the caller's path: a tier that is slow to answer is found out without waiting for it."""
        return self._later(lambda: self.find(space, keys, self._timeout))

    def _later(self, work: Callable[[], dict[ChunkKey, L2Chunk]]) -> "Future[dict[ChunkKey, L2Chunk]]":
        with suppress(RuntimeError):
            return self._asking.submit(work)
        # Closed.
        nothing: Future[dict[ChunkKey, L2Chunk]] = Future()
        nothing.set_result({})
        return nothing

    def scout(self, space: ResolvedSpace, keys: Sequence[ChunkKey], *, promising: bool) -> None:
        """The tier was too slow for these: one of them is fetched now and then, to see whether it still is.

        `promising`: it would be fast enough, but that is not sure yet.
        """
        self._scout.go(space, keys, promising)

    def disown(self, space: ResolvedSpace, keys: Sequence[ChunkKey], seen_position: int) -> None:
        """Looks again, off the caller's path, and tells the matchers what L2 surely does not have.

        `seen_position`: of the matcher's answer that claimed it; what another store has put there since stays.
        """

        def check() -> dict[ChunkKey, L2Chunk]:
            start = time.monotonic()
            found = self.find(space, keys, self._timeout)
            # A tier that is down or slow answers misses too.
            if time.monotonic() - start <= self._timeout / 2 and self.tier.health().ready:
                with self._state.lock:
                    for key in keys:
                        if key not in found:
                            self._state.outbox.append(Removed(key, self._state.l2_id, seen_position))
            return found

        self._later(check)

    # Ending and clearing.

    def end_request(self, session: bytes, request_id: str) -> None:
        """What the request waits for or would have kept gives its place up."""
        self.fetches.drop_request(session, request_id)
        self._landing.sweep()

    def clear(self, scope: pb.ClearScope, known: Collection[ChunkKey], timeout: float) -> int:
        """Deletes what the scope names and these chunks; running fetches come to nothing. How many chunks.

        `known`: what the arena had in the scope. L2 may not have learned yet that they belong to it.

        Raises:
            KvblendError: L2_UNAVAILABLE if the tier cannot promise that it is all gone.
        """
        self._landing.clear()
        gone: set[ChunkKey] = set()

        def matches(meta: object_pb2.ObjectMeta) -> bool:
            key = ChunkKey(meta.space_id, meta.domain, meta.chain_hash)
            found = key in known or in_scope(scope, meta.space_id, meta.tenant, meta.documents)
            if found:
                gone.add(key)
            return found

        self.tier.delete_where(matches, timeout)
        health = self.tier.health()
        if not health.ready:
            raise KvblendError("L2_UNAVAILABLE", f"L2 may still hold what was to be cleared: {health.detail}")
        self._tell_cleared(scope, gone)
        return len(gone)

    def _tell_cleared(self, scope: pb.ClearScope, gone: set[ChunkKey]) -> None:
        state = self._state
        with state.lock:
            state.left_l2(gone)
            # Also claims of what the tier had lost before.
            state.outbox.append(cleared_of(scope, state.l2_id))
            if scope.WhichOneof("scope") == "document":
                # Matchers may know the same text by another document's name.
                for key in gone:
                    state.outbox.append(Removed(key, state.l2_id))

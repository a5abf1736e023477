"""One lookup's way to L2: what it asks for and fetches, and how long it waits.

The engine waits for the whole answer, so time spent here is time to the first token. Three things bound it. A tier
that is known to be too slow is not waited for at all. What is fetched is what together arrives sooner than the engine
computes it (l2/budget.py). And as estimates fail, a lookup that has waited longer than what has landed so far saves
gives up, at the cost of L2's patience: a share of the time that computing the missing tokens takes, more where L2 has
been steady.

What comes after the caller's deadline is kept for the next lookup; what is given up for being slow is not fetched, the
engine will have computed and stored it before.
"""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from kvblend.v1 import common_pb2 as pb
from services.common.identity import Chunk as ChainChunk
from services.common.tokens import TOKEN_BYTES
from services.store.l2.budget import Candidate, Costs, choose, is_sooner
from services.store.l2.fetching import Order
from services.store.l2.found import L2Chunk
from services.store.l2.patience import Patience
from services.store.l2.second_tier import L2
from services.store.lookup.pieces import Pieces
from services.store.lookup.run import Run
from services.store.objects import ChunkKey
from services.store.state import StoreState

# Of the chain's chunks so many are asked for at first.
_FIRST_CHUNKS = 16
# About what L2 sends for an object when it is asked whether it has it, beside the tokens.
_HEADER_BYTES = 256
# Some tokens of a segment are computed again, so it saves less than a prefix of its length.
_SEGMENT_WORTH = 0.85
# A first chunk may take so many times what is expected.
_ARRIVAL_FACTOR = 2.0
_TOO_SLOW = pb.REASON_SLOWER_THAN_COMPUTE, "L2 answers too slowly to be asked"
_TOO_LATE = pb.REASON_DEADLINE, "L2 had not answered in time"


class Prefetch:
    """Used by one thread, which ends it with `close`: what landed is protected until then."""

    def __init__(self, l2: L2, state: StoreState, run: Run, deadline: float) -> None:
        """`deadline` by the state's clock."""
        self._l2 = l2
        self._state = state
        self._run = run
        self._deadline = deadline
        # The engine's tokens a second; 0: unknown.
        self._rate = run.query.prefill_tokens_per_second
        self._order: Order | None = None
        # The chain behind what is leased, and whether each chunk is in the arena.
        self._following: list[tuple[ChainChunk, bool]] = []
        self._asked: set[ChunkKey] = set()
        self._answers: list[tuple[Future[dict[ChunkKey, L2Chunk]], list[ChunkKey]]] = []
        self._unknown: list[ChunkKey] = []
        self._found: dict[ChunkKey, L2Chunk] = {}
        # What is fetched, and what came of it.
        self._prefix: list[Candidate] = []
        self._segments: list[Candidate] = []
        self._outcomes: dict[ChunkKey, bool] = {}
        self._out_of_time = False

    def ask(self) -> None:
        """Asks L2 for the first chunks of the prompt's chain that the arena lacks. Returns at once."""
        if not self._run.full:
            self._ask(self._look_ahead(_FIRST_CHUNKS))

    def _look_ahead(self, count: int) -> list[ChunkKey]:
        """The keys that could be L2's of the next `count` chunks of the chain."""
        run, state = self._run, self._state
        query, first = run.query, run.whole_chunks + len(self._following)
        candidates = (query.chunk(index) for index in range(first, first + count))
        chunks = [chunk for chunk in candidates if chunk is not None and chunk.first < run.last_token]
        with state.lock:
            here = [any(state.all_usable(query.prefix_keys(chunk))) for chunk in chunks]
        self._following += zip(chunks, here, strict=True)
        missing = [chunk for chunk, is_here in zip(chunks, here, strict=True) if not is_here]
        return [key for chunk in missing for key in query.prefix_keys(chunk)]

    def wanted(self, absent: Sequence[ChunkKey]) -> bool:
        """There is something to find out. `absent`: what a matcher claims and the arena lacks."""
        return bool(self._asked or absent)

    def fetch(self, absent: Pieces[ChunkKey]) -> None:
        """Asks for these, too, fetches what is worth it, and waits. The run learns what came, and why not the rest."""
        l2, run = self._l2, self._run
        begun = time.monotonic()
        give_up_at = begun + max(0.0, self._deadline - self._state.clock.now())
        order = self._order = l2.fetches.order(run.holder, (run.query.space.tenant, run.holder.session))
        if self._rate and not l2.trust.is_given(self._rate):
            self._do_without(order, list(dict.fromkeys(absent.sources)))
            return
        limit = self._limit()
        patience = Patience(limit, begun)
        self._ask(list(dict.fromkeys(absent.sources)))
        self._take_answers(order, min(give_up_at - begun, limit))
        if self._chain_goes_on():
            # Only now: most prompts are in L2 from the first chunk on, or not at all.
            self._ask(self._look_ahead(run.query.count))
            self._take_answers(order, min(give_up_at, begun + limit) - time.monotonic())
        # Twice: where the prefix ends sooner than L2 said, segments may serve what is behind it.
        for _ in range(2):
            chosen = self._choose(absent, patience, give_up_at)
            if not chosen:
                break
            run.missing.slow.update(chunk.key for chunk in l2.fetches.add(order, chosen))
            self._wait(order, patience, give_up_at)
            if all(self._outcomes.get(chunk.key, True) for chunk in chosen):
                break
        if self._rate and self._found:
            l2.trust.judge(self._rate, self._saved() / self._rate - (time.monotonic() - begun))
        self._explain(list(dict.fromkeys(absent.sources)))

    def _do_without(self, order: Order, absent: Sequence[ChunkKey]) -> None:
        """L2 has been promising too much lately: it is looked at in the background only."""
        self._take_answers(order, 0.0)
        self._unknown += [key for key in dict.fromkeys((*self._asked, *absent)) if key not in self._unknown]
        self._explain(absent)

    def close(self) -> None:
        """What landed has been leased. What is still on its way is kept only if there was no time to wait for it."""
        if self._order is None:
            return
        if self._out_of_time and self._order.open:
            self._l2.fetches.keep(self._order)
        else:
            self._l2.fetches.drop(self._order)

    # Asking.

    def _limit(self) -> float:
        """Seconds that may be lost to L2: its patience, or more if it is steady and fast, and needs them to arrive."""
        if not self._rate:
            return float("inf")
        l2, speed, shape = self._l2, self._l2.speed, self._run.query.space.shape
        seconds = self._missing / self._rate
        limit = l2.patience * seconds
        if self._is_promising() and speed.steady:
            chunk = shape.ranks * sum(shape.payload_bytes(group, shape.chunk_tokens) for group in range(shape.groups))
            first = 2 * speed.latency + 2 * chunk * (speed.pace or 0.0)
            limit = max(limit, min(l2.steady_patience * seconds, _ARRIVAL_FACTOR * first))
        return limit

    @property
    def _missing(self) -> int:
        """Tokens that the arena cannot serve."""
        return self._run.query.count - self._run.covered_tokens

    def _is_promising(self) -> bool:
        """As measured, L2 would bring all that is missing sooner than the engine computes it."""
        l2, speed, shape = self._l2, self._l2.speed, self._run.query.space.shape
        if speed.pace is None:
            return False
        missing = self._missing
        size = shape.ranks * sum(shape.payload_bytes(group, missing) for group in range(shape.groups))
        rounds = 2 + missing * shape.groups * shape.ranks / shape.chunk_tokens / l2.streams
        return is_sooner(size * speed.pace + rounds * speed.latency, missing, self._rate)

    def _ask(self, keys: Iterable[ChunkKey]) -> None:
        new = [key for key in keys if key not in self._asked]
        if not new:
            return
        self._asked.update(new)
        shape, speed = self._run.query.space.shape, self._l2.speed
        size = len(new) * shape.groups * shape.ranks * (_HEADER_BYTES + TOKEN_BYTES * shape.chunk_tokens)
        if speed.latency + size * (speed.pace or 0.0) > self._limit():
            self._unknown += new
        else:
            self._answers.append((self._l2.ask(self._run.query.space, new), new))

    def _take_answers(self, order: Order, timeout: float) -> None:
        answers, self._answers = self._answers, []
        self._l2.fetches.wait_answers(order, [answer for answer, _ in answers], max(0.0, timeout))
        for answer, keys in answers:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._found.update(answer.result())
            else:
                answer.cancel()
                self._unknown += keys

    def _chain_goes_on(self) -> bool:
        """L2 and the arena have every chunk of the chain that was looked at."""
        if len(self._following) < _FIRST_CHUNKS:
            return False
        query, found = self._run.query, self._found
        return all(here or any(key in found for key in query.prefix_keys(chunk)) for chunk, here in self._following)

    # Fetching.

    def _choose(self, absent: Pieces[ChunkKey], patience: Patience, give_up_at: float) -> list[L2Chunk]:
        """What to fetch now, first things first."""
        l2, run, now = self._l2, self._run, time.monotonic()
        prefix, segments = self._candidates(absent)
        known = {candidate.chunk.key for candidate in (*prefix, *segments)}
        costs = self._costs(sum(candidate.chunk.size for candidate in (*prefix, *segments)))
        front, behind = choose(prefix, segments, costs, self._rate, give_up_at - now)
        promising = bool(front or behind)
        if promising and self._rate:
            first = costs.start + costs.of((*front, *behind)[0].chunk)
            if first > patience.left(now, self._saved() / self._rate):
                # It would be given up before it has shown anything.
                front, behind = [], []
        chosen = [candidate.chunk for candidate in (*front, *behind)]
        left_out = known - {chunk.key for chunk in chosen}
        (run.missing.slow if self._rate else run.missing.late).update(left_out)
        if self._rate and left_out and not chosen:
            l2.scout(run.query.space, list(left_out), promising=promising)
        self._prefix += front
        self._segments += behind
        return chosen

    def _costs(self, size: int) -> Costs:
        """Of an order of so many bytes; all 0 while nothing is measured."""
        run, l2 = self._run, self._l2
        latency, pace = l2.speed.latency, l2.speed.pace
        if pace is None:
            return Costs(0.0, 0.0, 0.0)
        ahead = l2.fetches.ahead((run.query.space.tenant, run.holder.session), size)
        return Costs(latency + pace * ahead, pace, latency / l2.streams)

    def _candidates(self, absent: Pieces[ChunkKey]) -> tuple[list[Candidate], list[Candidate]]:
        """What L2 has and was not tried yet: for the prefix in order, and segments behind it."""
        tried = {candidate.chunk.key for candidate in (*self._prefix, *self._segments)}
        prefix: list[Candidate] = []
        end = 0
        for chunk, here in self._following:
            keys = self._run.query.prefix_keys(chunk)
            found = next((self._found[key] for key in keys if key in self._found and key not in tried), None)
            if here or any(self._outcomes.get(key) for key in keys):
                if prefix:
                    prefix[-1] = prefix[-1]._replace(tokens=prefix[-1].tokens + chunk.tokens)
            elif found is not None:
                prefix.append(Candidate(found, chunk.tokens))
            else:
                break
            end = chunk.first + chunk.tokens
        tokens: Counter[ChunkKey] = Counter()
        for piece in absent.trim(end, self._run.last_token):
            tokens[piece.source] += piece.length
        segments = [
            Candidate(self._found[key], _SEGMENT_WORTH * count)
            for key, count in tokens.items()
            if key in self._found and key not in tried
        ]
        return prefix, segments

    def _wait(self, order: Order, patience: Patience, give_up_at: float) -> None:
        """Until everything has ended, or waiting on is not worth it."""
        fetches = self._l2.fetches
        ended = 0
        while True:
            self._outcomes = fetches.outcomes(order)
            now = time.monotonic()
            left = patience.left(now, self._saved() / self._rate) if self._rate else give_up_at - now
            self._out_of_time = now >= give_up_at
            if not order.open or ended >= len(order.fetches) or left <= 0 or self._out_of_time:
                return
            ended = fetches.wait(order, ended, min(left, give_up_at - now))

    def _saved(self) -> float:
        """Tokens that need not be computed, by what has landed."""
        saved = 0.0
        for candidate in self._prefix:
            if not self._outcomes.get(candidate.chunk.key):
                break
            saved += candidate.tokens
        return saved + sum(candidate.tokens for candidate in self._segments if self._outcomes.get(candidate.chunk.key))

    def _explain(self, claimed: Sequence[ChunkKey]) -> None:
        """Why not what L2 has, or may have."""
        run, missing = self._run, self._run.missing
        run.from_l2 = {key for key, landed in self._outcomes.items() if landed}
        pending = {candidate.chunk.key for candidate in (*self._prefix, *self._segments)} - self._outcomes.keys()
        (missing.late if self._out_of_time else missing.slow).update(pending - missing.slow)
        if not self._unknown:
            return
        (missing.slow if self._rate else missing.late).update(set(claimed).intersection(self._unknown))
        if run.default[0] in (pb.REASON_UNKNOWN_TEXT, pb.REASON_NOTHING_STORED):
            run.default = _TOO_SLOW if self._rate else _TOO_LATE
        if self._rate:
            self._l2.scout(run.query.space, self._unknown, promising=self._is_promising())

"""What the store relies on in every eviction policy, held against a plain set of chunks."""

from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Catalog, Chunk
from services.store.eviction import POLICIES, FairShares, Policy, make_policy
from services.store.eviction.lru import Lru
from services.store.objects import ChunkInfo, ChunkKey

TENANTS = ("a", "b")
CAPACITY = 120
QUICK = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
DOMAINS = (pb.DOMAIN_EXACT, pb.DOMAIN_SEGMENT, pb.DOMAIN_BLENDED)


def info(tenant: str, previous: bytes, tokens: int = 16, duplicate: bool = False) -> ChunkInfo:
    return ChunkInfo(
        model_space_id=bytes(16),
        tenant=tenant,
        previous_hash=previous,
        tokens=bytes(4 * tokens),
        chunk_tokens=16,
        stored_position=0,
        context_class=pb.CONTEXT_CLASS_IN_PROMPT,
        document="",
        groups=1,
        ranks=1,
        matchable=True,
        duplicate=duplicate,
    )


class Held:
    """A catalog and what its chunks weigh, each 10."""

    def __init__(self, make: Callable[[Catalog], Policy]) -> None:
        self.catalog = Catalog()
        self.weight: dict[str, int] = dict.fromkeys(TENANTS, 0)
        self.now = 1000.0
        self.policy = FairShares(
            lambda: make(self.catalog),
            lambda tenant: self.weight[tenant],
            lambda tenant: 30 if tenant == "b" else CAPACITY,
            capacity=CAPACITY,
            idle_seconds=1000,
        )

    def add(self, number: int, tenant: str, domain: int, previous: bytes, tokens: int = 16) -> Chunk:
        key = ChunkKey(tenant.encode() * 16, domain, number.to_bytes(32, "big"))
        chunk = self.catalog.add_object(key, info(tenant, previous, tokens), 0, 0, number)
        self.weight[tenant] += 10
        self.policy.added(chunk, self.now)
        return chunk

    def remove(self, chunk: Chunk) -> None:
        self.catalog.remove(chunk)
        self.weight[chunk.info.tenant] -= 10
        self.policy.removed(chunk)

    def chain(self, chunk: Chunk) -> list[Chunk]:
        """The chunk behind all that is resident before it."""
        found = [chunk]
        while True:
            before = [c for c in self.catalog if c.key.chain_hash == found[0].info.previous_hash]
            before = [c for c in before if (c.key.space_id, c.key.domain) == (chunk.key.space_id, chunk.key.domain)]
            if not before:
                return found
            found.insert(0, before[0])


class Machine(RuleBasedStateMachine):
    make: Callable[[Catalog], Policy]

    def __init__(self) -> None:
        super().__init__()
        self.held = Held(type(self).make)
        self.numbers = iter(range(1, 10_000))

    def chunks(self) -> list[Chunk]:
        return list(self.held.catalog)

    @rule(tenant=st.sampled_from(TENANTS), domain=st.sampled_from(DOMAINS), whole=st.booleans())
    def begin(self, tenant: str, domain: int, whole: bool) -> None:
        self.held.add(next(self.numbers), tenant, domain, b"start", 16 if whole else 5)

    @precondition(lambda self: self.chunks())
    @rule(data=st.data(), whole=st.booleans())
    def go_on(self, data: st.DataObject, whole: bool) -> None:
        before = data.draw(st.sampled_from(self.chunks()))
        tokens = 16 if whole else 5
        self.held.add(next(self.numbers), before.info.tenant, before.key.domain, before.key.chain_hash, tokens)

    @precondition(lambda self: self.chunks())
    @rule(data=st.data(), again=st.booleans())
    def use(self, data: st.DataObject, again: bool) -> None:
        chain = self.held.chain(data.draw(st.sampled_from(self.chunks())))
        (self.held.policy.kept if again else self.held.policy.used)(chain, self.held.now)

    @precondition(lambda self: self.chunks())
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        self.held.remove(data.draw(st.sampled_from(self.chunks())))

    @precondition(lambda self: self.chunks())
    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        data.draw(st.sampled_from(self.chunks())).pinned = pinned

    @rule(seconds=st.sampled_from([0.2, 3, 600]))
    def wait(self, seconds: float) -> None:
        self.held.now += seconds

    @precondition(lambda self: self.chunks())
    @rule(data=st.data(), wanted=st.integers(1, 5))
    def evict(self, data: st.DataObject, wanted: int) -> None:
        """As the store does: protected ones are passed over, each other leaves before the next is asked for."""
        protected = set(data.draw(st.lists(st.sampled_from(self.chunks()), max_size=3)))
        gone = []
        for chunk in self.held.policy.victims(self.held.now):
            if chunk in protected:
                continue
            assert chunk.resident, "it has left already"
            self.check_payer(chunk, protected)
            self.held.remove(chunk)
            gone.append(chunk)
            if len(gone) == wanted:
                break
        free = [chunk for chunk in self.chunks() if chunk not in protected and not chunk.pinned]
        assert len(gone) == wanted or not free, "something could still have gone"

    def check_payer(self, chunk: Chunk, protected: set[Chunk]) -> None:
        """Nobody pays who is less over its share than another that still has something to give."""
        active = sum(tenant in self.asked() for tenant in TENANTS)
        shares = {"a": CAPACITY // active, "b": min(30, CAPACITY // active)}
        excess = {tenant: self.held.weight[tenant] - shares[tenant] for tenant in TENANTS}
        for other in self.chunks():
            may_go = not other.pinned and other not in protected
            assert not may_go or excess[other.info.tenant] <= excess[chunk.info.tenant], "another is further over"

    def asked(self) -> set[str]:
        return {tenant for tenant, at in self.held.policy._asked.items() if self.held.now - at <= 1000}

    @invariant()
    def every_chunk_is_offered_once_and_chains_from_their_end(self) -> None:
        offered = list(self.held.policy.victims(self.held.now))
        assert len(offered) == len(set(offered)), "offered twice"
        assert set(offered) == {chunk for chunk in self.chunks() if not chunk.pinned}
        place = {chunk: number for number, chunk in enumerate(offered)}
        for chunk in offered:
            for child in self.held.catalog.children(chunk.key.space_id, chunk.key.chain_hash):
                if pb.DOMAIN_SEGMENT not in (chunk.key.domain, child.key.domain) and child in place:
                    assert place[child] < place[chunk], "a head goes before its continuation"


def machine_of(making: Callable[[Catalog], Policy]) -> type[Machine]:
    return type("PolicyMachine", (Machine,), {"make": staticmethod(making)})


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_keeps_what_the_store_relies_on(name: str) -> None:
    run_state_machine_as_test(machine_of(lambda catalog: make_policy(name, catalog.children)), settings=QUICK)


class ForgetsRemovals(Lru):
    def removed(self, chunk: Chunk) -> None:
        pass


class LosesWhatIsUsed(Lru):
    def used(self, chunks: Sequence[Chunk], _now: float) -> None:
        for chunk in chunks:
            self.removed(chunk)


class OffersTwice(Lru):
    def victims(self, now: float) -> Iterator[Chunk]:
        for chunk in super().victims(now):
            yield chunk
            yield chunk


class HeadsFirst(Lru):
    def victims(self, now: float) -> Iterator[Chunk]:
        yield from (chunk for chunk in super().victims(now) if not chunk.pinned)


@pytest.mark.parametrize("broken", [ForgetsRemovals, LosesWhatIsUsed, OffersTwice, HeadsFirst])
def test_a_broken_policy_is_found_out(broken: type[Lru]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_of(lambda _: broken()), settings=QUICK)


def order(held: Held) -> list[int]:
    return [int.from_bytes(chunk.key.chain_hash, "big") for chunk in held.policy.victims(held.now)]


def test_blended_goes_first_and_copies_of_known_text_last_of_it() -> None:
    held = Held(lambda catalog: make_policy("density", catalog.children))
    for number, domain in ((1, pb.DOMAIN_BLENDED), (3, pb.DOMAIN_EXACT), (4, pb.DOMAIN_SEGMENT)):
        held.add(number, "a", domain, b"start")
    key = ChunkKey(b"a" * 16, pb.DOMAIN_BLENDED, (2).to_bytes(32, "big"))
    held.policy.added(held.catalog.add_object(key, info("a", b"start", duplicate=True), 0, 0, 2), held.now)
    held.now += 5
    assert order(held) == [1, 2, 3, 4]


def test_the_default_learns_what_returns() -> None:
    """Some prompts come back every 20 s, most never: what has returned outlives what is younger, unlike in LRU."""
    kept = {name: Held(lambda catalog, name=name: make_policy(name, catalog.children)) for name in ("density", "lru")}
    for held in kept.values():
        faithful = [held.add(number, "a", pb.DOMAIN_EXACT, b"start") for number in range(1, 9)]
        number = 100
        for step in range(2015):
            held.now += 1
            if step % 20 == 19:
                for chunk in faithful:
                    held.policy.used([chunk], held.now)
            number += 1
            held.add(number, "a", pb.DOMAIN_EXACT, b"start")
            if len(held.catalog) > 60:
                held.remove(next(c for c in held.policy.victims(held.now) if c not in faithful))
    assert set(range(1, 9)) == set(order(kept["density"])[-8:])
    assert set(range(1, 9)).isdisjoint(order(kept["lru"])[-8:])


def test_one_request_is_one_use_however_many_ranks_ask() -> None:
    once, often = (Held(lambda catalog: make_policy("density", catalog.children)) for _ in range(2))
    for held, ranks in ((once, 1), (often, 4)):
        first, second = held.add(1, "a", pb.DOMAIN_EXACT, b"start"), held.add(2, "a", pb.DOMAIN_EXACT, b"start")
        held.now += 30
        for _ in range(ranks):
            held.policy.used([first], held.now)
            held.now += 0.01
        held.now += 60
        held.policy.used([second], held.now)
        held.now += 60
    assert order(once) == order(often)


def test_an_idle_tenant_pays_before_those_that_ask() -> None:
    held = Held(lambda catalog: make_policy("lru", catalog.children))
    held.add(1, "b", pb.DOMAIN_EXACT, b"start")
    for number in range(2, 9):
        held.add(number, "a", pb.DOMAIN_EXACT, b"start")
    assert next(iter(held.policy.victims(held.now))).info.tenant == "a"
    held.now += 1001
    held.policy.used([chunk for chunk in held.catalog if chunk.info.tenant == "a"][:1], held.now)
    assert order(held)[0] == 1, "b has not asked anything for long"

"""A share of ordinary reads is verified: damage in memory is found by those who use it."""

from itertools import pairwise
from pathlib import Path

import pytest
from process_kit import Agent, StoreProcess
from store_kit import CHUNK, text

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.store.leasing.sampling import Sampler


@pytest.mark.parametrize("share", [0.0, 1 / 256, 0.3, 1.0])
def test_exactly_the_share_is_picked_and_evenly(share: float) -> None:
    sampler = Sampler(share)
    picked, first = [], 0
    for count in [1, 7, 300, 2] * 40:
        numbers = sampler.picks(count)
        assert all(0 <= number < count for number in numbers)
        picked += [first + number for number in numbers]
        first += count
    assert abs(len(picked) - share * first) <= 1
    assert len(set(picked)) == len(picked)
    gaps = [later - earlier for earlier, later in pairwise(picked)]
    assert not gaps or max(gaps) <= 1 / share + 1


def test_of_many_leases_after_an_orderly_start_some_are_verified(shm_dir: Path) -> None:
    with StoreProcess(shm_dir, "--verify-share", "0.25") as store, Agent(store) as agent:
        agent.put(text(1, 8 * CHUNK))
        picked = 0
        for number in range(5):
            objects, _ = agent.lookup([*text(1, 8 * CHUNK), 1], request=str(number))
            picked += sum(item.verify for item in objects)
        assert picked == 10


def test_a_reader_that_finds_damage_takes_the_chunk_out(shm_dir: Path) -> None:
    with StoreProcess(shm_dir, "--verify-share", "1") as store, Agent(store) as agent:
        agent.put(text(1, CHUNK))
        objects, _ = agent.lookup([*text(1, CHUNK), 1])
        place = objects[0].place
        assert objects[0].verify
        agent.view(place)[5] ^= 1
        key = pb.RequestKey(request_id="r", attempt=1)
        ref = store_pb2.ObjectRef(header=place.header, generation=place.generation)
        agent.call("BeginCopy", request=key, objects=[ref])
        agent.call("EndCopy", request=key, objects=[ref], corrupt=[ref])
        assert agent.lookup([*text(1, CHUNK), 1], request="later")[1].prefix_tokens == 0
        assert agent.stats().checksum_failures == 1

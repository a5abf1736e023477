"""What every L2 tier must do: run by each backend, and by broken ones that must fail it.

Each check takes an empty tier. `CHECKS` lists them.
"""

import random
import threading
from collections.abc import Callable, Sequence

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import object_pb2
from services.common.checksums import checksum_of
from services.common.identity import OBJECT_FORMAT_VERSION
from services.store.objects import ChunkKey, ObjectKey
from services.store.tiers.base import Read, Tier, Write

SECONDS = 10.0
Buffer = bytes | memoryview
Check = Callable[[Tier], None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    CHECKS.append(function)
    return function


def payload_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def key_for(number: int, *, group: int = 0, rank: int = 0, domain: pb.Domain = pb.DOMAIN_EXACT) -> ObjectKey:
    return ObjectKey(ChunkKey(b"s" * 16, domain, number.to_bytes(32, "big")), group, rank)


def meta_for(key: ObjectKey, payload: bytes) -> object_pb2.ObjectMeta:
    return object_pb2.ObjectMeta(
        format_version=OBJECT_FORMAT_VERSION,
        space_id=key.chunk.space_id,
        model_space_id=b"m" * 16,
        tenant="default",
        domain=key.chunk.domain,
        chain_hash=key.chunk.chain_hash,
        previous_hash=bytes(32),
        group=key.group,
        rank=pb.Rank(tensor=key.rank),
        tokens=bytes(64),
        chunk_tokens=16,
        payload_bytes=len(payload),
        checksum=checksum_of(payload),
        groups=1,
        ranks=1,
        matchable=True,
    )


def write(tier: Tier, key: ObjectKey, meta: object_pb2.ObjectMeta, payload: Buffer, seconds: float = SECONDS) -> bool:
    """One object alone."""
    (done,) = tier.write([Write(key, meta, memoryview(payload))], seconds)
    return done


def read_into(
    tier: Tier, key: ObjectKey, meta: object_pb2.ObjectMeta, target: bytearray, seconds: float = SECONDS
) -> bool:
    """One object alone."""
    (done,) = tier.read_into([Read(key, meta, memoryview(target))], seconds)
    return done


def put(tier: Tier, key: ObjectKey, payload: bytes) -> bool:
    return write(tier, key, meta_for(key, payload), payload)


def name_of(key: ObjectKey) -> bytes:
    """Of the header in Redis; parts have the same slot."""
    return f"kvblend:{{{key.text()}}}:h".encode()


def get(tier: Tier, key: ObjectKey) -> bytes | None:
    meta = tier.find([key], SECONDS)[0]
    if meta is None:
        return None
    target = bytearray(meta.payload_bytes)
    return bytes(target) if read_into(tier, key, meta, target) else None


@check
def check_reads_what_was_written(tier: Tier) -> None:
    for number, size in enumerate((1, 100, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 20_000_003)):
        payload = payload_of(number, size)
        assert put(tier, key_for(number), payload)
        assert get(tier, key_for(number)) == payload


def put_all(tier: Tier, payloads: dict[ObjectKey, bytes]) -> list[bool]:
    """In one call."""
    return tier.write([Write(key, meta_for(key, data), memoryview(data)) for key, data in payloads.items()], SECONDS)


def get_all(tier: Tier, keys: Sequence[ObjectKey]) -> list[bytes | None]:
    """Those that are found, in one call."""
    found = [(key, meta) for key, meta in zip(keys, tier.find(keys, SECONDS), strict=True) if meta is not None]
    targets = {key: bytearray(meta.payload_bytes) for key, meta in found}
    outcomes = tier.read_into([Read(key, meta, memoryview(targets[key])) for key, meta in found], SECONDS)
    whole = {key for (key, _), arrived in zip(found, outcomes, strict=True) if arrived}
    return [bytes(targets[key]) if key in whole else None for key in keys]


@check
def check_many_objects_in_one_call(tier: Tier) -> None:
    """Of every size, more than go over one connection or are on their way at once."""
    sizes = (1, 9, 10, 100, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3, 5_000_003, 2_000_000, 700_000, 50, 4_000_000)
    payloads = {key_for(number): payload_of(number, size) for number, size in enumerate(sizes)}
    assert put_all(tier, payloads) == [True] * len(sizes)
    for keys in (list(payloads), list(payloads)[::-1]):
        assert get_all(tier, keys) == [payloads[key] for key in keys]
    assert tier.write([], SECONDS) == []
    assert tier.read_into([], SECONDS) == []


@check
def check_one_that_is_not_whole_does_not_touch_the_others(tier: Tier) -> None:
    payloads = {key_for(number): payload_of(number, 900_000 + number) for number in range(9)}
    writes = [Write(key, meta_for(key, data), memoryview(data)) for key, data in payloads.items()]
    for number in (0, 4, 8):
        writes[number].meta.checksum ^= 1
    written = tier.write(writes, SECONDS)
    assert [written[number] for number in (1, 2, 3, 5, 6, 7)] == [True] * 6
    keys = list(payloads)
    expected = [None if number in (0, 4, 8) else payloads[key] for number, key in enumerate(keys)]
    assert get_all(tier, keys) == expected
    assert [meta is not None for meta in tier.find(keys, SECONDS)] == [data is not None for data in expected]
    assert get_all(tier, keys) == expected


@check
def check_one_that_is_refused_does_not_touch_the_others(tier: Tier) -> None:
    payloads = {key_for(number): payload_of(number, 1000) for number in range(6)}
    writes = [Write(key, meta_for(key, data), memoryview(data)) for key, data in payloads.items()]
    writes[0] = writes[0]._replace(payload=writes[0].payload[:-1])
    writes[3] = writes[3]._replace(key=key_for(30))
    assert tier.write(writes, SECONDS) == [False, True, True, False, True, True]
    keys = list(payloads)
    metas = tier.find(keys, SECONDS)
    assert [meta is not None for meta in metas] == [False, True, True, False, True, True]
    reads = [Read(key, meta, memoryview(bytearray(1000))) for key, meta in zip(keys, metas, strict=True) if meta]
    reads[1] = reads[1]._replace(target=memoryview(bytearray(999)))
    assert tier.read_into(reads, SECONDS) == [True, False, True, True]
    assert [bytes(read.target) for place, read in enumerate(reads) if place != 1] == [
        payloads[keys[number]] for number in (1, 4, 5)
    ]


@check
def check_the_same_object_twice_in_one_call(tier: Tier) -> None:
    key, first, second = key_for(1), payload_of(1, 1_500_000), payload_of(2, 1_200_000)
    assert tier.write([Write(key, meta_for(key, data), memoryview(data)) for data in (first, second)], SECONDS) == [
        True,
        True,
    ]
    assert get(tier, key) in (first, second)
    assert put(tier, key, first)
    assert get_all(tier, [key, key_for(2)]) == [first, None]
    meta = tier.find([key], SECONDS)[0]
    assert meta is not None
    targets = [bytearray(len(first)) for _ in range(3)]
    assert tier.read_into([Read(key, meta, memoryview(target)) for target in targets], SECONDS) == [True] * 3
    assert targets == [first] * 3


@check
def check_finds_in_order_and_nothing_else(tier: Tier) -> None:
    present = [key_for(number) for number in (3, 1, 2)]
    for key in present:
        assert put(tier, key, payload_of(key.chunk.chain_hash[-1], 1000 + key.chunk.chain_hash[-1]))
    asked = [present[0], key_for(9), present[2], present[1], key_for(8)]
    found = tier.find(asked, SECONDS)
    sizes = [meta.payload_bytes if meta is not None else None for meta in found]
    assert sizes == [1003, None, 1002, 1001, None]
    assert tier.find([], SECONDS) == []


@check
def check_keeps_groups_ranks_and_domains_apart(tier: Tier) -> None:
    keys = [
        key_for(1),
        key_for(1, group=1),
        key_for(1, rank=1),
        key_for(1, domain=pb.DOMAIN_SEGMENT),
        key_for(1, domain=pb.DOMAIN_BLENDED),
    ]
    for index, key in enumerate(keys):
        assert tier.find([key], SECONDS) == [None]
        assert put(tier, key, payload_of(index, 5000))
    for index, key in enumerate(keys):
        assert get(tier, key) == payload_of(index, 5000)


@check
def check_meta_comes_back_whole(tier: Tier) -> None:
    key, payload = key_for(1), payload_of(1, 3000)
    meta = meta_for(key, payload)
    meta.documents.append("a document")
    meta.stored_position = 77
    meta.context_class = pb.CONTEXT_CLASS_ALONE
    assert write(tier, key, meta, payload)
    found = tier.find([key], SECONDS)[0]
    assert found is not None
    for field in ("write_id", "parts"):
        found.ClearField(field)
    assert found == meta


@check
def check_a_second_write_replaces_the_first(tier: Tier) -> None:
    key = key_for(1)
    assert put(tier, key, payload_of(1, 3_000_000))
    assert put(tier, key, payload_of(2, 1_500_000))
    assert get(tier, key) == payload_of(2, 1_500_000)


@check
def check_an_old_meta_never_gets_mixed_bytes(tier: Tier) -> None:
    key = key_for(1)
    first = payload_of(1, 3_000_000)
    assert put(tier, key, first)
    old = tier.find([key], SECONDS)[0]
    assert old is not None
    assert put(tier, key, payload_of(2, 3_000_000))
    target = bytearray(len(first))
    if read_into(tier, key, old, target):
        assert target == first
    assert get(tier, key) == payload_of(2, 3_000_000)


@check
def check_refuses_a_length_that_is_not_the_metas(tier: Tier) -> None:
    key, payload = key_for(1), payload_of(1, 1000)
    assert not write(tier, key, meta_for(key, payload), payload[:-1])
    assert tier.find([key], SECONDS) == [None]
    assert put(tier, key, payload)
    meta = tier.find([key], SECONDS)[0]
    assert meta is not None
    assert not read_into(tier, key, meta, bytearray(999))
    assert not read_into(tier, key, meta, bytearray(1001))
    assert get(tier, key) == payload


@check
def check_refuses_the_meta_of_another_object(tier: Tier) -> None:
    payload = payload_of(1, 1000)
    assert not write(tier, key_for(1), meta_for(key_for(2), payload), payload)
    assert tier.find([key_for(1), key_for(2)], SECONDS) == [None, None]
    assert put(tier, key_for(2), payload)
    meta = tier.find([key_for(2)], SECONDS)[0]
    assert meta is not None
    assert not read_into(tier, key_for(1), meta, bytearray(1000))


@check
def check_a_wrong_checksum_is_noticed_and_the_object_deleted(tier: Tier) -> None:
    key, payload = key_for(1), payload_of(1, 3_000_000)
    meta = meta_for(key, payload)
    meta.checksum ^= 1
    if write(tier, key, meta, payload):
        assert get(tier, key) is None
    assert tier.find([key], SECONDS) == [None]


@check
def check_deletes_and_counts_what_was_there(tier: Tier) -> None:
    keys = [key_for(number) for number in range(600)]
    for key in keys[::2]:
        assert put(tier, key, b"payload")
    assert tier.delete(keys, SECONDS) == 300
    assert tier.find(keys, SECONDS) == [None] * 600
    assert tier.delete(keys, SECONDS) == 0
    assert tier.delete([], SECONDS) == 0


@check
def check_deletes_what_a_condition_names(tier: Tier) -> None:
    for number in range(700):
        key, payload = key_for(number, rank=number % 2), b"payload"
        meta = meta_for(key, payload)
        meta.tenant = "a" if number % 3 else "b"
        assert write(tier, key, meta, payload)
    assert tier.delete_where(lambda meta: meta.tenant == "b", SECONDS) == 234
    assert tier.health().ready
    found = tier.find([key_for(number, rank=number % 2) for number in range(700)], SECONDS)
    assert [meta is not None for meta in found] == [bool(number % 3) for number in range(700)]
    assert tier.delete_where(lambda meta: meta.tenant == "b", SECONDS) == 0
    assert tier.delete_where(lambda _: True, SECONDS) == 466
    assert tier.find([key_for(1, rank=1)], SECONDS) == [None]


@check
def check_says_when_it_could_not_delete_everything(tier: Tier) -> None:
    assert put(tier, key_for(1), b"payload")
    assert tier.health().ready
    assert tier.delete_where(lambda _: True, 0.0) == 0
    assert not tier.health().ready
    assert get(tier, key_for(1)) == b"payload"


@check
def check_no_time_left_is_a_miss(tier: Tier) -> None:
    key, payload = key_for(1), payload_of(1, 1000)
    assert not write(tier, key, meta_for(key, payload), payload, 0.0)
    assert put(tier, key, payload)
    assert tier.find([key], 0.0) == [None]
    meta = tier.find([key], SECONDS)[0]
    assert meta is not None
    assert not read_into(tier, key, meta, bytearray(1000), 0.0)
    assert tier.delete([key], 0.0) == 0
    assert get(tier, key) == payload


@check
def check_expired_objects_are_not_found(tier: Tier) -> None:
    key, payload = key_for(1), payload_of(1, 1000)
    meta = meta_for(key, payload)
    meta.expires_at = 1.0
    write(tier, key, meta, payload)
    assert tier.find([key], SECONDS) == [None]


@check
def check_many_threads_at_once(tier: Tier) -> None:
    """Four writers overwrite two objects while four readers read them: never anything mixed."""
    keys = [key_for(1), key_for(2)]
    valid = {seed: payload_of(seed, 1_300_000 + seed) for seed in range(8)}
    wrong: list[str] = []

    def write(thread: int) -> None:
        for turn in range(6):
            if not put(tier, keys[turn % 2], valid[2 * thread + turn % 2]):
                wrong.append("write failed")

    def read() -> None:
        for turn in range(12):
            data = get(tier, keys[turn % 2])
            if data is not None and data not in valid.values():
                wrong.append("mixed bytes")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    threads += [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert get(tier, keys[0]) in valid.values()


@check
def check_health_of_a_working_tier(tier: Tier) -> None:
    assert put(tier, key_for(1), b"payload")
    health = tier.health()
    assert health.ready
    assert not health.detail
    assert tier.tier_id


@check
def check_after_close_everything_is_a_miss(tier: Tier) -> None:
    key, payload = key_for(1), payload_of(1, 1000)
    assert put(tier, key, payload)
    tier.close()
    assert tier.find([key], SECONDS) == [None]
    assert not put(tier, key, payload)
    assert tier.delete([key], SECONDS) == 0
    assert not tier.health().ready

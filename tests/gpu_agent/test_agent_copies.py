"""Storing and retrieving through a running agent: which bytes land where, and what is told of the rest."""

import numpy as np
import pytest
import torch
from agent_rig import ROPE, CallFailed, Rig, blocks, failures, outcomes, ranges, slots_of
from engine_memory import rotate_slowly, same_bits

from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from kvblend.v1 import store_pb2 as store
from services.common.checksums import checksum_of

TEXT = list(range(100, 140))
STORED = blocks(3, 1, 7, 0, 9, 2, 11, 5, 8, 6)
OTHER = blocks(12, 15, 13, 20, 14, 19, 16, 22, 17, 18, 21, 23)


@pytest.fixture
def original(rig: Rig) -> torch.Tensor:
    """KV of TEXT, which has been stored."""
    kv = rig.engine.read(slots_of(STORED, range(len(TEXT))))
    assert outcomes(rig.store(TEXT, STORED)) == [("STORED", "UNSPECIFIED")] * 3
    return kv


def test_what_is_committed_is_canonical_and_checksummed(rig: Rig, original: torch.Tensor) -> None:
    for item in rig.fake.objects:
        wanted = original[:, :, item.stored_position : item.stored_position + item.tokens].contiguous()
        payload = rig.fake.payload(item)
        assert payload.tobytes() == wanted.view(torch.uint8).numpy().tobytes()
        assert item.checksum == checksum_of(payload.tobytes())
    assert [item.tokens for item in rig.fake.objects] == [16, 16, 8]


def test_a_prefix_arrives_bit_for_bit_and_nothing_else_is_touched(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    assert rig.lookup([*TEXT, 1]).prefix_tokens == 40
    slots = slots_of(OTHER, range(40))
    before = rig.engine.snapshot()
    old = rig.engine.read(slots)
    response = rig.retrieve(OTHER)
    assert ranges(response.written) == [(0, 40)]
    assert not response.failed
    assert response.bytes == original.numel() * 4
    assert same_bits(rig.engine.read(slots), original)
    rig.engine.write(slots, old)
    assert rig.engine.snapshot() == before


def test_a_segment_starts_and_ends_inside_chunks_and_is_rotated(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_segment(5, 3, 30)
    rig.lookup(list(range(40)))
    response = rig.retrieve(blocks(*range(12, 22), first_slot=2))
    assert ranges(response.written) == [(5, 35)]
    found = rig.engine.read(slots_of(blocks(*range(12, 22), first_slot=2), range(5, 35)))
    assert same_bits(found[:, 1], original[:, 1, 3:33])
    expected = rotate_slowly(original[:, 0, 3:33], ROPE, 2)
    assert torch.allclose(found[:, 0].double(), expected, atol=1e-5)


def test_ranges_and_the_engine_s_own_prefix_limit_what_is_written(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1, 2, 3])
    before = rig.engine.snapshot()
    slots = slots_of(OTHER, range(43))
    wanted = [pb.TokenRange(first=0, length=20), pb.TokenRange(first=38, length=5)]
    response = rig.retrieve(OTHER, ranges=wanted, skip_first_tokens=10)
    assert ranges(response.written) == [(10, 20), (38, 40)]
    assert failures(response) == [(40, 43, "NOT_IN_ANSWER")]
    kept = [position for position in range(40) if position not in (*range(10, 20), 38, 39)]
    snapshot = rig.engine.read(slots)
    assert same_bits(snapshot[:, :, 10:20], original[:, :, 10:20])
    old = torch.frombuffer(bytearray(before[0]), dtype=torch.float32).view(rig.engine.shapes[0])
    for position in kept:
        block, place = divmod(slots[position], 4)
        assert same_bits(snapshot[0, 0, position], old[block, place])


def test_twice_gives_the_same_bytes_and_leases_end_once(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_segment(8, 0, 40)
    rig.lookup(list(range(50)))
    slots = slots_of(OTHER, range(8, 48))
    first = rig.retrieve(OTHER, keep_leases=True)
    one = rig.engine.read(slots)
    rig.engine.write(slots, torch.zeros_like(one))
    second = rig.retrieve(OTHER, keep_leases=True)
    assert same_bits(rig.engine.read(slots), one)
    third = rig.retrieve(OTHER)
    assert ranges(first.written) == ranges(second.written) == ranges(third.written) == [(8, 48)]
    rig.wait_for(lambda: begun(rig) == ended(rig) == 9)
    assert failures(rig.retrieve(OTHER)) == [(8, 48, "LEASE_REVOKED")]


def begun(rig: Rig) -> int:
    return sum(len(request.objects) for request in rig.fake.named("BeginCopy"))


def ended(rig: Rig) -> int:
    return sum(len(request.objects) for request in rig.fake.named("EndCopy"))


def end_of_copy(rig: Rig) -> store.EndCopyRequest:
    """What the store is told of the first retrieve, soon after its answer."""
    rig.wait_for(lambda: len(rig.fake.named("EndCopy")) > 0)
    first: store.EndCopyRequest = rig.fake.named("EndCopy")[0]
    return first


def test_case_02_what_the_engine_computed_itself_is_released_too(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    release = pb.ReleaseLookupRequest(instance_id="engine-1", request_id="r", ranges=[pb.TokenRange(length=20)])
    assert rig.call("ReleaseLookup", release).released == 1, "the second chunk is still needed"
    assert rig.call("ReleaseLookup", release).released == 0
    response = rig.retrieve(OTHER, ranges=[pb.TokenRange(first=20, length=20)])
    assert ranges(response.written) == [(20, 40)]
    headers = [item.header for item in end_of_copy(rig).objects]
    headers += [item.header for request in rig.fake.named("ReleaseLeases") for item in request.objects]
    assert sorted(headers) == [0, 1, 2]


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        (blocks(12, 13), "PROMPT_TOO_LONG"),
        (blocks(12, 13, 14, 15, 16, 17, 18, 19, 20, 24), "INVALID_ARGUMENT"),
        (blocks(12, 13, 14, 15, 16, 17, 18, 19, 20, 12), "INVALID_ARGUMENT"),
        (pb.SlotMap(), "INVALID_ARGUMENT"),
        (pb.SlotMap(block_ids=b"abc"), "INVALID_TOKENS"),
        (blocks(*range(12, 22), first_slot=2**31), "PROMPT_TOO_LONG"),
    ],
)
def test_a_wrong_block_table_writes_nothing_and_keeps_no_lease(
    rig: Rig, original: torch.Tensor, slots: pb.SlotMap, reason: str
) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    before = rig.engine.snapshot()
    with pytest.raises(CallFailed, match=reason):
        rig.retrieve(slots)
    assert rig.engine.snapshot() == before
    assert not rig.fake.named("BeginCopy")
    rig.wait_for(lambda: [len(request.objects) for request in rig.fake.named("ReleaseLeases")] == [3])
    with pytest.raises(CallFailed, match=reason):
        rig.store(TEXT, slots)
    assert len(rig.fake.named("Reserve")) == 1, "only the fixture's"


def test_a_stale_generation_fails_its_range_only(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    rig.fake.before["BeginCopy"] = lambda _: rig.fake.headers["generation"].__setitem__(1, 9)
    response = rig.retrieve(OTHER)
    assert ranges(response.written) == [(0, 16), (32, 40)]
    assert failures(response) == [(16, 32, "STALE_GENERATION")]


def test_a_stale_epoch_fails_everything(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    rig.fake.before["BeginCopy"] = lambda _: rig.fake._page["epoch"].__setitem__(0, 5)
    assert failures(rig.retrieve(OTHER)) == [(0, 40, "STALE_EPOCH")]


def test_case_55_corrupt_bytes_are_never_called_written(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    for item in rig.fake.objects:
        item.verify = True
    rig.fake.payload(rig.fake.objects[2])[5] ^= 1
    rig.lookup([*TEXT, 1])
    response = rig.retrieve(OTHER)
    assert ranges(response.written) == [(0, 32)]
    assert failures(response) == [(32, 40, "CHECKSUM_MISMATCH")]
    assert [item.header for item in end_of_copy(rig).corrupt] == [2]


def test_corrupt_bytes_beside_the_wanted_ones_count_as_well(rig: Rig, original: torch.Tensor) -> None:
    """A part of an object has no checksum of its own."""
    rig.fake.serve_prefix(3)
    rig.fake.objects[1].verify = True
    rig.fake.payload(rig.fake.objects[1])[5] ^= 1
    rig.lookup([*TEXT, 1])
    wanted = [pb.TokenRange(first=4, length=6), pb.TokenRange(first=20, length=3), pb.TokenRange(first=25, length=2)]
    response = rig.retrieve(OTHER, ranges=wanted)
    assert ranges(response.written) == [(4, 10)]
    assert failures(response) == [(20, 23, "CHECKSUM_MISMATCH"), (25, 27, "CHECKSUM_MISMATCH")]
    assert [item.header for item in end_of_copy(rig).corrupt] == [1]


@pytest.mark.parametrize("corrupt_answer", ["outside", "unknown header", "wrong size", "wrong position"])
def test_an_impossible_answer_fails_its_range(rig: Rig, original: torch.Tensor, corrupt_answer: str) -> None:
    rig.fake.serve_prefix(3)
    item = rig.fake.objects[1]
    if corrupt_answer == "outside":
        item.place.offset = 1 << 40
    elif corrupt_answer == "unknown header":
        item.place.header = 10_000
    elif corrupt_answer == "wrong size":
        item.place.payload_bytes -= 4
    else:
        item.stored_position += 1
    rig.lookup([*TEXT, 1])
    response = rig.retrieve(OTHER)
    assert ranges(response.written) == [(0, 16), (32, 40)]
    assert [(first, end) for first, end, _ in failures(response)] == [(16, 32)]
    rig.wait_for(lambda: begun(rig) == ended(rig))


def test_case_66_an_object_that_went_away_fails_its_range_only(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    rig.fake.begin_reasons = [0, common.REASON_EVICTED, 0]
    response = rig.retrieve(OTHER)
    assert ranges(response.written) == [(0, 16), (32, 40)]
    assert failures(response) == [(16, 32, "EVICTED")]
    assert [item.header for item in end_of_copy(rig).objects] == [0, 2]


def test_a_store_that_dies_before_the_copy_fails_every_range(rig: Rig, original: torch.Tensor) -> None:
    rig.fake.serve_prefix(3)
    rig.lookup([*TEXT, 1])
    rig.fake.stop()
    assert failures(rig.retrieve(OTHER)) == [(0, 40, "STORE_UNAVAILABLE")]
    rig.fake.start()


def test_no_store_reserves_nothing(rig: Rig) -> None:
    assert outcomes(rig.store(TEXT, STORED, no_store=True)) == [("DECLINED", "NO_STORE")] * 3
    assert not rig.fake.named("Reserve")


def test_reused_ranges_say_what_is_exact(rig: Rig) -> None:
    reused = [pb.TokenRange(first=20, length=4), pb.TokenRange(first=18, length=4), pb.TokenRange(first=33, length=2)]
    rig.store(TEXT, STORED, reused=reused, allow_blended=True)
    request = rig.fake.named("Reserve")[0]
    assert request.exact_tokens == 18
    assert np.frombuffer(request.segment_tokens, "<u4").tolist() == [0, 6, 2]
    rig.store(TEXT, STORED)
    request = rig.fake.named("Reserve")[1]
    assert request.exact_tokens == 40
    assert not request.segment_tokens


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": store.STORE_KIND_UNSPECIFIED}, "INVALID_ARGUMENT"),
        ({"first_position": 4}, "INVALID_ARGUMENT"),
        ({"reused": [pb.TokenRange(first=30, length=11)]}, "INVALID_ARGUMENT"),
        ({"kind": store.STORE_KIND_DOCUMENT, "reused": [pb.TokenRange(length=1)]}, "INVALID_ARGUMENT"),
        ({"tokens": b""}, "EMPTY_PROMPT"),
        ({"tokens": b"12345"}, "INVALID_TOKENS"),
        ({"context": common.Context(tokens=b"1")}, "INVALID_TOKENS"),
        ({"instance_id": "nobody"}, "UNKNOWN_INSTANCE"),
        ({"space": common.Space(model_space_id=b"x" * 16)}, "INVALID_SPACE"),
        ({"request": common.RequestKey()}, "INVALID_ARGUMENT"),
        ({"event": pb.Event(kind=pb.EVENT_KIND_CUDA_IPC)}, "HANDLE_UNUSABLE"),
        ({"opaque_spans": [common.OpaqueSpan(offset=39, length=2, digest=b"d" * 32)]}, "INVALID_ARGUMENT"),
    ],
)
def test_a_store_that_cannot_be_meant_reserves_nothing(rig: Rig, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(CallFailed, match=reason):
        rig.store(TEXT, STORED, **changes)
    assert not rig.fake.named("Reserve")


def test_a_chunk_whose_block_was_taken_away_is_not_committed(rig: Rig) -> None:
    def reuse(request: object) -> None:
        rig.fake.headers["generation"][1] += 1

    taken = rig.fake._take
    rig.fake._take = lambda nbytes: (place := taken(nbytes), place.header == 2 and reuse(None))[0]
    assert outcomes(rig.store(TEXT, STORED)) == [
        ("STORED", "UNSPECIFIED"),
        ("FAILED", "STALE_GENERATION"),
        ("STORED", "UNSPECIFIED"),
    ]
    assert [item.object.header for item in rig.fake.named("Commit")[0].written] == [0, 2]


def test_case_71_a_refused_commit_is_told(rig: Rig) -> None:
    rig.fake.errors["Commit"] = ["RESERVATION_EXPIRED"]
    assert outcomes(rig.store(TEXT, STORED)) == [("FAILED", "RESERVATION_EXPIRED")] * 3


def test_a_store_without_a_store_is_told(rig: Rig) -> None:
    rig.fake.errors["Reserve"] = ["STORE_UNAVAILABLE"]
    assert outcomes(rig.store(TEXT, STORED)) == [("FAILED", "STORE_UNAVAILABLE")] * 3


def test_a_store_that_forgot_the_model_space_is_told_again(rig: Rig) -> None:
    rig.fake.spaces.clear()
    assert outcomes(rig.store(TEXT, STORED)) == [("STORED", "UNSPECIFIED")] * 3


def test_case_18_a_store_whose_request_ended_commits_nothing(rig: Rig) -> None:
    rig.fake.before["Reserve"] = lambda _: rig.end("store")
    assert outcomes(rig.store(TEXT, STORED)) == [("FAILED", "SUPERSEDED")] * 3
    assert not rig.fake.named("Commit")
    assert len(rig.fake.named("Abort")) == 1

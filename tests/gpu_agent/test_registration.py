"""What a registration must be, and what becomes of its mappings."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rig import INSTANCE, ROPE, SHAPE, CallFailed, Rig, blocks, outcomes, running_agent, slots_of
from engine_memory import EngineMemory, make_rope, model_space
from fake_store import FakeStore

from kvblend.layouts import ARRANGEMENTS, KvShape, buffer_bytes
from kvblend.memory import SharedBuffer
from kvblend.v1 import agent_pb2 as pb
from kvblend.v1 import common_pb2 as common
from services.common.checksums import checksum_of
from services.gpu_agent.engines.layouts import check_layout


def test_the_answer_has_the_facts_of_the_space(rig: Rig) -> None:
    answer = rig.register()
    assert (answer.chunk_tokens, answer.hash_version, answer.object_format_version) == (16, 1, 1)
    assert (answer.epoch, answer.store, len(answer.boot_id), len(answer.model_space_id)) == (1, "fake", 16, 16)
    facts = rig.call("GetFormat", pb.GetFormatRequest(instance_id=INSTANCE))
    assert facts.chunk_tokens == 16


def no_planes(request: pb.RegisterKvCacheRequest) -> None:
    del request.layout.planes[:]


def a_layer_missing(request: pb.RegisterKvCacheRequest) -> None:
    del request.layout.planes[-1]


def a_plane_twice(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes.add().CopyFrom(request.layout.planes[0])


def one_memory_for_k_and_v(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[1].handle = request.layout.planes[0].handle


def a_foreign_group(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes.add(group=1, kind=pb.PLANE_KIND_KEY, heads=2, head_size=8, byte_offset=4)


def an_unknown_kind(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[0].kind = 9


def too_few_heads(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[0].heads = 1


def another_head_size(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[2].head_size = 4


def another_dtype(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.dtype = common.DTYPE_FLOAT16


def no_blocks(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.blocks = 0


def a_billion_blocks(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.blocks = 1 << 31


def elements_that_overlap(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[0].head_stride = 4


def a_negative_stride(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[0].token_stride = -16


def an_odd_offset(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[0].byte_offset = 2


def an_odd_allocation(request: pb.RegisterKvCacheRequest) -> None:
    request.handles[0].allocation_offset = 2


def an_unknown_dtype(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.dtype = request.model_space.kv_dtype = max(common.Dtype.values()) + 1


@pytest.mark.parametrize(
    "fault",
    [
        no_planes,
        a_layer_missing,
        a_plane_twice,
        one_memory_for_k_and_v,
        a_foreign_group,
        an_unknown_kind,
        too_few_heads,
        another_head_size,
        another_dtype,
        no_blocks,
        a_billion_blocks,
        elements_that_overlap,
        a_negative_stride,
        an_odd_offset,
        an_odd_allocation,
        an_unknown_dtype,
    ],
)
def test_case_24_an_unknown_layout_is_refused(rig: Rig, fault: Callable[[pb.RegisterKvCacheRequest], None]) -> None:
    refused(rig, fault, "LAYOUT_UNKNOWN")


def refused(rig: Rig, fault: Callable[[pb.RegisterKvCacheRequest], None], reason: str) -> None:
    """And what was registered before goes on."""
    request = rig.registration()
    fault(request)
    with pytest.raises(CallFailed, match=reason):
        rig.call("RegisterKvCache", request)
    assert outcomes(rig.store([1, 2, 3], blocks(0)))[0][0] == "STORED"


def one_block_too_many(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.blocks += 1


def a_shifted_plane(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[3].byte_offset += 4


def far_away(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[3].byte_offset = 1 << 62


def a_handle_that_is_not_there(request: pb.RegisterKvCacheRequest) -> None:
    request.layout.planes[0].handle = 4


def a_handle_beyond_its_file(request: pb.RegisterKvCacheRequest) -> None:
    request.handles[0].bytes += 1


def an_allocation_beyond_its_file(request: pb.RegisterKvCacheRequest) -> None:
    request.handles[0].allocation_offset = 4096


@pytest.mark.parametrize(
    "fault",
    [
        one_block_too_many,
        a_shifted_plane,
        far_away,
        a_handle_that_is_not_there,
        a_handle_beyond_its_file,
        an_allocation_beyond_its_file,
    ],
)
def test_what_reaches_outside_its_memory_is_refused(
    rig: Rig, fault: Callable[[pb.RegisterKvCacheRequest], None]
) -> None:
    refused(rig, fault, "HANDLE_OUT_OF_BOUNDS")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pb.HANDLE_KIND_SHARED_MEMORY, b"no-such-file"),
        (pb.HANDLE_KIND_SHARED_MEMORY, b"../etc/passwd"),
        (pb.HANDLE_KIND_SHARED_MEMORY, b"a/b"),
        (pb.HANDLE_KIND_SHARED_MEMORY, b".."),
        (pb.HANDLE_KIND_SHARED_MEMORY, b""),
        (pb.HANDLE_KIND_SHARED_MEMORY, b"\xff\xfe"),
        (pb.HANDLE_KIND_SHARED_MEMORY, b"n" * 300),
        (pb.HANDLE_KIND_CUDA_IPC, b"h" * 64),
        (pb.HANDLE_KIND_CUDA_VMM, b"0"),
        (pb.HANDLE_KIND_UNSPECIFIED, b"x"),
    ],
)
def test_an_unusable_handle_is_refused(rig: Rig, kind: pb.HandleKind, name: bytes) -> None:
    def fault(request: pb.RegisterKvCacheRequest) -> None:
        request.handles[0].kind = kind
        request.handles[0].handle = name

    refused(rig, fault, "HANDLE_UNUSABLE")


def test_a_link_or_a_directory_is_no_handle(rig: Rig) -> None:
    link = Path("/dev/shm") / f"kvblend-link-{os.getpid()}"
    link.symlink_to(Path("/dev/shm") / rig.engine.buffers[0].name)
    try:
        for name in (link.name, rig.fake.directory.name):
            refused(rig, lambda request, name=name: setattr(request.handles[0], "handle", name.encode()), "UNUSABLE")
    finally:
        link.unlink()


def test_a_handle_may_start_inside_its_file(rig: Rig) -> None:
    sizes = buffer_bytes("paged_nhd", SHAPE)
    with SharedBuffer(sum(sizes) + 64) as buffer:
        handles = []
        for number, size in enumerate(sizes):
            handle = buffer.handle()
            handle.allocation_offset, handle.bytes = 64 + sum(sizes[:number]), size
            handles.append(handle)
        rig.register(handles=handles)
        rig.store(list(range(16)), blocks(0, 1, 2, 3))
        wanted = bytes(buffer.array[64 : 64 + 16 * 64])
        item = rig.fake.objects[0]
        assert rig.fake.payload(item)[: 16 * 64].tobytes() == wanted
        rig.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id=INSTANCE))


def test_memory_that_the_engine_cut_short_is_not_touched(rig: Rig) -> None:
    os.truncate(Path("/dev/shm") / rig.engine.buffers[0].name, 16)
    with pytest.raises(CallFailed, match="HANDLE_UNUSABLE"):
        rig.store([1, 2, 3], blocks(0))


def test_a_sparse_file_is_filled_before_it_is_used(rig: Rig) -> None:
    path = Path("/dev/shm") / f"kvblend-sparse-{os.getpid()}"
    with path.open("wb") as file:
        file.truncate(rig.engine.handles[0].bytes)
    try:
        handles = rig.engine.handles
        handles[0].handle = path.name.encode()
        rig.register(handles=handles)
        assert path.stat().st_blocks * 512 >= handles[0].bytes
    finally:
        path.unlink()


def test_more_memory_than_allowed_is_refused(fake: FakeStore) -> None:
    size = sum(buffer_bytes("paged_nhd", SHAPE))
    with running_agent(fake, max_mapped_bytes=size) as rig:
        rig.register()
        with pytest.raises(CallFailed, match=f"HANDLE_UNUSABLE.*{size}"):
            rig.register(instance_id="second")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"weights_fingerprint": b""}, "WEIGHTS_UNKNOWN"),
        ({"chunk_tokens": 17}, "INVALID_SPACE"),
        ({"pipeline_parallel": 2}, "NOT_IMPLEMENTED"),
        ({"tensor_parallel": 3}, "LAYOUT_UNKNOWN"),
    ],
)
def test_an_impossible_model_space_is_refused(rig: Rig, changes: dict[str, object], reason: str) -> None:
    def fault(request: pb.RegisterKvCacheRequest) -> None:
        for name, value in changes.items():
            setattr(request.model_space, name, value)

    refused(rig, fault, reason)


def test_a_rank_that_does_not_exist_is_refused(rig: Rig) -> None:
    refused(rig, lambda request: setattr(request.rank, "tensor", 1), "INVALID_ARGUMENT")


def test_registering_again_replaces_the_memory(rig: Rig) -> None:
    other = EngineMemory("interleaved", SHAPE, seed=9)
    rig.register(handles=other.handles, layout=other.layout)
    wanted = other.read(slots_of(blocks(5), range(4)))
    rig.store([1, 2, 3, 4], blocks(5))
    assert rig.fake.payload(rig.fake.objects[0]).tobytes() == wanted.numpy().tobytes()
    assert mapped() == {buffer.name for buffer in other.buffers}
    other.close()


def mapped() -> set[str]:
    """Shared-memory files of engines that are mapped more than once: by the engine and by the agent."""
    names = [
        Path(line.split(maxsplit=5)[5].split(" (")[0]).name
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/dev/shm/kvblend-" in line
    ]
    return {name for name in names if names.count(name) > 1}


def test_unregistering_closes_every_mapping_and_is_idempotent(rig: Rig) -> None:
    assert mapped() == {buffer.name for buffer in rig.engine.buffers}
    request = pb.UnregisterKvCacheRequest(instance_id=INSTANCE)
    assert rig.call("UnregisterKvCache", request).existed
    assert mapped() == set()
    assert not rig.call("UnregisterKvCache", request).existed
    with pytest.raises(CallFailed, match="UNKNOWN_INSTANCE"):
        rig.store([1], blocks(0))


@pytest.mark.parametrize("arrangement", sorted(ARRANGEMENTS))
def test_a_layout_is_proven_by_a_pattern(rig: Rig, arrangement: str) -> None:
    tokens = 24
    shape = SHAPE if arrangement != "contiguous" else KvShape.contiguous(2, 2, 8, 96, SHAPE.dtype)
    engine = EngineMemory(arrangement, shape, seed=4)
    rig.register(handles=engine.handles, layout=engine.layout)
    table, slots = blocks(4, 2, 9, 0, 1, 7), slots_of(blocks(4, 2, 9, 0, 1, 7), range(tokens))
    if arrangement == "contiguous":
        table, slots = pb.SlotMap(first_slot=5), list(range(5, 5 + tokens))
    checksum = checksum_of(engine.read(slots).numpy().tobytes()).to_bytes(8, "little")
    request = pb.ProveLayoutRequest(instance_id=INSTANCE, slots=table, tokens=tokens, expected_checksums=checksum)
    assert rig.call("ProveLayout", request).proven
    # The same memory declared in another order.
    wrong = rig.registration(handles=engine.handles, layout=engine.layout)
    for first, second in zip(wrong.layout.planes[::2], wrong.layout.planes[1::2], strict=True):
        first.kind, second.kind = second.kind, first.kind
    rig.call("RegisterKvCache", wrong)
    answer = rig.call("ProveLayout", request)
    assert not answer.proven
    assert answer.detail
    engine.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 0}, "EMPTY_PROMPT"),
        ({"tokens": 5}, "PROMPT_TOO_LONG"),
        ({"tokens": 2**32 - 1}, "PROMPT_TOO_LONG"),
        ({"expected_checksums": b"1234567"}, "INVALID_ARGUMENT"),
    ],
)
def test_a_layout_proof_that_cannot_be_meant_is_refused(rig: Rig, changes: dict[str, object], reason: str) -> None:
    fields = {"instance_id": INSTANCE, "slots": blocks(1), "tokens": 4, "expected_checksums": b"12345678"}
    with pytest.raises(CallFailed, match=reason):
        rig.call("ProveLayout", pb.ProveLayoutRequest(**(fields | changes)))


def test_a_rope_that_is_not_the_model_space_s_is_refused(rig: Rig) -> None:
    other = make_rope(common.ROPE_STYLE_NEOX, SHAPE.head_size, theta=1e5)
    with pytest.raises(CallFailed, match="ROPE_MISMATCH"):
        rig.call("RegisterRope", pb.RegisterRopeRequest(instance_id=INSTANCE, ropes=[other]))
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        rig.call("RegisterRope", pb.RegisterRopeRequest(instance_id=INSTANCE, ropes=[ROPE]))


def test_a_store_that_is_away_refuses_a_registration_for_now(fake: FakeStore) -> None:
    fake.stop()
    with running_agent(fake, register=False) as rig:
        with pytest.raises(CallFailed, match="STORE_UNAVAILABLE"):
            rig.register()
        fake.start()
        rig.wait_ready()
        rig.register()


def test_two_tenants_cannot_touch_each_other_s_instances(fake: FakeStore) -> None:
    with running_agent(fake, register=False, tenant_tokens={"ta": ["a"], "tb": ["b"], "op": ["*"]}) as rig:
        with pytest.raises(CallFailed, match="UNAUTHENTICATED"):
            rig.ping()
        rig.metadata = (("authorization", "Bearer ta"),)
        rig.wait_ready()
        rig.register()
        assert rig.ping().instance_registered
        rig.metadata = (("authorization", "Bearer tb"),)
        assert not rig.ping().instance_registered
        for attempt in (lambda: rig.store([1], blocks(0)), lambda: rig.lookup([1])):
            with pytest.raises(CallFailed, match="UNKNOWN_INSTANCE"):
                attempt()
        with pytest.raises(CallFailed, match="TENANT_NOT_ALLOWED"):
            rig.register()
        assert not rig.call("UnregisterKvCache", pb.UnregisterKvCacheRequest(instance_id=INSTANCE)).existed
        rig.metadata = (("authorization", "Bearer ta"),)
        with pytest.raises(CallFailed, match="TENANT_NOT_ALLOWED"):
            rig.lookup([1], space=common.Space(tenant="b"))
        rig.lookup([1])
        assert rig.fake.named("Lookup")[0].space.tenant == "a"


def test_clearing_needs_the_right_over_what_is_cleared(fake: FakeStore) -> None:
    everything = common.ClearScope(everything=True)
    theirs = common.ClearScope(document=common.DocumentScope(tenant="b", document="d"))
    mine = common.ClearScope(document=common.DocumentScope(document="d"))
    with running_agent(fake, register=False, tenant_tokens={"ta": ["a"], "op": ["*"]}) as rig:
        rig.metadata = (("authorization", "Bearer ta"),)
        for scope in (everything, theirs, common.ClearScope(space_id=b"s" * 16)):
            with pytest.raises(CallFailed, match="TENANT_NOT_ALLOWED"):
                rig.call("Clear", pb.AgentServiceClearRequest(scope=scope))
        with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
            rig.call("Clear", pb.AgentServiceClearRequest())
        assert rig.call("Clear", pb.AgentServiceClearRequest(scope=mine)).removed_chunks == 3
        assert fake.named("Clear")[0].scope.document.tenant == "a"
        rig.metadata = (("authorization", "Bearer op"),)
        assert rig.call("Clear", pb.AgentServiceClearRequest(scope=everything)).removed_chunks == 3


def test_the_model_space_of_half_the_heads_is_one_rank_of_two() -> None:
    space = model_space(SHAPE, ROPE)
    space.tensor_parallel = 2
    space.groups[0].kv_heads = 2 * SHAPE.heads
    engine = EngineMemory("paged_hnd", SHAPE)
    layout = check_layout(engine.layout, engine.handles, space, common.Rank(tensor=1))
    assert layout.groups[0].heads == SHAPE.heads
    engine.close()

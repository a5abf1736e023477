"""The matcher's one composition point."""

from contextlib import ExitStack

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2, matcher_pb2_grpc
from services.common.lifecycle import Boot
from services.common.server import GrpcServer
from services.matcher.matching import Query, match
from services.matcher.service import MatcherService
from services.matcher.settings import MatcherSettings
from services.matcher.spaces import Spaces, random_hashing, store_owner
from services.matcher.table import Said, Table

SERVICE = "kvblend.v1.MatcherService"


def compile_kernels() -> None:
    """Runs every kernel once, so that the first page and the first match are as fast as any other.

    The text repeats, so that runs overlap, and has chunks enough for an index to grow and to be rebuilt.
    """
    owner = store_owner("warm-up")
    table = Table(random_hashing(), 16)
    tokens = np.tile(np.arange(16, dtype=np.uint32), 4)
    for number in range(600):
        added = matcher_pb2.ChunkAdded(
            domain=pb.DOMAIN_SEGMENT,
            chain_hash=(number + 1).to_bytes(32, "little"),
            previous_hash=number.to_bytes(32, "little"),
            stored_position=16 * number,
            context_class=pb.CONTEXT_CLASS_ALONE,
            matchable=True,
        )
        chunk = tokens[:16] if number < 2 else tokens[:16] + np.uint32(number)
        table.add(added, chunk, owner, Said(1, number + 1))
    query = Query(tokens[5:], 0, frozenset([owner]), frozenset([pb.CONTEXT_CLASS_ALONE]))
    match(table, query, lambda: False)
    for entry in table.owned_by(owner, len(table.by_id)):
        table.drop_owner(entry, owner)


def build(settings: MatcherSettings, stack: ExitStack) -> GrpcServer:
    """Components in start order. The table has nothing to close: it lives as long as the process."""
    del stack
    compile_kernels()
    server = GrpcServer(settings, [SERVICE], replicated=True)
    service = MatcherService(Spaces(), Boot(settings.service), server.latencies)
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(service, server.grpc)  # type: ignore[no-untyped-call]
    return server

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
from services.matcher.table import Table

SERVICE = "kvblend.v1.MatcherService"


def compile_kernels() -> None:
    """Runs every kernel once, so that the first match after the start is as fast as any other."""
    table = Table(random_hashing(), 16)
    tokens = np.arange(100, dtype=np.uint32)
    for first in (0, 16):
        added = matcher_pb2.ChunkAdded(
            domain=pb.DOMAIN_SEGMENT,
            chain_hash=bytes([first]) * 32,
            previous_hash=bytes([0]) * 32,
            stored_position=first,
            context_class=pb.CONTEXT_CLASS_ALONE,
            matchable=True,
        )
        table.add(added, tokens[first : first + 16], store_owner("warm-up"), 1)
    query = Query(
        np.concatenate([tokens[8:16], tokens[16:32], tokens[:20]]),
        0,
        frozenset([store_owner("warm-up")]),
        frozenset([pb.CONTEXT_CLASS_ALONE]),
    )
    match(table, query, lambda: False)


def build(settings: MatcherSettings, stack: ExitStack) -> GrpcServer:
    """Components in start order. The table has nothing to close: it lives as long as the process."""
    del stack
    compile_kernels()
    server = GrpcServer(settings, [SERVICE], replicated=True)
    service = MatcherService(Spaces(), Boot(settings.service), server.latencies)
    matcher_pb2_grpc.add_MatcherServiceServicer_to_server(service, server.grpc)  # type: ignore[no-untyped-call]
    return server

"""Finding the server that holds the log where Sentinels or a cluster's nodes are wrong, slow, or have moved it."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from log_kit import SECONDS, OpenLog, append_all, drain, page
from redis.crc import key_slot
from redis_server import free_port
from redis_topologies import Cluster, SentinelSet, client_of, move_slot, port_of

from services.common.errors import KvblendError
from services.matcher.log.base import START


@contextmanager
def answering_always(reply: bytes) -> Iterator[int]:
    """The port of a server that has one answer to everything."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(4096):
                self.request.sendall(reply)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, args=(0.05,))
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join()


def test_a_node_that_sends_everybody_astray_is_not_believed_twice(
    redis_cluster: Cluster, opened: OpenLog, fresh_prefix: str
) -> None:
    nobody = free_port()
    astray = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:%d\r\n" % nobody
    with answering_always(astray) as port:
        url = redis_cluster.url.replace("cluster://", f"cluster://127.0.0.1:{port},")
        append_all(opened(url, fresh_prefix), page())


def test_one_node_that_is_there_is_enough_to_find_the_cluster(
    redis_cluster: Cluster, opened: OpenLog, fresh_prefix: str
) -> None:
    url = redis_cluster.url.replace("cluster://", f"cluster://127.0.0.1:{free_port()},")
    append_all(opened(url, fresh_prefix), page())
    for node in redis_cluster.nodes:
        log = opened(f"redis+cluster://127.0.0.1:{port_of(node)}", fresh_prefix)
        assert len(drain(log)) == 1


def test_a_log_that_is_moved_to_another_node_is_followed(
    redis_cluster: Cluster, opened: OpenLog, fresh_prefix: str
) -> None:
    log, reader = (opened(redis_cluster.url, fresh_prefix) for _ in range(2))
    end = append_all(log, page("a", 1))
    assert len(drain(reader)) == 1
    key = f"{{{fresh_prefix}}}:records".encode()
    owner = redis_cluster.primaries[key_slot(key) * 3 // 16384]
    other = next(node for node in redis_cluster.primaries if node is not owner)
    move_slot(owner, other, key)
    try:
        append_all(log, page("a", 2))
        assert [record.position.number for record in drain(reader, end)] == [2]
    finally:
        move_slot(other, owner, key)
    assert len(drain(log, START)) == 2


def test_a_server_that_the_sentinels_name_but_that_is_a_replica_is_not_used(
    sentinels: SentinelSet, opened: OpenLog, fresh_prefix: str
) -> None:
    with client_of(sentinels.primary) as client:
        client.replicaof("127.0.0.1", free_port())
        try:
            with pytest.raises(KvblendError, match="not a master"):
                opened(sentinels.url, fresh_prefix).end(SECONDS)
        finally:
            client.replicaof("NO", "ONE")
    append_all(opened(sentinels.url, fresh_prefix), page())


def test_a_sentinel_that_is_away_is_passed_over(sentinels: SentinelSet, opened: OpenLog, fresh_prefix: str) -> None:
    url = sentinels.url.replace("sentinel://", f"sentinel://127.0.0.1:{free_port()},127.0.0.1:{free_port()},")
    append_all(opened(url, fresh_prefix), page())

"""Real Redis topologies for tests: a server with a replica and Sentinels, and a cluster. Servers are `RedisServer`s."""

import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot
from redis_server import RedisServer, find_binary, free_port, redis_server

GIVE_UP_SECONDS = 60.0
MASTER = "kvblend"
# Without it a replica gets its data seconds late, and nothing that must be replicated is.
_REPLICATION = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1")


def wait_until(condition: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + GIVE_UP_SECONDS
    while not condition():
        assert time.monotonic() < give_up_at, "waited in vain"
        time.sleep(0.02)


@contextmanager
def client_of(server: RedisServer) -> Iterator[Any]:
    client = redis.Redis.from_url(server.unix_url, socket_timeout=10)
    try:
        yield client
    finally:
        client.close()


def port_of(server: RedisServer) -> int:
    return int(server.tcp_url.rsplit(":", 1)[1].split("/")[0])


def info(server: RedisServer, section: str) -> dict[str, Any]:
    with client_of(server) as client:
        found: dict[str, Any] = client.info(section)
        return found


def wait_for_master(server: RedisServer) -> None:
    """Until it has been promoted; whoever promotes it cuts its clients off, also the one who asks here."""

    def is_master() -> bool:
        with suppress(redis.ConnectionError):
            return bool(info(server, "replication")["role"] == "master")
        return False

    wait_until(is_master)


def wait_for_replica(replica: RedisServer) -> None:
    wait_until(lambda: info(replica, "replication").get("master_link_status") == "up")


def cut_replication(primary: RedisServer, replica: RedisServer) -> None:
    """What the primary acknowledges from now on reaches nobody else. The replica stands still until it is thawed."""
    replica.freeze()
    with client_of(primary) as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "replica")


@contextmanager
def primary_with_replica() -> Iterator[tuple[RedisServer, RedisServer]]:
    with redis_server(*_REPLICATION) as primary:
        with redis_server(*_REPLICATION, "--replicaof", "127.0.0.1", str(port_of(primary))) as replica:
            wait_for_replica(replica)
            yield primary, replica


class Sentinel:
    """One that notices a dead primary in half a second."""

    def __init__(self, directory: Path, primary: RedisServer, quorum: int) -> None:
        self.port = free_port()
        config = directory / f"sentinel-{self.port}.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {MASTER} 127.0.0.1 {port_of(primary)} {quorum}\n"
            f"sentinel down-after-milliseconds {MASTER} 500\nsentinel failover-timeout {MASTER} 3000\n"
        )
        command = [find_binary(), str(config), "--sentinel"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def state(self) -> dict[str, Any]:
        with redis.Redis(port=self.port, socket_timeout=5) as client:
            with suppress(redis.RedisError):
                found: dict[str, Any] = client.sentinel_master(MASTER)
                return found
        return {}

    def end(self) -> None:
        self.process.kill()
        self.process.wait(GIVE_UP_SECONDS)


class SentinelSet:
    def __init__(self, primary: RedisServer, replica: RedisServer, sentinels: list[Sentinel]) -> None:
        self.primary = primary
        self.replica = replica
        self.sentinels = sentinels
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        self.url = f"redis+sentinel://{hosts}/{MASTER}"

    def knows_each_other(self) -> bool:
        others = len(self.sentinels) - 1
        states = [sentinel.state() for sentinel in self.sentinels]
        return all(state.get("num-other-sentinels") == others and state.get("num-slaves") == 1 for state in states)

    def fail_over(self) -> None:
        """The primary is killed; returns when the replica has its place."""
        self.primary.kill()
        self.replica.thaw()
        wait_for_master(self.replica)


@contextmanager
def sentinel_set() -> Iterator[SentinelSet]:
    with ExitStack() as stack:
        primary, replica = stack.enter_context(primary_with_replica())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-sentinel-")))
        sentinels = []
        for _ in range(3):
            sentinels.append(Sentinel(directory, primary, quorum=2))
            stack.callback(sentinels[-1].end)
        found = SentinelSet(primary, replica, sentinels)
        wait_until(found.knows_each_other)
        yield found


class Cluster:
    """Three primaries, and replicas: of every one, or only of the one that has `key`'s slot."""

    def __init__(self, primaries: list[RedisServer], replicas: list[RedisServer], key: bytes) -> None:
        self.primaries = primaries
        self.owner = self.owner_of(key)
        # By primary.
        replicated = [self.owner] if len(replicas) == 1 else primaries
        self.replicas = dict(zip(replicated, replicas, strict=True))
        self.replica = self.replicas[self.owner]
        self.nodes = [*primaries, *replicas]
        hosts = ",".join(f"127.0.0.1:{port_of(node)}" for node in self.nodes)
        self.url = f"redis+cluster://{hosts}"

    def owner_of(self, key: bytes) -> RedisServer:
        """As the cluster was assembled."""
        return self.primaries[key_slot(key) * 3 // 16384]

    def assemble(self, bus_ports: dict[int, int]) -> None:
        for index, node in enumerate(self.primaries):
            with client_of(node) as client:
                slots = [slot for slot in range(16384) if slot * 3 // 16384 == index]
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", slots[0], slots[-1])
                for other in self.nodes:
                    port = port_of(other)
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus_ports[port])
        wait_until(
            lambda: all(info_of_cluster(node).get("cluster_known_nodes") == str(len(self.nodes)) for node in self.nodes)
        )
        for primary, replica in self.replicas.items():
            with client_of(primary) as client:
                owner = client.execute_command("CLUSTER", "MYID")
            with client_of(replica) as client:
                # The owner's name may have reached it later than the owner's address.
                wait_until(partial(_replicates, client, owner))
        for replica in self.replicas.values():
            wait_for_replica(replica)
        wait_until(lambda: all(info_of_cluster(node).get("cluster_state") == "ok" for node in self.nodes))
        wait_until(lambda: all(info_of_cluster(node).get("cluster_slots_ok") == "16384" for node in self.nodes))


def _replicates(client: Any, owner: bytes) -> bool:
    try:
        client.execute_command("CLUSTER", "REPLICATE", owner)
    except redis.ResponseError:
        return False
    return True


def info_of_cluster(node: RedisServer) -> dict[str, str]:
    with client_of(node) as client:
        reply = client.execute_command("CLUSTER", "INFO")
    if isinstance(reply, dict):
        return {str(name): str(value) for name, value in reply.items()}
    text = reply.decode() if isinstance(reply, bytes) else str(reply)
    return dict(line.split(":", 1) for line in text.split() if ":" in line)


def move_slot(source: RedisServer, target: RedisServer, key: bytes) -> None:
    start_moving(source, target, key)
    with client_of(source) as old:
        for name in old.execute_command("CLUSTER", "GETKEYSINSLOT", key_slot(key), 1000):
            move_key(source, target, name)
    finish_moving(source, target, key)


def start_moving(source: RedisServer, target: RedisServer, key: bytes) -> None:
    slot = key_slot(key)
    with client_of(source) as old, client_of(target) as new:
        names = [client.execute_command("CLUSTER", "MYID") for client in (old, new)]
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])


def move_key(source: RedisServer, target: RedisServer, name: bytes) -> None:
    with client_of(source) as old:
        old.execute_command("MIGRATE", "127.0.0.1", port_of(target), name, 0, 10_000)


def finish_moving(source: RedisServer, target: RedisServer, key: bytes) -> None:
    with client_of(source) as old, client_of(target) as new:
        name = new.execute_command("CLUSTER", "MYID")
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", key_slot(key), "NODE", name)


@contextmanager
def cluster(key: bytes, replicas: int = 1, *more: str) -> Iterator[Cluster]:
    """`replicas`: 1, of the server that has `key`'s slot, or 3. `more`: options of the servers."""
    with ExitStack() as stack:
        nodes = []
        bus_ports = {}
        for _ in range(3 + replicas):
            bus_port = free_port()
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1500", "--cluster-port", str(bus_port))
            nodes.append(stack.enter_context(redis_server(*_REPLICATION, *options, *more)))
            bus_ports[port_of(nodes[-1])] = bus_port
        found = Cluster(nodes[:3], nodes[3:], key)
        found.assemble(bus_ports)
        yield found

"""Which server holds what: a fixed one, the one that Sentinels name, or the owner of a key's slot in a cluster."""

# The contract's signatures; not everything in them matters to every kind.
# ruff: noqa: ARG002

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, Protocol, TypeVar

from redis.crc import key_slot
from redis.exceptions import ResponseError

from services.common.redis_connection import BoundedConnection, LinkError, Options, dial

# One that does not answer must not use up the caller's time: the others are to be asked as well.
_ASK_SECONDS = 0.5

SLOTS = 16384

_T = TypeVar("_T")


class SlotRange(NamedTuple):
    """Slots `first` to `last`, both included, and how to connect to the server that has their keys."""

    first: int
    last: int
    primary: Options


class Route(Protocol):
    """`name`: for messages, without credentials. `clustered`: keys have slots. Thread-safe."""

    name: str
    clustered: bool

    def primary(self, deadline: float) -> Options:
        """How to connect to the server that holds the route's key now.

        Raises LinkError, by the deadline (monotonic seconds) at the latest.
        """
        ...

    def layout(self, deadline: float) -> list[SlotRange]:
        """Who holds which slots now; one server holds all of them outside a cluster. Raises as `primary`."""
        ...

    def distrust(self) -> None:
        """What the last answer led to did not work: ask somebody else first."""
        ...

    def primaries(self) -> Sequence[Options]:
        """Every server that might come to hold the key, as far as the last `primary` saw."""
        ...

    def accept(self, connection: BoundedConnection) -> None:
        """Raises LinkError if what was just connected to is not a primary."""
        ...


class FixedRoute:
    clustered = False

    def __init__(self, name: str, options: Options) -> None:
        self.name = name
        self._options = options

    def primary(self, deadline: float) -> Options:
        return self._options

    def layout(self, deadline: float) -> list[SlotRange]:
        return [SlotRange(0, SLOTS - 1, self._options)]

    def distrust(self) -> None:
        """There is no other."""

    def primaries(self) -> Sequence[Options]:
        return [self._options]

    def accept(self, connection: BoundedConnection) -> None:
        """The setting decides."""


class _Guides:
    """Servers that can be asked for the way; who answered last time is asked first."""

    def __init__(self, servers: Sequence[Options]) -> None:
        self.named = tuple(servers)
        self._servers = self.named
        self._lock = threading.Lock()

    def answers(self, question: Callable[[BoundedConnection, Options], _T], deadline: float) -> Iterator[_T]:
        """One after another, at least one. Raises LinkError if nobody answers."""
        failure = ""
        answered: list[Options] = []
        for options in self._servers:
            until = min(deadline, time.monotonic() + _ASK_SECONDS)
            try:
                connection = dial(options, until)
                try:
                    connection.until(until)
                    answer = question(connection, options)
                finally:
                    connection.close()
            except (LinkError, ResponseError) as error:
                failure = str(error)
                continue
            answered.append(options)
            self._order(*answered, *self._servers)
            yield answer
        if not answered:
            raise LinkError(failure)

    def distrust(self) -> None:
        first, *others = self._servers
        self._order(*others, first)

    def learn(self, servers: Sequence[Options]) -> None:
        """Beside the ones of the setting: those may be replaced one by one while this process runs."""
        self._order(self._servers[0], *self.named, *servers)

    def _order(self, *servers: Options) -> None:
        with self._lock:
            self._servers = tuple(options for index, options in enumerate(servers) if options not in servers[:index])


class SentinelRoute:
    """`data`: how to connect to a server, but for host and port."""

    clustered = False

    def __init__(self, name: str, sentinels: Sequence[Options], master: str, data: Options) -> None:
        self.name = name
        self._guides = _Guides(sentinels)
        self._master = master
        self._data = data
        self._last: Sequence[Options] = ()

    def primary(self, deadline: float) -> Options:
        def question(sentinel: BoundedConnection, _asked: Options) -> tuple[int, Options]:
            address = sentinel.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)
            if address is None:
                raise LinkError(f"the Sentinels know no master {self._master!r}")
            state = sentinel.call("SENTINEL", "MASTER", self._master)
            epoch = int(state[state.index(b"config-epoch") + 1])
            return epoch, {**self._data, "host": address[0].decode(), "port": int(address[1])}

        # One that stood still, or was cut off, may still name a master that has been replaced: of a majority (or of
        # all that answer) the newest configuration counts.
        answers = self._guides.answers(question, deadline)
        majority = list(islice(answers, len(self._guides.named) // 2 + 1))
        _, primary = max(majority, key=itemgetter(0))
        self._last = (primary,)
        return primary

    def layout(self, deadline: float) -> list[SlotRange]:
        return [SlotRange(0, SLOTS - 1, self.primary(deadline))]

    def distrust(self) -> None:
        self._guides.distrust()

    def primaries(self) -> Sequence[Options]:
        return self._last

    def accept(self, connection: BoundedConnection) -> None:
        # Sentinels may still name a server that has lost its role, or not got it yet.
        if connection.call("ROLE")[0] != b"master":
            raise LinkError("the server that the Sentinels name is not a master")


class ClusterRoute:
    """`key`: the one that `primary` is about."""

    clustered = True

    def __init__(self, name: str, nodes: Sequence[Options], key: bytes) -> None:
        self.name = name
        self._guides = _Guides(nodes)
        self._slot = key_slot(key)
        self._last: Sequence[Options] = ()

    def primary(self, deadline: float) -> Options:
        for part in self.layout(deadline):
            if part.first <= self._slot <= part.last:
                return part.primary
        raise LinkError(f"nobody in the cluster has slot {self._slot}")

    def layout(self, deadline: float) -> list[SlotRange]:
        def question(node: BoundedConnection, asked: Options) -> list[SlotRange]:
            found = []
            for first, last, address, *_ in node.call("CLUSTER", "SLOTS"):
                # A node that does not know its own address leaves it out.
                host = address[0].decode() if address[0] else asked["host"]
                found.append(SlotRange(first, last, {**asked, "host": host, "port": int(address[1])}))
            if not found:
                raise LinkError("a node of the cluster knows of no slots")
            return found

        found = next(self._guides.answers(question, deadline))
        primaries: list[Options] = []
        for part in found:
            if part.primary not in primaries:
                primaries.append(part.primary)
        self._guides.learn(primaries)
        self._last = primaries
        return found

    def distrust(self) -> None:
        self._guides.distrust()

    def primaries(self) -> Sequence[Options]:
        return self._last

    def accept(self, connection: BoundedConnection) -> None:
        """One that is not sends us to the right one with every reply."""

"""Commands to one server of L2, where a key may be on its way to another."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from redis.exceptions import AskError, MovedError, ResponseError

from services.common.redis_connection import Argument, BoundedConnection, LinkError
from services.store.tiers.redis_node import RedisNode
from services.store.tiers.redis_servers import RedisServers

Command: TypeAlias = Sequence[Argument]


def refuse_errors(replies: list[Any]) -> list[Any]:
    """The replies; raises the first refusal among them."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies


class Commands:
    """On a connection to `node`, until `deadline` (monotonic seconds)."""

    def __init__(self, servers: RedisServers, node: RedisNode, connection: BoundedConnection, deadline: float) -> None:
        self._servers = servers
        self._node = node
        self.connection = connection
        self.deadline = deadline

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Replies in order; a refusal is a ResponseError among them."""
        replies = self.connection.exchange(commands)
        return [self.followed(command, reply) for command, reply in zip(commands, replies, strict=True)]

    def followed(self, command: Command, reply: Any) -> Any:
        """The reply; where the key is on its way to another server, that one's."""
        if isinstance(reply, AskError) and not isinstance(reply, MovedError):
            return self._servers.ask(reply, self._node, command, self.deadline)
        return reply

    def forget(self, groups: Sequence[Sequence[bytes]]) -> None:
        """Deletes what no header speaks of any more, by groups of one slot. It would expire anyway, so no failure
        matters."""
        if groups:
            with suppress(LinkError):
                self.connection.exchange([("UNLINK", *names) for names in groups])

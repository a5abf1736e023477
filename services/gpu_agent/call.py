"""The call that a transfer works for: how long it may take, and whether anybody still wants it."""

import time
from collections.abc import Callable

import grpc

from kvblend.v1 import common_pb2 as common
from services.common.caller import Caller
from services.common.errors import KvblendError
from services.gpu_agent.devices.base import Stopped


class Call(Caller):
    """One call's deadline and life. Times are seconds."""

    def __init__(self, context: grpc.ServicerContext, *more: Callable[[], None], margin: float = 0.0) -> None:
        """`more` are further watches, each raising Stopped. `margin` seconds of the caller's time are kept back."""
        super().__init__(context)
        self._more = more
        self._deadline = time.monotonic() + (context.time_remaining() or 0.0) - margin

    def left(self) -> float:
        """Raises KvblendError DEADLINE_EXCEEDED when nothing is left."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise KvblendError("DEADLINE_EXCEEDED", "the call's time is used up")
        return left

    def at_least(self, seconds: float) -> float:
        """What is left, but no less than `seconds`: for a call whose outcome must be known."""
        return max(seconds, self._deadline - time.monotonic())

    def watch(self) -> None:
        """Raises Stopped when the copy has lost its purpose."""
        if time.monotonic() > self._deadline:
            raise Stopped(common.REASON_DEADLINE)
        if self.gone():
            raise Stopped(common.REASON_SUPERSEDED)
        for watch in self._more:
            watch()

"""Who waits for the answer of a call."""

from collections.abc import Callable

import grpc


class Caller:
    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context

    def gone(self) -> bool:
        """Nobody waits any more. What the caller says from then on (on another connection, too) may come before this
        call begins: a call that takes anything for a request must look after it became known to the request's end.
        """
        return not self._context.is_active()

    def when_answered(self, work: Callable[[], None]) -> None:
        """Soon after the answer has left, or nobody waits for it any more. `work` must not take long."""
        if not self._context.add_callback(work):
            work()

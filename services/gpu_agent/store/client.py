"""Calls to the store: with a deadline and this agent's token; failures as errors of the one table."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from kvblend.host_calls.appended import Appended
from kvblend.v1 import store_pb2 as store
from kvblend.v1 import store_pb2_grpc
from services.common.channels import open_channel
from services.common.errors import ERRORS, KvblendError, reason_of
from services.common.metrics import Latencies

# What a failure means that does not name its reason.
_BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: "STORE_UNAVAILABLE",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "OVERLOADED",
    grpc.StatusCode.DEADLINE_EXCEEDED: "DEADLINE_EXCEEDED",
    grpc.StatusCode.CANCELLED: "SUPERSEDED",
}

# After these the call may have taken effect all the same, or its session is gone.
UNCERTAIN = frozenset({"DEADLINE_EXCEEDED", "UNKNOWN_SESSION", "STORE_UNAVAILABLE", "SUPERSEDED", "INTERNAL"})


def store_error(error: grpc.RpcError) -> KvblendError:
    """The store's failure as this agent's."""
    reason = reason_of(error)
    if reason not in ERRORS:
        reason = _BY_CODE.get(error.code(), "INTERNAL")
    return KvblendError(reason, f"store: {error.details() or error.code().name}")


class StoreClient:
    """The store's methods by name. Every method raises KvblendError only."""

    def __init__(self, target: str, token: str, latencies: Latencies) -> None:
        self.latencies = latencies
        self._channel = open_channel(target)
        self._stub: Any = store_pb2_grpc.StoreServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def call(self, method: str, request: Any, timeout: float) -> Any:
        """One unary call, e.g. call("PingStore", PingStoreRequest(), 1.0)."""
        try:
            return getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise store_error(error) from error

    def start(self, method: str, request: Any, timeout: float) -> Callable[[], Any]:
        """Begins what `call` does; what it returns waits for the answer, at most until the timeout."""
        running = getattr(self._stub, method).future(request, timeout=timeout, metadata=self._metadata)

        def answer() -> Any:
            try:
                return running.result()
            except grpc.RpcError as error:
                raise store_error(error) from error
            except grpc.FutureCancelledError:
                raise KvblendError("SUPERSEDED", "the call to the store was cancelled: the agent is closing") from None

        return answer

    def lookup(self, request: Appended, timeout: float) -> Any:
        """`request` stands for a LookupRequest. The running stream: iterate it (grpc.RpcError), or cancel it."""
        return self._stub.Lookup(request, timeout=timeout, metadata=self._metadata)

    def session(self, requests: Iterator[store.SessionRequest]) -> Any:
        """The running session stream; heartbeats bound it."""
        return self._stub.Session(requests, metadata=self._metadata)

    def close(self) -> None:
        self._channel.close()

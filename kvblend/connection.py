"""The engine's one connection to its agent: calls that never raise, and a session that heals itself.

A session stream stays open while the engine lives; when it ends, the agent knows that the engine is
gone, and when the agent restarts, the client sees another boot id and registers again by itself.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

import grpc

from kvblend.host_calls import host_channel
from kvblend.v1 import agent_pb2, agent_pb2_grpc

_log = logging.getLogger("kvblend")

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # How long one attempt may take: a busy server does not accept at once.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]
_HEARTBEAT_SECONDS = 1.0
_RECONNECT_SECONDS = 0.2
_LOG_EVERY_SECONDS = 10.0
# The agent does not know the instance (it restarted): register and try once more.
_REGISTER_AGAIN = ("UNKNOWN_INSTANCE", "UNKNOWN_MODEL_SPACE")

Response = TypeVar("Response")


def reason_of(error: grpc.RpcError) -> tuple[str, str]:
    """(reason, detail) of a failed call; AGENT_UNAVAILABLE or DEADLINE where no service answered."""
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == "kvblend-reason":
            return str(value), error.details() or ""
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return "AGENT_UNAVAILABLE", error.details() or ""
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return "DEADLINE", error.details() or ""
    return str(error.code().name), error.details() or ""


class Connection:
    """Calls to the agent at `target` for one engine instance. Thread-safe.

    `register(boot_id)` puts the instance's registrations into an agent that does not have them since
    `boot_id` (b"": whatever it has); it is called from the session's thread and, if a call says that
    the agent forgot the instance, from one of its own.
    """

    def __init__(self, target: str, instance_id: str, token: str | None, register: Callable[[bytes], bool]) -> None:
        self.failures: Counter[str] = Counter()
        self._instance_id = instance_id
        self._register = register
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = host_channel(target, grpc.insecure_channel(target, options=_OPTIONS))
        self.stub: Any = agent_pb2_grpc.AgentServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._closing = threading.Event()
        self._in_session = threading.Event()
        self._lock = threading.Lock()
        # The registration that calls have asked for.
        self._again: Future[bool] | None = None
        self._last_log = 0.0
        self._session = threading.Thread(target=self._hold_session, name="kvblend-session", daemon=True)
        self._session.start()

    def call(
        self, method: Callable[..., Response], request: Any, timeout: float, *, register_again: bool = True
    ) -> tuple[Response | None, str, str]:
        """(response, "", "") or (None, reason, detail), within `timeout` seconds; never raises."""
        deadline = time.monotonic() + timeout
        response, reason, detail = self._attempt(method, request, timeout)
        is_forgotten = reason in _REGISTER_AGAIN and register_again and self._in_session.is_set()
        if is_forgotten and self._registered_again(deadline - time.monotonic()):
            response, reason, detail = self._attempt(method, request, max(0.001, deadline - time.monotonic()))
        if reason:
            self.count(reason, detail)
        return response, reason, detail

    def _registered_again(self, timeout: float) -> bool:
        """Whether everything is registered anew after at most `timeout` seconds.

        That takes as long as it takes, once for all calls that wait for it: half of it would be a registration too.
        """
        with self._lock:
            if self._again is None or self._again.done():
                self._again = Future()
                threading.Thread(
                    target=self._register_again, args=(self._again,), name="kvblend-register", daemon=True
                ).start()
            again = self._again
        try:
            return again.result(max(0.0, timeout))
        except FutureTimeoutError:
            return False

    def _register_again(self, done: "Future[bool]") -> None:
        registered = False
        try:
            registered = self._register(b"")
        finally:
            done.set_result(registered)

    def call_in_session(
        self, method: Callable[..., Response], request: Any, timeout: float
    ) -> tuple[Response | None, str, str]:
        """`call`, made when the agent would notice that this engine ends: it makes what must end with the engine."""
        deadline = time.monotonic() + timeout
        if not self._in_session.is_set():
            # Nobody waits for a session with an agent that is not there.
            ping = agent_pb2.PingAgentRequest(instance_id=self._instance_id)
            answer, reason, detail = self.call(self.stub.PingAgent, ping, timeout, register_again=False)
            if answer is None:
                return None, reason, detail
            if not self._in_session.wait(deadline - time.monotonic()):
                self.count("AGENT_UNAVAILABLE", "no session with the agent")
                return None, "AGENT_UNAVAILABLE", "no session with the agent"
        return self.call(method, request, max(0.001, deadline - time.monotonic()), register_again=False)

    def _attempt(
        self, method: Callable[..., Response], request: Any, timeout: float
    ) -> tuple[Response | None, str, str]:
        try:
            return method(request, timeout=timeout, metadata=self._metadata), "", ""
        except grpc.RpcError as error:
            return None, *reason_of(error)
        except ValueError as error:
            # grpc says so for a closed channel.
            return None, "AGENT_UNAVAILABLE", str(error)

    def count(self, reason: str, detail: str) -> None:
        self.failures[reason] += 1
        if time.monotonic() - self._last_log > _LOG_EVERY_SECONDS:
            self._last_log = time.monotonic()
            _log.warning("kvblend: not cached: %s (%s); %d failures so far", reason, detail, self.failures.total())

    def _heartbeats(self) -> Iterator[agent_pb2.EngineSessionRequest]:
        yield agent_pb2.EngineSessionRequest(instance_id=self._instance_id)
        while not self._closing.wait(_HEARTBEAT_SECONDS):
            yield agent_pb2.EngineSessionRequest()

    def _hold_session(self) -> None:
        reconnected = False
        while not self._closing.is_set():
            registered = False
            try:
                for response in self.stub.EngineSession(self._heartbeats(), metadata=self._metadata):
                    self._in_session.set()
                    # After a break the agent may have dropped the instance, even if it is the same agent.
                    registered = registered or self._register(b"" if reconnected else response.boot_id)
            except grpc.RpcError as error:
                if not self._closing.is_set():
                    self.count(*reason_of(error))
            except ValueError:
                return
            finally:
                self._in_session.clear()
            reconnected = True
            self._closing.wait(_RECONNECT_SECONDS)

    def close(self) -> None:
        self._closing.set()
        self._channel.close()
        self._session.join(timeout=5)

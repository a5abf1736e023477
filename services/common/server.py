"""A gRPC server with what every service needs: deadline rule, errors, metrics, health, reflection."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvblend.host_calls.frames import SUFFIX
from services.common.config import ServiceSettings
from services.common.errors import KvblendError, abort
from services.common.host_calls.server import HostCallServer, Turns
from services.common.logs import get_logger
from services.common.metrics import CALL_SECONDS, Latencies

_log = get_logger("server")

# Session streams are bounded by heartbeats; health watch and reflection are standard and long-lived.
_NO_DEADLINE = ("/grpc.health.v1.", "/grpc.reflection.", "/grpc.channelz.")
_YEAR = 365 * 24 * 3600.0
_SESSION_THREADS = 32
_UNIX = "unix:"

_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.max_send_message_length", 16 << 20),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A second server on the same port must fail, not share it silently.
    ("grpc.so_reuseport", 0),
]

# For services with replicas: connections are closed politely now and then, so that new replicas get work.
# Not for those with session streams, which mean "this process lives".
_AGING_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_connection_age_ms", 300_000),
    ("grpc.max_connection_age_grace_ms", 60_000),
]

Handler = Callable[[Any, grpc.ServicerContext], Any]


class _Calls(grpc.ServerInterceptor):  # type: ignore[misc]
    """Deadline rule, error table, metrics and latencies, around every handler."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._lock = threading.Lock()
        self._sessions: set[grpc.ServicerContext] = set()

    def end_sessions(self) -> None:
        """Session streams would hold a stop for its whole grace: they never end by themselves."""
        with self._lock:
            sessions = list(self._sessions)
        for context in sessions:
            context.cancel()

    def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        handler = continuation(details)
        return None if handler is None else self.around(handler, details.method)

    def around(self, handler: Any, method: str) -> Any:
        exempt = method.startswith(_NO_DEADLINE)
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._session(self._streaming(handler.stream_stream, method, True)),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, exempt),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method, exempt), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, inner: Handler, method: str, exempt: bool) -> Handler:
        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            start = time.perf_counter()
            try:
                _require_deadline(context, method, exempt)
                return inner(request, context)
            except KvblendError as error:
                abort(context, error)
            except Exception as error:
                _fail_unexpected(context, method, error)
            finally:
                self._record(method, context, start)

        return handle

    def _streaming(self, inner: Handler, method: str, exempt: bool) -> Handler:
        def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            start = time.perf_counter()
            try:
                _require_deadline(context, method, exempt)
                yield from inner(request, context)
            except KvblendError as error:
                abort(context, error)
            except Exception as error:
                _fail_unexpected(context, method, error)
            finally:
                self._record(method, context, start)

        return handle

    def _session(self, inner: Handler) -> Handler:
        def handle(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            with self._lock:
                self._sessions.add(context)
            try:
                yield from inner(request, context)
            finally:
                with self._lock:
                    self._sessions.discard(context)

        return handle

    def _record(self, method: str, context: grpc.ServicerContext, start: float) -> None:
        seconds = time.perf_counter() - start
        name = method.rsplit("/", 1)[-1]
        code = _code(context)
        CALL_SECONDS.labels(name, code.name if code else "OK").observe(seconds)
        self._latencies.add(name, seconds)


def _code(context: Any) -> grpc.StatusCode | None:
    code: grpc.StatusCode | None = context.code()
    return code


def _require_deadline(context: grpc.ServicerContext, method: str, exempt: bool) -> None:
    if not exempt and (context.time_remaining() or _YEAR) >= _YEAR:
        raise KvblendError("DEADLINE_REQUIRED", f"{method} needs a deadline (timeout)")


def _fail_unexpected(context: grpc.ServicerContext, method: str, error: Exception) -> None:
    if _code(context) is not None or not context.is_active():
        # The handler aborted by itself, or the caller is gone: nobody to tell.
        raise error
    _log.error("unexpected error", method=method, exc_info=error)
    abort(context, KvblendError("INTERNAL", f"unexpected {type(error).__name__} in {method.rsplit('/', 1)[-1]}"))


class GrpcServer:
    """Composes one service's server. Servicers are added to it as to a grpc.Server.

    What a unix socket serves is served to callers of the host over the plain socket beside it as well.

    `replicated`: clients balance over several of these and must look for new ones now and then.
    `starts_ready`: everything behind it is ready when it starts; else the service says so by `set_ready`.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        service_names: list[str],
        *,
        replicated: bool = False,
        starts_ready: bool = True,
    ) -> None:
        self.latencies = Latencies()
        # Why this process is of no use any more, if that is so.
        self.failure = ""
        self._calls = _Calls(self.latencies)
        self._settings = settings
        self._starts_ready = starts_ready
        self._names = service_names
        pool = futures.ThreadPoolExecutor(settings.threads + _SESSION_THREADS, thread_name_prefix="rpc")
        self.grpc = grpc.server(
            pool,
            interceptors=[self._calls],
            options=_SERVER_OPTIONS + (_AGING_OPTIONS if replicated else []),
            maximum_concurrent_rpcs=settings.threads + _SESSION_THREADS + settings.waiting_calls,
        )
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)
        self.set_ready(False)
        self._handlers: dict[str, Any] = {}
        self._turns = Turns(settings.threads, settings.waiting_calls)
        self._host_servers: list[HostCallServer] = []
        for address in settings.addresses:
            self._bind(address)
            if address.startswith(_UNIX):
                self._serve_host(Path(address.removeprefix(_UNIX)))

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self.grpc.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        self.grpc.add_registered_method_handlers(service, handlers)
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            self._handlers[method] = self._calls.around(handler, method)

    def _serve_host(self, beside: Path) -> None:
        most_connections = self._settings.threads + self._settings.waiting_calls
        try:
            server = HostCallServer(beside, self._handlers.get, self._turns, most_connections)
        except OSError as error:
            # Callers find none, and use gRPC.
            _log.warning("calls within the host are as slow as gRPC", socket=f"{beside}{SUFFIX}", reason=str(error))
            return
        self._host_servers.append(server)

    def _bind(self, address: str) -> None:
        try:
            self.grpc.add_insecure_port(address)
        except RuntimeError:
            raise SystemExit(
                f"kvblend {self._settings.service}: setting listen = {address!r} is refused: "
                "the address is in use or not of this host"
            ) from None

    def set_ready(self, ready: bool) -> None:
        """Readiness, under the names that probes ask for; liveness is that the process answers."""
        state = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", "readiness", *self._names):
            self.health.set(name, state)
        self.health.set("liveness", health_pb2.HealthCheckResponse.SERVING)
        if ready:
            _log.info("ready", listen=self._settings.listen)

    def fail(self, why: str) -> None:
        """This process is of no use any more: `run_service` ends it, and its supervisor starts the next."""
        self.failure = self.failure or why

    def start(self) -> None:
        self.grpc.start()
        for server in self._host_servers:
            server.start()
        if self._starts_ready:
            self.set_ready(True)

    def stop(self, grace_seconds: float) -> None:
        """Refuses new calls, ends sessions, and gives calls in flight `grace_seconds`."""
        give_up_at = time.monotonic() + grace_seconds
        stopped = self.grpc.stop(grace_seconds)
        for server in self._host_servers:
            server.begin_stop()
        self._calls.end_sessions()
        for server in self._host_servers:
            server.stop(max(0.0, give_up_at - time.monotonic()))
        stopped.wait(grace_seconds + 5)

"""The one error table: reason -> gRPC code, and whether the same call may be tried again.

A domain error is a `KvblendError(reason, message)`. The server turns it into a gRPC status whose
trailing metadata name the reason, both as a plain key (for clients that carry no googleapis
package) and as standard rich details (`google.rpc.ErrorInfo`). Misses are not errors.
"""

from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "kvblend"
REASON_KEY = "kvblend-reason"
MAY_RETRY_KEY = "kvblend-may-retry"

_Code = grpc.StatusCode


@dataclass(frozen=True)
class ErrorKind:
    code: grpc.StatusCode
    may_retry: bool = False


ERRORS: dict[str, ErrorKind] = {
    # The caller's mistake.
    "INVALID_ARGUMENT": ErrorKind(_Code.INVALID_ARGUMENT),
    "INVALID_TOKENS": ErrorKind(_Code.INVALID_ARGUMENT),
    "EMPTY_PROMPT": ErrorKind(_Code.INVALID_ARGUMENT),
    "PROMPT_TOO_LONG": ErrorKind(_Code.INVALID_ARGUMENT),
    "INVALID_SPACE": ErrorKind(_Code.INVALID_ARGUMENT),
    "WEIGHTS_UNKNOWN": ErrorKind(_Code.INVALID_ARGUMENT),
    "LAYOUT_UNKNOWN": ErrorKind(_Code.INVALID_ARGUMENT),
    "HANDLE_OUT_OF_BOUNDS": ErrorKind(_Code.INVALID_ARGUMENT),
    "HANDLE_UNUSABLE": ErrorKind(_Code.FAILED_PRECONDITION),
    "ROPE_MISMATCH": ErrorKind(_Code.FAILED_PRECONDITION),
    "DEADLINE_REQUIRED": ErrorKind(_Code.INVALID_ARGUMENT),
    "TENANT_NOT_ALLOWED": ErrorKind(_Code.PERMISSION_DENIED),
    "UNAUTHENTICATED": ErrorKind(_Code.UNAUTHENTICATED),
    # What is named is not there (any more).
    "UNKNOWN_INSTANCE": ErrorKind(_Code.NOT_FOUND),
    "UNKNOWN_MODEL_SPACE": ErrorKind(_Code.NOT_FOUND),
    "UNKNOWN_REQUEST": ErrorKind(_Code.NOT_FOUND),
    "UNKNOWN_RESERVATION": ErrorKind(_Code.NOT_FOUND),
    "UNKNOWN_SESSION": ErrorKind(_Code.FAILED_PRECONDITION),
    "STALE_EPOCH": ErrorKind(_Code.FAILED_PRECONDITION),
    "RESERVATION_EXPIRED": ErrorKind(_Code.FAILED_PRECONDITION),
    "SUPERSEDED": ErrorKind(_Code.ABORTED),
    # The system's state.
    "NOT_CAUGHT_UP": ErrorKind(_Code.UNAVAILABLE, may_retry=True),
    "LOG_UNAVAILABLE": ErrorKind(_Code.UNAVAILABLE, may_retry=True),
    "MATCHER_UNAVAILABLE": ErrorKind(_Code.UNAVAILABLE, may_retry=True),
    "STORE_UNAVAILABLE": ErrorKind(_Code.UNAVAILABLE, may_retry=True),
    "L2_UNAVAILABLE": ErrorKind(_Code.UNAVAILABLE, may_retry=True),
    "NOT_READY": ErrorKind(_Code.UNAVAILABLE, may_retry=True),
    "OVERLOADED": ErrorKind(_Code.RESOURCE_EXHAUSTED, may_retry=True),
    "DEADLINE_EXCEEDED": ErrorKind(_Code.DEADLINE_EXCEEDED),
    "NOT_IMPLEMENTED": ErrorKind(_Code.UNIMPLEMENTED),
    "INTERNAL": ErrorKind(_Code.INTERNAL),
}


class KvblendError(Exception):
    """A failure with a stable reason from `ERRORS` and a line for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.kind = ERRORS[reason]
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


def abort(context: grpc.ServicerContext, error: KvblendError) -> NoReturn:
    """Ends the call with the error's code, message, reason and rich details.

    `abort` with trailing metadata, not `abort_with_status`: tracing instrumentation reads only
    the former (docs/decisions/0003-errors.md).
    """
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)
    packed = any_pb2.Any()
    packed.Pack(info)
    status = status_pb2.Status(code=error.kind.code.value[0], message=error.message, details=[packed])
    context.set_trailing_metadata(
        (
            (REASON_KEY, error.reason),
            (MAY_RETRY_KEY, "true" if error.kind.may_retry else "false"),
            ("grpc-status-details-bin", status.SerializeToString()),
        )
    )
    context.abort(error.kind.code, error.message)
    raise AssertionError("abort returns never")


def reason_of(error: grpc.RpcError) -> str:
    """The stable reason of a failed call; the gRPC code's name where the peer gave none."""
    metadata: Any = error.trailing_metadata() or ()
    reasons = [str(value) for key, value in metadata if key == REASON_KEY]
    return reasons[0] if reasons else str(error.code().name)

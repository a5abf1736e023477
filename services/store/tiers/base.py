"""What the store asks of a lower tier (L2). Implementations pass tests/store_edges/tier_contract.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvblend.v1 import object_pb2
from services.store.objects import ObjectKey


@dataclass(frozen=True)
class TierHealth:
    ready: bool
    # Why it is not ready; empty if it is.
    detail: str = ""
    used_bytes: int = 0
    capacity_bytes: int = 0
    objects: int = 0


class Read(NamedTuple):
    """An object that `find` returned, and where its payload goes: exactly as many bytes."""

    key: ObjectKey
    meta: object_pb2.ObjectMeta
    target: memoryview


class Write(NamedTuple):
    key: ObjectKey
    meta: object_pb2.ObjectMeta
    payload: memoryview


class Tier(Protocol):
    """A place below the arena. No method raises for a tier that is down or slow: it answers a miss
    (None, False) and `health` tells. Timeouts are seconds; every call ends within its timeout, however many objects
    it is about; what becomes of one of them does not touch the others. When a call has ended, nothing reads or writes
    the memory that it was given."""

    # The same for every store that reaches this tier; the matcher's L2 owner.
    tier_id: str

    def find(self, keys: Sequence[ObjectKey], timeout: float) -> list[object_pb2.ObjectMeta | None]:
        """Metas of the objects that are completely there, in order; one round trip."""
        ...

    def read_into(self, reads: Sequence[Read], timeout: float) -> list[bool]:
        """Payloads into their targets, checksums verified: whether each is there, in order.

        False if torn, truncated, corrupt, vanished or late: the target's bytes are then garbage, and the
        object has been deleted from the tier unless the read was merely late.
        """
        ...

    def write(self, writes: Sequence[Write], timeout: float) -> list[bool]:
        """True once acknowledged in full, for each in order. A failed write leaves nothing that `find` would report."""
        ...

    def lacking(self, objects: Sequence[tuple[ObjectKey, object_pb2.ObjectMeta]], timeout: float) -> list[bool] | None:
        """Whether any of an object's bytes are gone, for each that `find` returned, in order; None: no answer."""
        ...

    def delete(self, keys: Sequence[ObjectKey], timeout: float) -> int:
        """How many objects were there and are gone."""
        ...

    def delete_where(self, matches: Callable[[object_pb2.ObjectMeta], bool], timeout: float) -> int:
        """Deletes every object whose meta `matches` (a clear by tenant or document); as `delete`."""
        ...

    def health(self) -> TierHealth: ...

    def close(self) -> None: ...

"""What the store has leased for one lookup, as columns: one row an object."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.v1 import store_pb2 as store
from services.common.columns import Numbers, hashes, u32s, u64s

# (header, generation): one object while it is what it was.
Ref = tuple[int, int]

# (domain, chain hash, layer group) of an object.
Name = tuple[int, bytes, int]


@dataclass(frozen=True)
class Leased:
    """[n] each. `verify`: compare with the checksum."""

    headers: Numbers
    generations: Numbers
    slabs: Numbers
    offsets: Numbers
    payload_bytes: Numbers
    tokens: Numbers
    stored_positions: Numbers
    checksums: npt.NDArray[np.uint64]
    verify: npt.NDArray[np.bool_]
    names: list[Name]

    def __len__(self) -> int:
        return len(self.names)

    def refs(self, rows: Numbers) -> list[Ref]:
        return list(zip(self.headers[rows].tolist(), self.generations[rows].tolist(), strict=True))

    def by_name(self) -> dict[Name, int]:
        """Rows."""
        return dict(zip(self.names, range(len(self)), strict=True))


def leased_of(parts: Sequence[store.ObjectColumns]) -> Leased:
    """What several messages say together. Raises KvblendError or ValueError if columns do not fit each other."""

    def joined(name: str) -> bytes:
        return b"".join([getattr(part, name) for part in parts])

    small = ("headers", "slabs", "tokens", "stored_positions")
    large = ("generations", "offsets", "payload_bytes")
    columns = {name: u32s(joined(name)) for name in small} | {name: u64s(joined(name)) for name in large}
    groups, domains, chains = u32s(joined("groups")).tolist(), joined("domains"), hashes(joined("chain_hashes"))
    leased = Leased(
        **columns,
        checksums=np.frombuffer(joined("checksums"), "<u8").astype(np.uint64),
        verify=np.frombuffer(joined("verify"), np.uint8) != 0,
        names=list(zip(domains, chains, groups, strict=True)),
    )
    if {len(column) for column in (*columns.values(), leased.checksums, leased.verify)} != {len(leased)}:
        raise ValueError("columns of leased objects have different lengths")
    return leased


def ref_of(place: store.ObjectPlace) -> Ref:
    return place.header, place.generation


def refs_of(columns: store.ObjectColumns) -> list[Ref]:
    headers, generations = np.frombuffer(columns.headers, "<u4"), np.frombuffer(columns.generations, "<u8")
    return list(zip(headers.tolist(), generations.tolist(), strict=True))


def object_refs(refs: Iterable[Ref]) -> list[store.ObjectRef]:
    return [store.ObjectRef(header=header, generation=generation) for header, generation in refs]

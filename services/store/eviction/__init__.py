"""Which chunk leaves first when room is needed: policies as small classes behind one interface.

    FairShares              which tenant pays
      TailsFirst            chains from their end, pinned chunks never
        Density, Lru, ...   the order

What the store runs is what `kvblend bench eviction` replays.
"""

from collections.abc import Callable

from services.store.eviction.arc import Arc
from services.store.eviction.chains import Children, TailsFirst
from services.store.eviction.density import Density
from services.store.eviction.lru import Lru
from services.store.eviction.policy import Policy
from services.store.eviction.s3fifo import S3Fifo
from services.store.eviction.tenants import FairShares

DEFAULT_POLICY = "density"
POLICIES: dict[str, Callable[[], Policy]] = {"density": Density, "lru": Lru, "arc": Arc, "s3-fifo": S3Fifo}


def make_policy(name: str, children: Children) -> Policy:
    """One tenant's policy. Raises KeyError for a name that is not in POLICIES."""
    return TailsFirst(POLICIES[name](), children)


__all__ = ["DEFAULT_POLICY", "POLICIES", "FairShares", "Policy", "make_policy"]

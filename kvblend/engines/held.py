"""What the slots of an engine's KV buffer hold."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvblend.blend import Source, Sources
from kvblend.engines.tokens import Tokens

# Sources whose KV is what full attention over every earlier token gives.
_EXACT = (Source.NEW, Source.PREFIX)


@dataclass(frozen=True)
class Held:
    """tokens: [n] u32 whose KV is in slots 0 to n - 1. sources: [n], where it came from."""

    tokens: Tokens
    sources: Sources

    @classmethod
    def nothing(cls) -> "Held":
        return cls(np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.uint8))

    def followed_by(self, generated: Tokens) -> "Held":
        """After decoding: the last generated token has never been through the model."""
        behind = generated[:-1]
        new = np.full(len(behind), Source.NEW, dtype=np.uint8)
        return Held(np.concatenate([self.tokens, behind]), np.concatenate([self.sources, new]))

    def common(self, tokens: Tokens) -> int:
        """Leading tokens that are held."""
        length = min(len(tokens), len(self.tokens))
        return _leading(self.tokens[:length] == tokens[:length])

    def common_exact(self, tokens: Tokens) -> int:
        """Leading tokens that are held with exact KV."""
        return _leading(~self.blended[: self.common(tokens)])

    @property
    def blended(self) -> npt.NDArray[np.bool_]:
        """[n]: the token's own KV came from a segment, also where it was recomputed."""
        return np.isin(self.sources, _EXACT, invert=True)


def _leading(flags: npt.NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(flags.argmin())

"""Which documents a prompt has, and in which order: never one that was asked before."""

import math
import random
from collections.abc import Iterator, Sequence


def new_orders(names: Sequence[str], per_prompt: int, prompts: int, seed: int) -> Iterator[list[str]]:
    """Yields `prompts` different orders of `per_prompt` names, each beginning with another document than the last.

    The same seed gives the same orders.

    Raises:
        ValueError: there are fewer orders than half of what would be needed to keep drawing new ones.
    """
    count = min(per_prompt, len(names))
    if prompts > math.perm(len(names), count) // 2:
        raise ValueError(f"{len(names)} documents have too few orders for {prompts} prompts")
    draw = random.Random(seed)
    seen: set[tuple[str, ...]] = set()
    last = ""
    while len(seen) < prompts:
        order = draw.sample(list(names), count)
        if tuple(order) in seen or (order[0] == last and len(names) > 1):
            continue
        seen.add(tuple(order))
        last = order[0]
        yield order

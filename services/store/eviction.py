"""Which chunk leaves first when room is needed."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvblend.v1 import common_pb2 as pb
from services.store.catalog import Chunk

# A document that idles this many times longer than a prompt's chunk is as old: documents return in other
# prompts, a prompt's chunk only in a continuation.
_DOCUMENT_PATIENCE = 4.0

Children = Callable[[bytes, bytes], Iterable[Chunk]]


class Policy(Protocol):
    """Told of every change; asked for victims. Protected chunks are its caller's to skip."""

    def added(self, chunk: Chunk, now: float) -> None: ...

    def touched(self, chunk: Chunk, now: float) -> None: ...

    def removed(self, chunk: Chunk) -> None: ...

    def victims(self, now: float) -> Iterator[Chunk]:
        """Chunks in the order in which they should go; pinned ones never. The caller may remove what it gets."""
        ...


class ChainedLru:
    """Least recently used first, with three priorities.

    BLENDED chunks go before all others. Then prompts and documents by age, documents ageing slower. Of a
    chain of prompt chunks the tail goes first, as a chunk is useless without those before it.
    """

    def __init__(self, children: Children) -> None:
        self._children = children
        self._queues: dict[int, OrderedDict[Chunk, None]] = {
            pb.DOMAIN_BLENDED: OrderedDict(),
            pb.DOMAIN_EXACT: OrderedDict(),
            pb.DOMAIN_SEGMENT: OrderedDict(),
        }

    def added(self, chunk: Chunk, now: float) -> None:
        self.touched(chunk, now)

    def touched(self, chunk: Chunk, now: float) -> None:
        queue = self._queues[chunk.key.domain]
        queue[chunk] = None
        queue.move_to_end(chunk)
        chunk.last_used = now

    def removed(self, chunk: Chunk) -> None:
        self._queues[chunk.key.domain].pop(chunk, None)

    def victims(self, now: float) -> Iterator[Chunk]:
        yield from self._chains(pb.DOMAIN_BLENDED)
        prompts, documents = self._chains(pb.DOMAIN_EXACT), self._oldest(pb.DOMAIN_SEGMENT)
        prompt, document = next(prompts, None), next(documents, None)
        while prompt or document:
            if document and (not prompt or _is_older(document, prompt, now)):
                yield document
                document = next(documents, None)
            elif prompt:
                yield prompt
                prompt = next(prompts, None)

    def _oldest(self, domain: int) -> Iterator[Chunk]:
        """A queue's chunks, oldest first, in pages: the queue changes while it is read."""
        seen: set[Chunk] = set()
        while True:
            page = list(itertools.islice((chunk for chunk in self._queues[domain] if chunk not in seen), 64))
            if not page:
                return
            for chunk in page:
                seen.add(chunk)
                if chunk.resident and not chunk.pinned:
                    yield chunk

    def _chains(self, domain: int) -> Iterator[Chunk]:
        """Each oldest chunk after all that continue it."""
        seen: set[Chunk] = set()
        for oldest in self._oldest(domain):
            stack = [] if oldest in seen else [oldest]
            while stack:
                chunk = stack[-1]
                if chunk not in seen:
                    seen.add(chunk)
                    stack.extend(self._continuations(chunk, seen))
                    continue
                stack.pop()
                if chunk.resident and not chunk.pinned:
                    yield chunk

    def _continuations(self, chunk: Chunk, seen: set[Chunk]) -> list[Chunk]:
        following = self._children(chunk.key.space_id, chunk.key.chain_hash)
        return [child for child in following if child not in seen and child.key.domain != pb.DOMAIN_SEGMENT]


def _is_older(document: Chunk, prompt: Chunk, now: float) -> bool:
    return now - document.last_used > _DOCUMENT_PATIENCE * (now - prompt.last_used)

"""Matchers find what the store holds, and what L2 does: the stream is in step, and every chunk's text is found."""

import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import matcher_pb2
from services.common.errors import KvblendError
from services.common.tokens import decode_tokens
from services.store.check.findings import Check, Inspection, chunk_name
from services.store.check.kinds import LOG_LACKS, LOG_OUT_OF_STEP
from services.store.lookup.matchers import Matchers
from services.store.objects import ChunkInfo, ChunkKey

# Tokens in one question: as large as a prompt.
_TOKENS = 32_768
_STEP_SECONDS = 10.0
_ASK_SECONDS = 5.0
_POLL_SECONDS = 0.05
_CLASSES = (pb.CONTEXT_CLASS_ALONE, pb.CONTEXT_CLASS_SHARED_PREFIX, pb.CONTEXT_CLASS_IN_PROMPT)


class Asker(NamedTuple):
    """Whom to ask, and as which store. Without a name: only what L2 has is found."""

    matchers: Matchers
    store: str
    epoch: int


class Known(NamedTuple):
    """A chunk that matchers should know by its text."""

    key: ChunkKey
    info: ChunkInfo


def is_known_by_text(key: ChunkKey, info: ChunkInfo) -> bool:
    """What a last, shorter chunk holds may be too little to be found alone."""
    return info.token_count == info.chunk_tokens and info.matchable and key.domain != pb.DOMAIN_BLENDED


def check_log(inspection: Inspection, asker: Asker) -> Check:
    """Chunks asked for, of those that matchers should know by their text.

    Raises:
        KvblendError: no matcher answers.
    """
    state = inspection.state
    if not _in_step(inspection):
        inspection.findings.add(LOG_OUT_OF_STEP, state.outbox.trouble() or "it lags behind", inspection.fix)
        _tell_again(inspection)
        return
    with state.lock:
        held = [
            Known(chunk.key, chunk.info)
            for chunk in state.catalog
            if chunk.complete and is_known_by_text(chunk.key, chunk.info)
        ]
    done = 0
    unknown: list[Known] = []
    for chunks in questions(held):
        unknown += not_found(inspection, asker, chunks)
        done += len(chunks)
        yield done, len(held)
    with state.lock:
        lacking = [known.key for known in unknown if known.key in state.catalog]
    for key in lacking:
        inspection.findings.add(LOG_LACKS, chunk_name(key), inspection.fix)
    if lacking:
        _tell_again(inspection)


def _in_step(inspection: Inspection) -> bool:
    """The log has had all that was said until now, within a while."""
    outbox = inspection.state.outbox
    give_up_at = time.monotonic() + min(_STEP_SECONDS, inspection.remaining() / 2)
    last = outbox.position().sequence
    while not outbox.wait_durable(last, max(0.0, give_up_at - time.monotonic())):
        if time.monotonic() >= give_up_at:
            return False
        # Out of step is answered at once; it may just have started.
        time.sleep(_POLL_SECONDS)
    return True


def _tell_again(inspection: Inspection) -> None:
    if inspection.fix:
        inspection.state.outbox.tell_again("check")


def questions(chunks: Sequence[Known]) -> Iterator[list[Known]]:
    """Chunks of one space whose texts are asked for together."""
    of_space: dict[tuple[bytes, int], list[Known]] = {}
    for chunk in chunks:
        of_space.setdefault((chunk.key.space_id, chunk.info.chunk_tokens), []).append(chunk)
    for (_, tokens), alike in of_space.items():
        rest = iter(alike)
        while some := list(islice(rest, max(1, _TOKENS // tokens))):
            yield some


def not_found(inspection: Inspection, asker: Asker, chunks: Sequence[Known]) -> list[Known]:
    """Those of one question whose text no matcher finds. Raises KvblendError."""
    missed = _missed(inspection, asker, chunks)
    # Together with others it may just have been covered otherwise.
    return [chunk for chunk in missed if _missed(inspection, asker, [chunk])]


def _missed(inspection: Inspection, asker: Asker, chunks: Sequence[Known]) -> list[Known]:
    """Those whose whole text a matcher does not find in the texts of all, one after another."""
    state = inspection.state
    request = matcher_pb2.MatchRequest(
        space_id=chunks[0].key.space_id,
        context_classes=_CLASSES,
        store=asker.store,
        epoch=asker.epoch,
        l2_id=state.l2_id,
        at_least=[state.outbox.durable_position()],
    )
    left = inspection.remaining()
    if left <= 0:
        raise KvblendError("DEADLINE_EXCEEDED", "the check had no time left for the matchers")
    text = b"".join(chunk.info.tokens for chunk in chunks)
    segments = asker.matchers.match(request, text, min(_ASK_SECONDS, left)).segments
    tokens = chunks[0].info.chunk_tokens
    covered = np.zeros(len(chunks) * tokens, bool)
    for first, length in zip(_numbers(segments.query_positions), _numbers(segments.lengths), strict=True):
        covered[first : first + length] = True
    return [chunk for number, chunk in enumerate(chunks) if not covered[number * tokens : (number + 1) * tokens].all()]


def _numbers(column: bytes) -> list[int]:
    numbers: list[int] = decode_tokens(column, field="segments", allow_empty=True).tolist()
    return numbers

"""Reuse that lasts: documents in always-new orders, long after everything has been seen.

Each prompt is an order of 14 of 50 documents that never was before. A store that keeps every such prompt drops its
documents for copies of them, and reuse is gone after some dozens of prompts. Here the services are the real ones:
lookup, leases, reserve with the share that came from segments, commit, end.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common.screen import Screen
from benchmarks.common.targets import Target, at_least, at_most
from benchmarks.store.store_agent import StoreAgent
from cli.local import LocalServices
from kvblend.v1 import common_pb2 as pb
from kvblend.v1 import store_pb2
from services.common.arena_format import PAGE

DOCUMENTS = 50
DOCUMENTS_OF_A_PROMPT = 14
PROMPTS = 10_000
_QUICK_PROMPTS = 200
_PAGE_OF_RESULTS = 100
_CHUNK = 16
# No multiples of a chunk: documents' seams lie anywhere in a prompt's chunks.
_LENGTHS = (100, 156)
# L1 for each byte of unique content.
_ROOM = 2

Tokens = npt.NDArray[np.uint32]


def run(quick: bool, screen: Screen) -> dict[str, Any]:
    return sustained(_QUICK_PROMPTS if quick else PROMPTS, screen)


def sustained(prompts: int, screen: Screen) -> dict[str, Any]:
    """Reuse of each hundred prompts, and what was written."""
    random_numbers = np.random.default_rng(7)
    documents = [
        random_numbers.integers(0, 50_000, random_numbers.integers(*_LENGTHS)).astype("<u4") for _ in range(DOCUMENTS)
    ]
    blocks = sum(-(-len(document) // _CHUNK) for document in documents)
    # A block of so small a model is its page of KV and another for what describes it, or less.
    with LocalServices(arena_bytes=_ROOM * blocks * _block_bytes(), chunk_tokens=_CHUNK) as services:
        target, arena = services.plan.target("store"), Path(services.plan.arena_dir)
        with StoreAgent(target, arena) as agent:
            return {"prompts": prompts, **_measure(agent, documents, prompts, screen)}


def _block_bytes() -> int:
    return 2 * PAGE


def _model() -> pb.ModelSpace:
    """One page of KV for a chunk."""
    rope = pb.Rope(style=pb.ROPE_STYLE_NEOX, rotary_size=32, inv_freq=np.linspace(1, 0.1, 16).tobytes())
    group = pb.LayerGroup(attention=pb.ATTENTION_KIND_FULL, layers=1, kv_heads=1, head_size=32, rope=rope)
    return pb.ModelSpace(
        weights_fingerprint=bytes(32),
        kv_dtype=pb.DTYPE_FLOAT32,
        groups=[group],
        chunk_tokens=_CHUNK,
        display_name="bench",
    )


def _measure(agent: StoreAgent, documents: list[Tokens], prompts: int, screen: Screen) -> dict[str, Any]:
    space = pb.Space(model_space_id=agent.call("RegisterModelSpace", model_space=_model()).model_space_id)
    unique, position = 0, pb.StreamPosition()
    for number, document in enumerate(documents):
        written, position = agent.store(
            "documents",
            space=space,
            kind=store_pb2.STORE_KIND_DOCUMENT,
            tokens=document.tobytes(),
            exact_tokens=len(document),
            document=store_pb2.DocumentOptions(document=f"d{number}"),
        )
        unique += written
    reuse, pages, total = [], [], 0
    orders = _orders(prompts)
    with screen.working(f"{prompts:,} prompts"):
        for number, order in enumerate(orders):
            prompt = np.concatenate([documents[index] for index in order])
            share, written = _ask(agent, space, f"p{number}", prompt, position)
            reuse.append(share)
            total += written
            if len(reuse) == _PAGE_OF_RESULTS:
                pages.append({"reuse": sum(reuse) / len(reuse), "written_bytes": total})
                reuse = []
    screen.line(f"reuse of the first and the last hundred: {pages[0]['reuse']:.4f}, {pages[-1]['reuse']:.4f}")
    return {
        "unique_bytes": unique,
        "arena_bytes": agent.call("GetStoreStats").tiers[0].capacity_bytes,
        "pages": pages,
        "last_over_first": pages[-1]["reuse"] / pages[0]["reuse"],
        "written_over_unique": total / unique,
    }


def _orders(prompts: int) -> list[tuple[int, ...]]:
    chooser = random.Random(7)
    orders: dict[tuple[int, ...], None] = {}
    while len(orders) < prompts:
        orders[tuple(chooser.sample(range(DOCUMENTS), DOCUMENTS_OF_A_PROMPT))] = None
    return list(orders)


def _ask(
    agent: StoreAgent, space: pb.Space, request_id: str, prompt: Tokens, position: pb.StreamPosition
) -> tuple[float, int]:
    """One request as an engine has it: (share of its tokens that was reused, bytes written)."""
    tokens = prompt.tobytes()
    found = agent.lookup(
        request_id, space=space, tokens=tokens, want_segments=True, accept_blended=True, at_least=[position]
    )
    exact = found.prefix_tokens - found.blended_tokens
    covered = np.zeros(len(prompt), bool)
    covered[exact : found.prefix_tokens] = True
    columns = found.segments
    for start, length in zip(_u32(columns.query_positions), _u32(columns.lengths), strict=True):
        covered[start : start + length] = True
    shares = np.add.reduceat(covered, np.arange(0, len(prompt), _CHUNK)).astype("<u4")
    written, _ = agent.store(
        request_id,
        space=space,
        kind=store_pb2.STORE_KIND_PROMPT,
        tokens=tokens,
        exact_tokens=exact,
        segment_tokens=shares.tobytes(),
        allow_blended=True,
    )
    agent.end(request_id)
    return (exact + int(covered.sum())) / len(prompt), written


def _u32(column: bytes) -> Tokens:
    return np.frombuffer(column, "<u4")


def targets(_section: dict[str, Any]) -> list[Target]:
    last, written = (
        "reuse of the last 100 prompts over the first 100",
        "bytes written after warm-up over unique content",
    )
    return [
        at_least(f"sustained: {last}", 0.98, lambda figures: _full(figures, "last_over_first")),
        at_most(f"sustained: {written}", 1.2, lambda figures: _full(figures, "written_over_unique")),
    ]


def _full(figures: dict[str, Any], name: str) -> Any:
    if figures["prompts"] < PROMPTS:
        raise LookupError("run small")
    return figures[name]

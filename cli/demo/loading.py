"""The demo's engine: the model from its folder, in float32, with its tokenizer."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvblend import KvblendClient
from kvblend.blend import Source, Sources
from kvblend.engines.transformers import TransformersEngine

# Small documents: small chunks waste less at their ends.
CHUNK_TOKENS = 64
MAX_TOKENS = 6144
SOURCE_NAMES = {
    Source.PREFIX: "prefix",
    Source.SEGMENT: "segment",
    Source.RECOMPUTED: "recomputed",
    Source.NEW: "new",
}


@dataclass(frozen=True)
class LoadedModel:
    name: str
    model: Any
    tokenizer: Any


def source_names(sources: Sources) -> list[str]:
    """The words for where each token's KV came from."""
    return [SOURCE_NAMES[Source(mark)] for mark in sources]


def load_model(folder: Path) -> LoadedModel:
    """Reads weights and tokenizer; nothing is fetched."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return LoadedModel(folder.resolve().name, model, AutoTokenizer.from_pretrained(folder, local_files_only=True))


@contextmanager
def open_engine(loaded: LoadedModel, target: str, instance_id: str) -> Iterator[TransformersEngine]:
    """An engine that talks to the agent at `target` for as long as the block runs."""
    client = KvblendClient(target, instance_id)
    try:
        engine = TransformersEngine(
            loaded.model, client, max_tokens=MAX_TOKENS, name=loaded.name, chunk_tokens=CHUNK_TOKENS
        )
        try:
            yield engine
        finally:
            engine.close()
    finally:
        client.close()

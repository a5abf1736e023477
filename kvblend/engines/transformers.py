"""Hugging Face Transformers models of the Llama family, served from the KV of text they have already read.

    engine = TransformersEngine(model, client, max_tokens=4096)
    engine.precompute(document, "guide.md", context=prefix)
    answer = engine.answer(prompt, max_new_tokens=64, question_tokens=20)

    engine = TransformersEngine.embedded(model, folder, store, max_tokens=4096)   # with an agent of its own

One engine is one buffer and one request at a time; it is not thread-safe. Trouble with the cache is never an
exception: what could not be reused is computed, and `Answer.lookup` says why.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaForCausalLM

from kvblend.blend import ByInfluence, Prefill, Rows, Selector, Source, Sources, blended_prefill
from kvblend.child_agent import ChildAgent
from kvblend.client import KvblendClient
from kvblend.engines.answer import Answer
from kvblend.engines.cache import EngineCache
from kvblend.engines.held import Held
from kvblend.engines.kv_memory import KvMemory
from kvblend.engines.llama import LlamaDecoder
from kvblend.engines.model_space import check_supported, model_space, rope_proof
from kvblend.engines.reference import full_answer
from kvblend.engines.reuse import Reuse
from kvblend.engines.tokens import Tokens, runs_of
from kvblend.results import StoreResult

DEFAULT_RECOMPUTE = 0.15
_NOTHING_REUSED = ByInfluence(0.0)


class TransformersEngine:
    """A model on the CPU, its KV in shared memory, registered with `client`'s agent.

    `max_tokens`: slots of the KV buffer, for a prompt and its answer together. `chunk_tokens`: 0 takes the
    store's default. `numerics` sets a numerically different build apart from others. The engine does not own
    the client. `agent`: the one that `embedded` keeps running, None without.

    Raises:
        ValueError: a model whose forward pass this engine does not know, or a buffer of no use to it.
        OSError: shared memory cannot hold the buffer.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        client: KvblendClient,
        *,
        max_tokens: int,
        name: str = "",
        chunk_tokens: int = 0,
        numerics: str = "",
        weights_epoch: int = 0,
        lookup_seconds: float = 2.0,
        transfer_seconds: float = 10.0,
    ) -> None:
        check_supported(model, max_tokens)
        self.agent: ChildAgent | None = None
        self._owned = ExitStack()
        self._model = model.eval()
        self._client = client
        self._transfer_seconds = transfer_seconds
        self._decoder = LlamaDecoder(model)
        self._stop = _stop_tokens(model)
        self._prefill_rate = 0
        self.space = model_space(
            model, name=name, chunk_tokens=chunk_tokens, numerics=numerics, weights_epoch=weights_epoch
        )
        self._memory = KvMemory(client, self.space, rope_proof(model), max_tokens, model.dtype)
        self._cache = EngineCache(client, self._memory, lookup_seconds, transfer_seconds)
        self._memory.register()

    @classmethod
    def embedded(
        cls,
        model: LlamaForCausalLM,
        folder: Path | str,
        store: str,
        *,
        token: str | None = None,
        agent_settings: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Self:
        """An engine with an agent as its child, or with the one that another engine of this container has started.

        Agent and client end with the engine. Until the agent is up, seconds after its start, nothing is reused.

        Args:
            folder: for the agent's socket, as `ChildAgent` has it.
            store: the store's gRPC target.
            agent_settings: further settings of the agent by name.
            options: the constructor's.

        Raises:
            ValueError, OSError: as the constructor and `ChildAgent` do.
        """
        with ExitStack() as owned:
            agent = owned.enter_context(ChildAgent(folder, store, device="cpu", settings=agent_settings))
            client = KvblendClient(agent.target, f"transformers-{uuid.uuid4().hex}", token)
            owned.callback(client.close)
            engine = cls(model, client, **options)
            engine.agent, engine._owned = agent, owned.pop_all()
        return engine

    @property
    def max_tokens(self) -> int:
        return self._memory.slots

    def close(self) -> None:
        """Takes the buffer back from the agent and frees it. Stored text stays. Idempotent."""
        self._client.unregister_kv_cache(timeout=self._transfer_seconds)
        self._memory.close()
        self._owned.close()

    def precompute(
        self,
        document: npt.ArrayLike,
        name: str,
        *,
        context: npt.ArrayLike = (),
        tenant: str = "",
        cache_salt: bytes = b"",
    ) -> StoreResult:
        """Computes a document's KV behind `context` and stores it as a source of segments.

        `context` is what prompts have in front of their documents: BOS, or the shared beginning. A document
        computed behind it needs less repair than one computed alone. A failure to store is in the result.

        Raises:
            ValueError: no tokens, or more than the buffer holds.
        """
        before = self._checked(context, allow_empty=True)
        tokens = self._checked(np.concatenate([before, self._checked(document)]))
        self._compute_exact(tokens)
        return self._cache.store(
            tokens[len(before) :],
            uuid.uuid4().hex,
            kind="document",
            first_slot=len(before),
            first_position=len(before),
            context=before,
            document=name,
            tenant=tenant,
            cache_salt=cache_salt,
        )

    def store_prompt(
        self, tokens: npt.ArrayLike, *, allow_blended: bool = False, tenant: str = "", cache_salt: bytes = b""
    ) -> StoreResult:
        """Stores a prompt from its first token, so that prompts beginning alike find it as their prefix.

        What the last answer left in the buffer is stored as it is, its blended part only if `allow_blended`;
        any other prompt is computed exactly first. Raises as `precompute` does.
        """
        prompt = self._checked(tokens)
        if self._memory.held.common(prompt) < len(prompt):
            self._compute_exact(prompt)
        return self._cache.store(
            prompt,
            uuid.uuid4().hex,
            kind="prompt",
            reused=runs_of(self._memory.held.blended[: len(prompt)]),
            allow_blended=allow_blended,
            tenant=tenant,
            cache_salt=cache_salt,
        )

    def answer(
        self,
        tokens: npt.ArrayLike,
        max_new_tokens: int = 0,
        *,
        recompute: float = DEFAULT_RECOMPUTE,
        question_tokens: int = 1,
        reuse: bool = True,
        want_segments: bool = True,
        accept_blended: bool = False,
        selector: Callable[[float], Selector] = ByInfluence,
        tenant: str = "",
        cache_salt: bytes = b"",
    ) -> Answer:
        """Answers a prompt greedily, with the KV of everything in it that is known.

        `recompute`: share of the tokens reused from segments that run through all layers again, chosen by
        `selector`. The last `question_tokens` tokens are always computed, as their logits are in the answer.
        If only a prefix was reused nothing is approximate.

        Raises:
            ValueError: no tokens, more than the buffer holds, or a number out of its range.
        """
        start = time.perf_counter()
        prompt = self._checked(tokens, room_for=max_new_tokens)
        _check_question(prompt, question_tokens)
        choice = selector(recompute)
        request_id = uuid.uuid4().hex
        self._memory.held = Held.nothing()
        found = Reuse.nothing(len(prompt))
        try:
            if reuse:
                found = self._cache.reuse(
                    prompt,
                    request_id,
                    want_segments=want_segments,
                    accept_blended=accept_blended,
                    prefill_tokens_per_second=self._prefill_rate,
                    tenant=tenant,
                    cache_salt=cache_salt,
                )
            found.sources[-question_tokens:] = Source.NEW
            prefill = self._prefill(prompt, found.sources, choice, question_tokens)
            ttft_ms = 1e3 * (time.perf_counter() - start)
        finally:
            if reuse:
                self._cache.end(request_id)
        generated = self._decode(len(prompt), prefill.logits[-1], max_new_tokens)
        self._memory.held = Held(prompt, prefill.sources).followed_by(generated)
        return Answer(generated, prefill.logits, prefill.sources, ttft_ms, found)

    def full_prefill(self, tokens: npt.ArrayLike, max_new_tokens: int = 0, *, question_tokens: int = 1) -> Answer:
        """The same prompt through the model's ordinary forward pass and its own KV cache, for comparison."""
        prompt = self._checked(tokens, room_for=max_new_tokens)
        _check_question(prompt, question_tokens)
        answer: Answer = full_answer(self._model, prompt, max_new_tokens, question_tokens, self._stop)
        return answer

    def _prefill(self, prompt: Tokens, sources: Sources, selector: Selector, question_tokens: int) -> Prefill:
        start = time.perf_counter()
        kv = self._memory.kv[:, :, : len(prompt)]
        ids = torch.from_numpy(prompt.astype(np.int64))
        prefill: Prefill = blended_prefill(self._decoder, ids, kv, sources, selector, question_tokens)
        if not sources.any():
            self._prefill_rate = max(1, round(len(prompt) / (time.perf_counter() - start)))
        return prefill

    def _compute_exact(self, tokens: Tokens) -> None:
        """Fills the buffer's first slots with the KV of these tokens, all by full attention."""
        known = min(self._memory.held.common_exact(tokens), len(tokens) - 1)
        sources = np.zeros(len(tokens), dtype=np.uint8)
        sources[:known] = Source.PREFIX
        self._memory.held = Held.nothing()
        self._prefill(tokens, sources, _NOTHING_REUSED, 1)
        self._memory.held = Held(tokens, sources)

    @torch.inference_mode()
    def _decode(self, position: int, logits: torch.Tensor, max_new_tokens: int) -> Tokens:
        """Greedy tokens behind `position` tokens whose last ones gave `logits`; their KV follows the prompt's."""
        generated: list[int] = []
        kv = self._memory.kv
        while len(generated) < max_new_tokens:
            generated.append(int(logits.argmax()))
            if generated[-1] in self._stop or len(generated) == max_new_tokens:
                break
            rows = Rows(self._decoder, torch.tensor([position]), self._decoder.embed(torch.tensor(generated[-1:])))
            rows.run_all(kv)
            logits = self._decoder.logits(rows.hidden)[-1]
            position += 1
        return np.array(generated, dtype=np.uint32)

    def _checked(self, tokens: npt.ArrayLike, *, room_for: int = 0, allow_empty: bool = False) -> Tokens:
        array = np.asarray(tokens)
        if array.size == 0 and allow_empty:
            return np.zeros(0, dtype=np.uint32)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            raise ValueError(f"tokens of shape {array.shape} and type {array.dtype}; [n] integers are needed, n > 0")
        if room_for < 0 or array.size + room_for > self.max_tokens:
            raise ValueError(f"{array.size} tokens and {room_for} new ones; the KV buffer has {self.max_tokens} slots")
        vocabulary = self._model.config.vocab_size
        if array.min() < 0 or array.max() >= vocabulary:
            raise ValueError(f"tokens from {array.min()} to {array.max()}; the model knows 0 to {vocabulary - 1}")
        return array.astype(np.uint32)


def _check_question(prompt: Tokens, question_tokens: int) -> None:
    if not 0 < question_tokens <= len(prompt):
        raise ValueError(f"question_tokens is {question_tokens}; the prompt has {len(prompt)} tokens")


def _stop_tokens(model: LlamaForCausalLM) -> frozenset[int]:
    ids: int | Sequence[int] | None = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)

"""Prompts from documents' own token ids, so that tokenisation cannot break reuse at the seams.

Tokenising a document inside a prompt merges differently at its edges than alone (BPE merges, BOS, chat
templates): the commonest reason for no reuse. Here every part is tokenised once, by itself, and
prompts are joined from token ids; the chat template is cut where the documents go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

# Never text of a real prompt; only marks where the documents and the question go in the template.
_DOCUMENTS_MARK = "\x1fKVBLEND-DOCUMENTS\x1f"
_QUESTION_MARK = "\x1fKVBLEND-QUESTION\x1f"


@dataclass(frozen=True)
class Prompt:
    """A prompt's token ids, and where its parts begin.

    tokens: [n] u32. prefix_tokens: length of the shared beginning. parts: (name, first, length) of
    each document, in order. question: (first, length) of the question and all that follows it.
    """

    tokens: Tokens
    prefix_tokens: int
    parts: tuple[tuple[str, int, int], ...]
    question: tuple[int, int]


class PromptBuilder:
    """Builds prompts for one tokenizer, one system text and one way of introducing documents.

    `tokenizer` is a Transformers tokenizer (anything with `encode(text, add_special_tokens=...)`
    and, for a chat template, `apply_chat_template` and `chat_template`).
    """

    def __init__(self, tokenizer: Any, system: str = "", separator: str = "\n\n") -> None:
        self._tokenizer = tokenizer
        before, between, after = self._template(system)
        bos = getattr(tokenizer, "bos_token_id", None)
        prefix = self.encode(before)
        if bos is not None and _adds_bos(tokenizer) and (not len(prefix) or prefix[0] != bos):
            prefix = np.concatenate([np.array([bos], dtype=np.uint32), prefix])
        self.prefix: Tokens = prefix
        self._separator = separator
        self._before_question = self.encode(between)
        self._after_question = self.encode(after)
        self._documents: dict[str, Tokens] = {}

    def encode(self, text: str) -> Tokens:
        """Token ids of `text` alone, without special tokens added: [n] u32."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.uint32)

    def add_document(self, name: str, text: str) -> Tokens:
        """Tokenises a document once, with its separator; `build` uses these very ids ever after."""
        tokens = self.encode(text + self._separator)
        self._documents[name] = tokens
        return tokens

    @property
    def documents(self) -> Mapping[str, Tokens]:
        return self._documents

    def build(self, documents: Sequence[str], question: str) -> Prompt:
        """A prompt of the named documents in this order, then the question.

        Raises:
            KeyError: a document that was not added.
        """
        arrays = [self.prefix]
        parts = []
        position = len(self.prefix)
        for name in documents:
            tokens = self._documents[name]
            parts.append((name, position, len(tokens)))
            arrays.append(tokens)
            position += len(tokens)
        tail = np.concatenate([self._before_question, self.encode(question), self._after_question])
        return Prompt(np.concatenate([*arrays, tail]), len(self.prefix), tuple(parts), (position, len(tail)))

    def _template(self, system: str) -> tuple[str, str, str]:
        """Text before the documents, between them and the question, and after the question."""
        if not getattr(self._tokenizer, "chat_template", None):
            return (system + self._separator_after(system), "", "")
        messages = [{"role": "user", "content": _DOCUMENTS_MARK + _QUESTION_MARK}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, rest = text.split(_DOCUMENTS_MARK)
        between, after = rest.split(_QUESTION_MARK)
        return before, between, after

    @staticmethod
    def _separator_after(system: str) -> str:
        return "\n\n" if system else ""


def _adds_bos(tokenizer: Any) -> bool:
    """Whether this tokenizer begins a plain text with BOS; then KV of every text attends to it."""
    ids = tokenizer.encode("a", add_special_tokens=True)
    return bool(ids) and ids[0] == tokenizer.bos_token_id

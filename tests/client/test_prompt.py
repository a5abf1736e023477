"""Prompts keep documents' own token ids, wherever a document stands."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvblend.prompt import PromptBuilder

SYSTEM = "Answer only from the files given."
TEXTS = {"one": "def f(x):\n    return x", "two": "\n  leading white space, trailing too  ", "three": "naïve café ☕"}


@pytest.fixture(scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    model_dir: Path = request.getfixturevalue("model_dir")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def builder(tokenizer: Any) -> PromptBuilder:
    builder = PromptBuilder(tokenizer, SYSTEM)
    for name, text in TEXTS.items():
        builder.add_document(name, text)
    return builder


@pytest.mark.parametrize("order", [["one", "two", "three"], ["three", "one"], ["two", "two"]])
def test_every_document_stands_in_the_prompt_with_its_own_tokens(builder: PromptBuilder, order: list[str]) -> None:
    prompt = builder.build(order, "What does f do?")
    assert [name for name, _, _ in prompt.parts] == order
    for name, first, length in prompt.parts:
        assert np.array_equal(prompt.tokens[first : first + length], builder.documents[name])
    assert np.array_equal(prompt.tokens[: prompt.prefix_tokens], builder.prefix)
    first, length = prompt.question
    assert first + length == len(prompt.tokens)


def test_the_text_is_what_the_chat_template_would_give(builder: PromptBuilder, tokenizer: Any) -> None:
    prompt = builder.build(["one", "three"], "What does f do?")
    content = TEXTS["one"] + "\n\n" + TEXTS["three"] + "\n\n" + "What does f do?"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(prompt.tokens) == whole


def test_tokenising_the_whole_text_at_once_would_lose_documents(builder: PromptBuilder, tokenizer: Any) -> None:
    """The reason for building prompts from ids: merges across the seams."""
    prompt = builder.build(["two", "one"], "?")
    merged = tokenizer.encode(tokenizer.decode(prompt.tokens), add_special_tokens=False)
    assert merged != prompt.tokens.tolist()


def test_an_unknown_document_is_a_key_error(builder: PromptBuilder) -> None:
    with pytest.raises(KeyError):
        builder.build(["four"], "?")


class PlainTokenizer:
    """Bytes as tokens, with BOS, without a chat template."""

    bos_token_id = 256
    chat_template = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + list(text.encode())


def test_a_model_with_bos_begins_every_prompt_with_it() -> None:
    builder = PromptBuilder(PlainTokenizer())
    assert builder.prefix.tolist() == [256]
    builder.add_document("a", "xyz")
    assert builder.build(["a"], "?").tokens[:2].tolist() == [256, ord("x")]

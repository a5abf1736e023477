"""kvblend's client: reuse the KV cache of any known text at any position of a prompt.

`KvblendClient` has the verbs; `PromptBuilder` builds prompts that keep documents' tokens intact;
`kvblend.engines` adapts inference engines.
"""

from kvblend.client import KvblendClient
from kvblend.prompt import Prompt, PromptBuilder

__all__ = ["KvblendClient", "Prompt", "PromptBuilder"]

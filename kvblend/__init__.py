"""kvblend's client: reuse the KV cache of any known text at any position of a prompt.

`KvblendClient` has the verbs; `ChildAgent` keeps an agent beside the engine; `PromptBuilder` builds prompts that keep
documents' tokens intact; `kvblend.engines` adapts inference engines.
"""

from kvblend.child_agent import ChildAgent
from kvblend.client import KvblendClient
from kvblend.prompt import Prompt, PromptBuilder

__all__ = ["ChildAgent", "KvblendClient", "Prompt", "PromptBuilder"]

"""Nybble: run LLMs with 4-bit weights, 8-bit activations and an 8- or 4-bit KV cache.

`LLM(path).generate(...)` and `pipeline(path)` are the Python surface; `nybble --help` the command line. Names are loaded on
first use, so importing the package costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nybble.config import VERSION

__version__ = VERSION
__all__ = ["LLM", "Grammar", "Response", "SamplingParams", "pipeline"]

if TYPE_CHECKING:
    from nybble.engine.messages import Grammar, SamplingParams
    from nybble.llm import LLM, Response, pipeline


def __getattr__(name: str) -> Any:
    if name in ("Grammar", "SamplingParams"):
        from nybble.engine import messages

        return getattr(messages, name)
    if name in __all__:
        from nybble import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'nybble' has no attribute {name!r}")

"""Structured output: which tokens may come next, by llguidance (github.com/guidance-ai/llguidance, an extra). No torch.

A grammar is compiled once per request, in a thread beside the steps. A step's mask needs the token of the step before: `core`
asks for it when that is known, while the device already computes the logits that it masks, so nobody waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from nybble.engine.messages import JSON_SPACE, Grammar

# Forced text would be tokenized as a prompt is: "<|im_end|>" in a string would become the special token, and end the answer.
NO_FORCING = '\n%llguidance {"no_forcing": true}'
INSTALL = "structured output and forced tool calls need llguidance 1.9 or newer: pip install 'nybble[grammar]'"


class Grammars:
    """Of one tokenizer. tokenizer_json: called when the first grammar comes. vocab_size: of the logits.

    `compile` gives a future: a matcher whose `deep_copy`s each follow a completion, or ValueError with what is wrong.
    """

    def __init__(self, tokenizer_json: Callable[[], str], eos_ids: Sequence[int], vocab_size: int) -> None:
        self._tokenizer_json, self._eos_ids, self._vocab_size = tokenizer_json, list(eos_ids), vocab_size
        self._compiled = lru_cache(maxsize=64)(self._compile)

    def prepare(self) -> None:
        """Read the tokenizer now, if llguidance is there: up to seconds in which no other thread runs."""
        with suppress(ImportError, ValueError):
            self._tokenizer  # noqa: B018

    def compile(self, grammar: Grammar) -> Future[Any]:
        made = {"tools": "these tools", "response_format": "this response_format, or these tools,"}  # of which the grammar is
        what = made.get(grammar.field, "this lark") if grammar.kind == "lark" else f"this {grammar.kind}"
        return self._threads.submit(self._compiled, grammar.kind, grammar.text, what)

    def masks(self, matchers: Sequence[Any]) -> np.ndarray:
        """int32 [len(matchers), ceil(vocab_size / 32)]: bit i of a row is 1 where token i may come next."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        masks = allocate_token_bitmask(len(matchers), self._tokenizer.vocab_size)
        if matchers:
            fill_next_token_bitmask_par(self._executor, [(one, row) for row, one in enumerate(matchers)], masks)
        return masks

    def _compile(self, kind: str, text: str, what: str) -> Any:
        try:
            from llguidance import LLMatcher, regex_to_lark
        except ImportError:
            raise ValueError(INSTALL) from None
        if kind == "json_schema":
            text = f"start: %json {_schema(text)}"
        elif kind == "regex":
            text = f"start: /{regex_to_lark(text, 'dw')}/"  # \d and \w are ASCII, as in JSON schemas
        elif kind == "choice":  # a terminal: thousands of rules are too many for the parser
            text = "start: ONE\nONE: " + " | ".join(map(json.dumps, choices(text)))
        if kind != "lark" or "%llguidance" not in text:
            text += NO_FORCING
        matcher = LLMatcher(self._tokenizer, text, log_level=0)
        why = matcher.get_error()
        if not why:  # what nothing can begin shows at the first mask
            first = matcher.deep_copy()
            try:
                why = None if any(first.compute_bitmask()) and not first.is_error() else "no answer keeps to it"
            except ValueError as error:
                why = f"no answer keeps to it: {str(error).partition(chr(10))[0]}"
        if why:
            why = " ".join(why.split())
            why = (why if kind == "lark" else why.partition(" 1 | start: ")[0])[:600]
            raise ValueError(f"{what} cannot be followed ({why}): correct it, or leave out what is not known here")
        return matcher

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(2, "grammar")

    @cached_property
    def _executor(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=self._eos_ids)
        except TypeError:  # before it knew several EOS
            raise ValueError(INSTALL) from None
        except Exception as error:  # the binding raises several kinds
            raise ValueError(f"this model's tokenizer cannot follow a grammar: {error}") from error


def _schema(text: str) -> str:
    try:
        found = json.loads(text)
        why = None if isinstance(found, dict) else f"but {text[:40]}"
    except (ValueError, RecursionError) as error:
        why = f"({error})"
    if why is not None:
        raise ValueError(f"this json_schema is no JSON object {why}: send one, less deep if need be")
    return json.dumps({"x-guidance": JSON_SPACE} | found)


def choices(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not found or not all(isinstance(one, str) and one for one in found):
        raise ValueError("a choice wants a non-empty list of non-empty strings")
    return found

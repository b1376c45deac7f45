"""Masks on a GPU: with graphs and overlap they are those of the tokens before, and rows without one do not notice.

The grammar is made up here, so llguidance is not needed: three tokens may follow, a function of all tokens before.
"""

from __future__ import annotations

import random
from collections import defaultdict
from concurrent.futures import Future

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from nybble.engine.config import EngineConfig
from nybble.engine.core import Engine
from nybble.engine.messages import Grammar, SamplingParams, Submit
from nybble.models import Decoder, dummy_model

pytestmark = pytest.mark.gpu
V, EOS, LENGTH = 2048, 7, 50
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": V, "max_position_embeddings": 1024,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5,
}  # fmt: skip


class Matcher:
    def __init__(self, state: int = 1, count: int = 0) -> None:
        self.state, self.count = state, count

    def allowed(self) -> list[int]:
        return [EOS] if self.count == LENGTH else [8 + (self.state * k) % (V - 8) for k in (1, 3, 7)]

    def consume_token(self, token: int) -> None:
        assert token in self.allowed()
        self.state, self.count = (self.state * 31 + token) % 65521 + 1, self.count + 1

    def deep_copy(self) -> Matcher:
        return Matcher(self.state, self.count)

    def is_error(self) -> bool:
        return False


class MadeUp:
    def compile(self, grammar: Grammar) -> Future:
        future: Future = Future()
        future.set_result(Matcher(int(grammar.text)))
        return future

    def masks(self, matchers: list[Matcher]) -> np.ndarray:
        bits = np.zeros((len(matchers), V), np.uint8)
        for row, matcher in enumerate(matchers):
            bits[row, matcher.allowed()] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return dummy_model(SHAPE, "w4a8_g128", "cuda", seed=3)


def run(model: Decoder, submits: list[Submit], **changes) -> dict[str, list[int]]:
    base = {"kv": "int8", "max_batch": 16, "num_blocks": 200, "block_size": 16, "eos_ids": (EOS,)}
    engine, tokens = Engine(model, EngineConfig(**{**base, **changes}), None, MadeUp()), defaultdict(list)
    for i, submit in enumerate(submits):
        engine.submit(submit)
        if i % 5 == 4:
            for delta in engine.step():
                tokens[delta.request_id, delta.index] += delta.token_ids
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish_reason in (None, "stop", "length"), delta.error
            tokens[delta.request_id, delta.index] += delta.token_ids
    if "num_blocks" in changes:
        assert engine.scheduler.preemptions > 0
    return tokens


def requests() -> tuple[list[Submit], list[Submit]]:
    """Without a grammar, and with one."""
    rng = random.Random(4)
    free, held = [], []
    for i in range(10):
        prompt = [rng.randrange(8, V) for _ in range(rng.choice([1, 30, 200]))]
        drawn = {"temperature": i % 3 * 0.8, "seed": i, "logprobs": 2 if i == 4 else None}
        free.append(Submit(f"free {i}", prompt, SamplingParams(**drawn, max_tokens=60, ignore_eos=True)))
        held.append(Submit(f"held {i}", prompt, SamplingParams(
            **drawn, max_tokens=200, n=1 + i % 2, presence_penalty=i % 4 * 0.2, grammar=Grammar("regex", str(i)))))
    return free, held


def test_rows_with_a_grammar_keep_to_it_and_the_others_do_not_notice(model):
    free, held = requests()
    alone = run(model, free)
    for changes in ({}, {"overlap": False, "graphs": False}, {"num_blocks": 40, "graphs": False}):
        both = run(model, [one for pair in zip(free, held) for one in pair], **changes)
        assert {key: both[key] for key in alone} == alone
        for (name, _), tokens in both.items():
            if name.startswith("held"):
                matcher = Matcher(int(name.split()[1]))
                for token in tokens:
                    matcher.consume_token(token)  # asserts that it was allowed
                assert (len(tokens), tokens[-1]) == (LENGTH + 1, EOS)

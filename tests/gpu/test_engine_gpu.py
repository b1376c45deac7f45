"""The engine on a GPU: graphs, overlap, chunks, the prefix cache and preemption change no token; nothing grows after start."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from nybble.engine.config import EngineConfig
from nybble.engine.core import Engine
from nybble.engine.messages import Delta, SamplingParams, Submit
from nybble.engine.sampler import greedy, gumbel, sample
from nybble.kernels.tokens_triton import greedy_into, resolve
from nybble.models import Decoder, dummy_model

pytestmark = pytest.mark.gpu
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "max_position_embeddings": 1024,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Decoder:
    return dummy_model(SHAPE, "w4a8_g128", "cuda", seed=3)


def requests() -> list[Submit]:
    rng = random.Random(1)
    system, submits = [rng.randrange(2048) for _ in range(200)], []
    for i in range(32):
        prompt = system * (i % 3 == 0) + [rng.randrange(2048) for _ in range(rng.choice([1, 7, 64, 130, 300]))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(10, 80))
        if i % 3 == 1:
            params = SamplingParams(seed=i, top_k=[0, 30][i % 2], top_p=0.9, presence_penalty=0.5, max_tokens=60)
        submits.append(Submit(str(i), prompt, params))
    return submits


def answers(engine: Engine, submits: list[Submit]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    for i, submit in enumerate(submits):
        engine.submit(submit)
        if i % 8 == 7:
            for delta in engine.step():
                tokens[delta.request_id] += delta.token_ids
    while engine.has_work:
        for delta in engine.step():
            assert isinstance(delta, Delta)
            assert delta.finish_reason != "error", delta.error
            tokens[delta.request_id] += delta.token_ids
    info = engine.info()
    assert (info.running, info.free_blocks + info.cached_blocks) == (0, info.num_blocks)
    return tokens


@pytest.mark.parametrize("kv", ["int8", "int4", "bf16"])
def test_nothing_about_the_engine_changes_a_token(model: Decoder, kv: str) -> None:
    base = {"kv": kv, "block_size": 64, "max_batch": 32, "max_batched_tokens": 1024, "num_blocks": 500}
    plain = {"overlap": False, "graphs": False, "prefix_caching": False}
    alone: dict[str, list[int]] = {}
    engine = Engine(model, EngineConfig(**{**base, **plain, "max_batch": 1}))
    for submit in requests():
        alone |= answers(engine, [submit])
    for changes in (
        plain,
        {},
        {"overlap": False},
        {"graphs": False},
        {"chunked_prefill": False},
        {"max_batched_tokens": 100},
        {"prefill_interval": 5},
        {"num_blocks": 64, "block_size": 16},
    ):
        engine = Engine(model, EngineConfig(**{**base, **changes}))
        assert answers(engine, requests()) == alone, changes
        if "num_blocks" in changes:
            assert engine.info().preemptions > 0


def test_memory_is_taken_at_the_start_and_no_more(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(kv="int8", max_batch=32, kv_memory=256 << 20))
    at_start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    free = torch.cuda.mem_get_info()[0]
    answers(engine, requests())
    plan = engine.runner.memory
    assert torch.cuda.max_memory_allocated() - at_start <= plan.workspace
    assert free - torch.cuda.mem_get_info()[0] <= plan.workspace + (64 << 20)  # what torch rounds up to, and kernels
    assert 0 < plan.graphs < 2 << 30
    info = engine.info()
    assert 0 < info.decode_steps < info.steps
    assert 0 < info.decode_busy_s <= info.decode_wall_s
    assert info.host_s > 0


def test_greedy_tokens_are_those_of_a_cpu_and_go_to_the_pool() -> None:
    x = torch.randn(130, 32003, generator=torch.Generator().manual_seed(2)).bfloat16().float()  # with many equal ones
    x[3, 9], x[4], x[5, 32002] = float("nan"), float("-inf"), float("inf")
    pool = torch.zeros(200, dtype=torch.int64, device="cuda")
    slots = torch.randperm(200, generator=torch.Generator().manual_seed(3))[:130]
    drawn = greedy_into(x.cuda(), slots.cuda(), pool)
    assert drawn.tolist() == greedy(x).tolist()
    assert drawn[3:6].tolist() == [-1] * 3
    assert pool[slots.cuda()].tolist() == drawn.tolist()
    ids = torch.tensor([5, -1 - int(slots[7]), -1 - int(slots[3])] * 100)
    assert resolve(ids.cuda(), pool).tolist() == [5, int(drawn[7]), 0] * 100


def test_noise_and_draws_are_those_of_a_cpu() -> None:
    """The hash to the last bit; the logarithms to a few units; the tokens all the same."""
    from nybble.engine.sampler import Draws, uniform

    rows, width = 64, 4096
    keys = torch.randint(0, 2**32, (rows, 2), generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(keys, width), uniform(keys.cuda(), width).cpu())
    torch.testing.assert_close(gumbel(keys, width), gumbel(keys.cuda(), width).cpu(), rtol=1e-5, atol=1e-6)
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(1)) * 3
    one = torch.ones(rows)

    def draws(device: str) -> Draws:
        values = (one * 0.8, torch.full((rows,), 50), one * 0.95, one * 0.01, one, one * 0, one * 0)
        slots = torch.arange(rows, device=device)
        return Draws(slots, *(v.to(device) for v in values), keys.to(device), True, True, None, None)

    assert sample(logits, draws("cpu"), None).tolist() == sample(logits.cuda(), draws("cuda"), None).tolist()

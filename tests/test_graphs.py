"""Graphs without a GPU: a recorder that keeps every torch call and its output tensors, and runs the same calls on the same
memory when it is replayed. What was computed outside a recording stays as it was, which is how a CUDA graph fails."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nybble.engine import graphs
from nybble.engine.batch import Stage
from nybble.engine.config import EngineConfig
from nybble.engine.core import Engine
from nybble.engine.graphs import MixedGraphs, row_buckets, token_buckets, width_buckets
from nybble.engine.kvcache import allocate
from nybble.engine.messages import Delta, SamplingParams, Submit
from nybble.engine.request import Request
from nybble.engine.scheduler import Limits, Plan
from nybble.kernels import attention_triton, cpu, reference, registry
from nybble.kernels.types import LayerKV, Step
from nybble.models import Decoder, dummy_model, read_config

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5,
}  # fmt: skip


class Graph(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            fresh = func(*args, **kwargs)
            for old, new in zip(*((x if isinstance(x, (tuple, list)) else [x]) for x in (out, fresh))):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)


class Recorder:
    def rehearse(self, work: Callable[[], object]) -> None:
        work()

    def graph(self, work: Callable[[], object]) -> Graph:
        graph = Graph()
        with graph:
            work()
        return graph


@pytest.fixture(scope="module")
def model() -> Decoder:
    def attention(*args: Any) -> torch.Tensor:
        seen = reference.attention(*args[:5])
        return args[5][: len(seen)].copy_(seen) if len(args) > 5 else seen

    def rope_write(qkv: torch.Tensor, kv: LayerKV, step: Step, *others: Any) -> torch.Tensor:
        # to the cache's last slot, which the test does not use: a mask would make shapes that the next step has not
        last = kv.k.shape[0] * kv.block_size - 1
        return reference.rope_write(qkv, kv, replace(step, slots=torch.where(step.slots < 0, last, step.slots)), *others)

    with pytest.MonkeyPatch.context() as patch:  # nothing but torch calls
        patch.setattr(cpu, "ops", lambda: None)
        patch.setattr(cpu, "kernels", lambda: ())
        patch.setattr(reference, "OPS", replace(reference.OPS, attention=attention, rope_write=rope_write))
        made = dummy_model(SHAPE, "w4a8", "cpu", seed=5)
        assert {row["kernel"] for row in made.explain()} <= {kernel.name for kernel in reference.KERNELS}
        assert registry.ops_for(torch.device("cpu")) is reference.OPS
    return made


def answers(engine: Engine) -> dict[str, list[int]]:
    rng, tokens = random.Random(0), defaultdict(list)
    for i in range(9):
        prompt = [rng.randrange(300) for _ in range(rng.choice([1, 5, 40, 90]))]
        engine.submit(Submit(str(i), prompt, SamplingParams(temperature=0, max_tokens=rng.randint(2, 12))))
    while engine.has_work:
        for delta in engine.step():
            assert isinstance(delta, Delta)
            assert delta.finish_reason != "error", delta.error
            tokens[delta.request_id] += delta.token_ids
    return tokens


def test_mixed_steps_from_graphs_give_the_same_tokens(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "borrowed", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    config = EngineConfig(kv="int8", block_size=16, max_batch=4, max_batched_tokens=70, num_blocks=60)
    plain = Engine(model, config)
    recorded = Engine(model, config)
    runner = recorded.runner
    runner._mixed = MixedGraphs(runner._pieces, Recorder(), 70)
    runner._record([], runner._mixed.tokens[::-1])
    replayed = []
    run = runner._mixed.run
    runner._mixed.run = lambda step: replayed.append(len(step.token_ids)) or run(step)
    assert answers(recorded) == answers(plain)
    assert set(replayed) == {32, 64, 70}


@pytest.mark.parametrize(("kv", "contexts"), [("int8", (300, 70, 5)), ("bf16", (3000, 70)), ("int4", (40,)), ("fp8", (900, 9))])
def test_launches_repeated_for_a_layer_are_its_own(monkeypatch: pytest.MonkeyPatch, kv: str, contexts: tuple) -> None:
    """Kernels that only take notes: Triton's launch of what `kernel[grid]` returned takes the same arguments, or addresses."""
    notes: list[tuple] = []

    class Notes:
        def __init__(self, name: str) -> None:
            self.name, self.arg_names = name, getattr(attention_triton, name).arg_names

        def __getitem__(self, grid: tuple) -> Any:
            def launched(*arguments: Any, **options: Any) -> Notes:
                assert len(arguments) == len(self.arg_names)
                notes.append((self.name, grid, arguments))
                return self

            return launched

    for name in ("_decode", "_combine", "_gather", "_prompt"):
        monkeypatch.setattr(attention_triton, name, Notes(name))
    monkeypatch.setattr(attention_triton, "_SCRATCH_BYTES", 1 << 12)  # work in slices, whose tensors are parts of others
    step = Stage(600, 8, 8, 4096, 16, torch.device("cpu")).pack(plan_of(contexts, 90)).step
    layers = allocate(read_config(SHAPE | {"num_hidden_layers": 3}), kv, 260, 16, "cpu",
                      [(1.0, 1.0), (0.5, 2.0), (0.25, 0.1)] if kv == "fp8" else None)
    queries = [torch.zeros(len(step.token_ids), 4, layers[0].v.shape[-1] * (2 if kv == "int4" else 1)) for _ in layers]
    out, before = torch.empty_like(queries[0]), {}

    def made(q: torch.Tensor, cache: LayerKV, *before: dict) -> list[tuple]:
        notes.clear()
        attention_triton.attention(q, cache, step, 0.1, 0, out, *before)
        own = {t.data_ptr() for t in vars(step).values() if isinstance(t, torch.Tensor)}
        spans = [(t.data_ptr(), t.nbytes) for t in (q, out, cache.k, cache.v, cache.k_params, cache.v_params) if t is not None]

        def plain(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            at = x.data_ptr()
            return at if at in own or any(first <= at < first + size for first, size in spans) else "scratch"

        return [(name, grid, [plain(x) for x in arguments]) for name, grid, arguments in notes]

    first = made(queries[0], layers[0], before)
    assert first == made(queries[0], layers[0])
    names = [name for name, _, _ in first]
    assert {"_decode", "_gather", "_prompt"} <= set(names)
    if len(contexts) == 2:  # long ones: in slices
        assert names.count("_decode") == names.count("_combine") == 2
    for q, cache in zip(queries[1:], layers[1:]):
        repeated = made(q, cache, before)
        assert repeated == made(q, cache)
        assert repeated != first
    assert len(before) == 2  # one layer's launches, and the memory they work in


def test_launches_of_layers_that_differ_work_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would keep its own until the step has ended."""
    made: list[torch.Tensor] = []

    class Kernel:
        arg_names = ()

        def __getitem__(self, grid: tuple) -> Any:
            return lambda *arguments, **options: self

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        made.append(torch.zeros(*size, **options))
        return made[-1]

    for name in ("_decode", "_combine", "_gather", "_prompt"):
        monkeypatch.setattr(attention_triton, name, Kernel())
    monkeypatch.setattr(attention_triton, "_SCRATCH_BYTES", 12000)  # slices of two rows, the last of one
    step = Stage(600, 8, 8, 4096, 16, torch.device("cpu")).pack(plan_of((3000, 70, 9), 90)).step
    [layer] = allocate(read_config(SHAPE | {"num_hidden_layers": 1}), "fp8", 260, 16, "cpu")
    q, before = torch.zeros(len(step.token_ids), 4, layer.v.shape[-1]), {}
    out = torch.empty_like(q)
    monkeypatch.setattr(torch, "empty", empty)
    for window in (0, 4000, 5000):
        attention_triton.attention(q, layer, step, 0.1, window, out, before)
        assert len(made) == 3  # partial sums, their maxima, a prompt's K and V


@pytest.mark.parametrize("max_batch", [1, 4])
def test_what_is_measured_has_generated_tokens_of_the_longest_context_beside_a_prompt(model: Decoder, max_batch: int) -> None:
    """Their partial sums are memory that no step of prompts alone takes."""
    config = EngineConfig(kv="int8", block_size=16, max_batch=max_batch, max_batched_tokens=70, num_blocks=60)
    runner, plans = Engine(model, config).runner, []
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)
    runner._largest_step(Limits(60, 16, max_batch, 70, True), 70)
    assert all(plan.num_tokens == 70 for plan in plans)
    assert [plan.num_decode for plan in plans] == [0] + [max_batch - 1] * (max_batch > 1)
    if max_batch > 1:
        ends = [start + count for start, count in zip(plans[1].starts, plans[1].counts)]
        assert ends[0] == ends[-1] == runner.max_context


def plan_of(contexts: tuple[int, ...], prompt: int) -> Plan:
    """Rows that generate at these contexts, and a prompt."""
    requests, free = [], iter(range(260))
    for slot, length in enumerate((*contexts, prompt)):
        request = Request("", slot, [1] * length, SamplingParams(max_tokens=None), 4096, frozenset(), 0)
        request.slot, request.admission, request.num_tokens = slot, 1, length + 1
        request.blocks = [next(free) for _ in range(-(-length // 16))]
        requests.append(request)
    rows = len(contexts)
    return Plan(requests, [n - 1 for n in contexts] + [0], [1] * rows + [prompt], rows, list(range(rows + 1)))


def test_every_step_has_a_bucket() -> None:
    for most in (1, 7, 64, 200, 2048, 5000):
        for buckets in (row_buckets(most), width_buckets(most), token_buckets(most)):
            assert buckets == sorted(set(buckets))
            assert buckets[-1] == most


def test_a_decode_step_keeps_its_greedy_tokens_in_the_pool(model: Decoder) -> None:
    engine = Engine(model, EngineConfig(kv="int8", block_size=16, max_batch=4, num_blocks=20))
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    for i, prompt in enumerate(prompts):
        engine.submit(Submit(str(i), prompt, SamplingParams(temperature=0, max_tokens=9)))
    engine.step()
    plan, runner = engine.scheduler.plan(), engine.runner
    assert plan is not None
    known = torch.tensor([request.tokens[-1] for request in plan.requests] + [0, 0])
    with torch.inference_mode():
        batch = runner._stage.pack(plan, rows=4, width=8)
        assert (batch.step.token_ids[:2] < 0).all()  # the pool has them
        wanted = model.forward(replace(batch.step, token_ids=known), runner.kv)
        logits, tokens = runner._decode_step(batch.step, batch.slots)
    assert torch.equal(logits, wanted)
    slots = [request.slot for request in plan.requests]
    assert runner._pool[slots].tolist() == tokens[:2].tolist() == wanted[:2].argmax(-1).tolist()

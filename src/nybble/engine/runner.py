"""Runs plans with a model on a device: stage, forward, sample. Tokens stay on the device; the host reads them when it likes.

What a request drew last lies in the token pool at its slot, so a step can be launched before the host has seen the tokens of
the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nybble.engine.batch import Batch, Stage
from nybble.engine.config import DEFAULT_KV, EngineConfig, Sampled
from nybble.engine.graphs import DecodeGraphs
from nybble.engine.kvcache import MemoryPlan, allocate, bytes_per_token, kv_budget
from nybble.engine.messages import SamplingParams, TokenLogprob
from nybble.engine.request import Request
from nybble.engine.sampler import Counts, greedy, logprobs, sample
from nybble.engine.scheduler import Limits, Plan
from nybble.kernels.types import Step

# Graphs share one pool of intermediates; each adds its own launch records.
GRAPH_BYTES = 256 << 20


class ModelRunner:
    """Owns the KV cache, the token pool, penalty counts and graphs of one model on its device.

    model: `models.Decoder` (`config`, `device`, `dtype`, `forward(step, kv) -> float32 [S, V]`). Raises ValueError when the
    memory does not hold one block, naming what to change.
    """

    def __init__(self, model: Any, config: EngineConfig,
                 kv_scales: Sequence[tuple[float, float] | None] | None = None) -> None:
        shape, device = model.config, torch.device(model.device)
        cuda = device.type == "cuda"
        kv = config.kv or DEFAULT_KV
        self.model, self.device, self.block_size = model, device, config.block_size
        self.vocab_size = shape.vocab_size
        self.bytes_per_token = bytes_per_token(shape, kv)
        self.overlap = cuda if config.overlap is None else config.overlap
        self.max_batched_tokens = max(config.max_batched_tokens or (2048 if cuda else 256), config.max_batch)
        if config.max_context is not None and config.max_context > shape.max_position:
            raise ValueError(
                f"max_context = {config.max_context}: the model was made for {shape.max_position} positions; ask for no more"
            )
        self.max_context = config.max_context or shape.max_position
        limits = Limits(1, config.block_size, config.max_batch, self.max_batched_tokens, config.chunked_prefill)
        self._pool = torch.zeros(config.max_batch + 1, dtype=torch.int64, device=device)
        self._counts = Counts(config.max_batch, self.vocab_size, device)
        self._counted = [0] * config.max_batch  # admission whose tokens a slot's counts hold
        tokens = self.max_batched_tokens + (0 if config.chunked_prefill else self.max_context)
        self._stage = Stage(tokens, limits.max_rows, config.max_batch, self.max_context, config.block_size, device)
        self._graphs: DecodeGraphs | None = None

        weights = torch.cuda.memory_allocated(device) if cuda else 0
        cache = lambda blocks: allocate(shape, kv, blocks, config.block_size, device, scales=kv_scales)  # noqa: E731
        workspace = self._measure(limits, tokens, cache) if cuda else 0
        block_bytes = self.bytes_per_token * config.block_size
        self.num_blocks = config.num_blocks or kv_budget(config.kv_memory, device, workspace) // block_bytes
        if config.num_blocks is None and not cuda and config.kv_memory is None:
            # On a CPU memory is shared: no more than every running request at full length can use.
            self.num_blocks = min(self.num_blocks, config.max_batch * self._stage.width)
        if self.num_blocks < 1:
            raise ValueError(f"kv_memory holds no block: one takes {block_bytes} bytes; raise it or lower block_size")
        self.max_context = min(self.max_context, self.num_blocks * config.block_size)
        self.kv = cache(self.num_blocks)
        self.memory = MemoryPlan(weights, workspace, self.num_blocks * block_bytes, self.num_blocks, config.block_size,
                                 self.bytes_per_token)
        if cuda and config.graphs is not False:
            self._graphs = DecodeGraphs(self._forward_from_pool, config.max_batch, self._stage.width)
            self._record(self._graphs)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[[], Sampled]:
        """Queue a step on the device. The returned function waits for its tokens."""
        requests = [plan.requests[row] for row in plan.samples]
        for request in requests:
            if request.penalized and self._counted[request.slot] != request.admission:
                self._counted[request.slot] = request.admission
                prompt = request.num_prompt
                self._counts.reset(request.slot, request.tokens[:prompt], request.tokens[prompt:])
        if self._graphs is not None and plan.num_decode == len(plan.requests) == len(plan.samples):
            batch = self._stage.pack(plan, *self._graphs.shape_for(len(plan.requests), self._stage.width_for(plan)))
            logits = self._graphs.run(batch.step)[: len(requests)]
        else:
            batch = self._stage.pack(plan)
            if not requests:
                self.model.hidden(batch.step, self.kv)
                return lambda: Sampled([])
            logits = self._forward_from_pool(batch.step) if batch.from_pool else self.model.forward(batch.step, self.kv)
        return self._sample(logits, batch, requests)

    def _forward_from_pool(self, step: Step) -> Tensor:
        """Token ids below 0 are read from the pool; a failed draw there (-1) reads as token 0, its row is not used."""
        ids = step.token_ids
        ids = torch.where(ids < 0, self._pool[(-1 - ids).clamp_min(0)].clamp_min(0), ids)
        return self.model.forward(replace(step, token_ids=ids), self.kv)

    def _sample(self, logits: Tensor, batch: Batch, requests: list[Request]) -> Callable[[], Sampled]:
        if batch.draws is None:
            tokens = greedy(logits)
        else:
            tokens = sample(logits, batch.draws, self._counts)
            if batch.draws.penalized is not None:
                rows = batch.draws.penalized
                self._counts.add(batch.slots[rows], tokens[rows])
        self._pool[batch.slots] = tokens
        results = [tokens]
        if batch.logprob_rows:
            rows = self._stage.index(batch.logprob_rows)
            results.extend(logprobs(logits[rows], tokens[rows], batch.logprob_count))
        wait = self._to_host(results)

        def sampled() -> Sampled:
            drawn, *extra = wait()
            if not extra:
                return Sampled(drawn)
            entries: list[TokenLogprob | None] = [None] * len(drawn)
            for row, chosen, values, ids in zip(batch.logprob_rows, *extra):
                count = requests[row].params.logprobs
                entries[row] = TokenLogprob(drawn[row], chosen, list(zip(ids, values))[:count])
            return Sampled(drawn, entries)

        return sampled

    def _to_host(self, tensors: list[Tensor]) -> Callable[[], list[list]]:
        if self.device.type != "cuda":
            return lambda: [tensor.tolist() for tensor in tensors]
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(hosts, tensors):
            host.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait() -> list[list]:
            done.synchronize()
            return [host.tolist() for host in hosts]

        return wait

    @torch.inference_mode()
    def _record(self, graphs: DecodeGraphs) -> None:
        """All decode graphs there can be, before the first request, so that no user's step waits for one. The one row that
        is not padding writes to block 0, which nobody owns yet."""
        request = Request("", 0, [0], SamplingParams(max_tokens=None), 2, frozenset(), 0)
        request.slot, request.admission, request.num_tokens, request.blocks = 0, -1, 2, [0]
        plan = Plan([request], [0], [1], 1, [0])
        for width in graphs.widths:
            for rows in reversed(graphs.rows):
                graphs.run(self._stage.pack(plan, rows, width).step)
        torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def _measure(self, limits: Limits, num_tokens: int, cache: Callable[[int], list]) -> int:
        """Bytes that the largest step needs beside weights and cache: run it, with everything the sampler can do."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1, logprobs=20, max_tokens=None)
        requests, left = [], num_tokens
        for slot in range(limits.max_batch):
            length = max(1, min(left - (limits.max_batch - slot - 1), self.max_context - 1))
            request = Request("", slot, [0] * length, params, self.max_context, frozenset(), 0)
            request.slot, request.admission, request.num_tokens = slot, -1, length + 1
            request.blocks = [0] * -(-length // limits.block_size)
            requests.append(request)
            left -= length
        lengths = [request.num_prompt for request in requests]
        self.kv = cache(1)
        self.launch(Plan(requests, [0] * len(requests), lengths, 0, list(range(len(requests)))))()
        del self.kv
        used = torch.cuda.max_memory_allocated(self.device) - before + GRAPH_BYTES
        torch.cuda.empty_cache()
        return used

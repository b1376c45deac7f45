"""Runs plans with a model on a device: stage, forward, sample. Tokens stay on the device; the host reads them when it likes.

What a request drew last lies in the token pool at its slot, so a step can be launched before the host has seen the tokens of
the step before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nybble.engine.batch import Batch, Stage, Staged
from nybble.engine.config import DEFAULT_KV, EngineConfig, Sampled
from nybble.engine.graphs import DecodeGraphs, MixedGraphs, Recorder
from nybble.engine.kvcache import MemoryPlan, allocate, bytes_per_token, kv_budget
from nybble.engine.messages import SamplingParams, TokenLogprob
from nybble.engine.request import Request
from nybble.engine.sampler import Counts, greedy, index, logprobs, sample
from nybble.engine.scheduler import Limits, Plan
from nybble.formats.spec import PER_TOKEN_INT8
from nybble.kernels import selftest
from nybble.kernels.types import LayerKV, Step
from nybble.models.decoder import Pieces, attend
from nybble.nn.parallel import Group

GRAPH_SLACK_BYTES = 64 << 20  # on top of what is measured: kernels that are loaded later
SCORED_ROWS = 64  # logits at a time, or as many as a step draws from
LONGEST_STEP_MS = 1000.0  # a longer one was a pause between requests


def tokens_triton() -> ModuleType:
    """Imported here, so that a CPU never loads Triton."""
    from nybble.kernels import tokens_triton

    return tokens_triton


def _scores(plan: Plan) -> bool:
    """Whether log-probabilities of a prompt are wanted, beyond its first token."""
    return any(plan.requests[row].prompt_logprobs is not None and plan.starts[row] + 1 < plan.requests[row].num_prompt
               for row in range(plan.num_decode, len(plan.requests)))


class ModelRunner:
    """Owns the KV cache, the token pool, penalty counts and graphs of one model on its device.

    model: `models.Decoder`. decode_wall_s, decode_busy_s, decode_steps: seconds from the end of a step to the end of a decode
    step right after it, seconds of them in which the device worked, and how many there were; 0 on a CPU. Raises ValueError when
    the memory does not hold one block, naming what to change. tell: sends steps to the other ranks, whose runners `follow`.
    Those draw greedy tokens as this one does, and copy its token pool after any other.
    """

    def __init__(self, model: Any, config: EngineConfig,
                 kv_scales: Sequence[tuple[float, float] | None] | None = None) -> None:
        shape, device = model.config, torch.device(model.device)
        cuda = device.type == "cuda"
        kv = config.kv or DEFAULT_KV
        self.model, self.device, self.block_size = model, device, config.block_size
        self.group: Group = model.group
        self.tell: Callable[[Staged], None] | None = None
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
        self._decode: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._recording = torch.cuda.Stream(device) if cuda else None
        self._last: torch.cuda.Event | None = None  # end of the step before, when it was a decode step
        self.decode_wall_s = self.decode_busy_s = 0.0
        self.decode_steps = 0

        weights = torch.cuda.memory_allocated(device) if cuda else 0
        cache = lambda blocks: allocate(shape, kv, blocks, config.block_size, device, scales=kv_scales)  # noqa: E731
        if cuda:
            self._check_attention(cache(1)[0], config.max_batch)
        workspace = self._measure(limits, tokens, cache) if cuda else 0
        records = cuda and config.graphs is not False
        graphs = self._measure_graphs(config.max_batch, cache) if records else 0
        block_bytes = self.bytes_per_token * config.block_size
        self.num_blocks = config.num_blocks or kv_budget(config.kv_memory, device, workspace + graphs) // block_bytes
        self.num_blocks = self.group.least(self.num_blocks)
        if config.num_blocks is None and not cuda and config.kv_memory is None:
            # On a CPU memory is shared: no more than every running request at full length can use.
            self.num_blocks = min(self.num_blocks, config.max_batch * self._stage.width)
        if self.num_blocks < 1:
            raise ValueError(f"kv_memory holds no block: one takes {block_bytes} bytes; raise it or lower block_size")
        self.max_context = min(self.max_context, self.num_blocks * config.block_size)
        self.kv = cache(self.num_blocks)
        if records:
            before = self._taken()
            self._record(*self._open_graphs(config.max_batch))
            graphs = self._more_than(before)
        if cuda:
            self._largest_step(limits, tokens)  # and torch keeps what it took: nobody else can have it
        self.memory = MemoryPlan(weights, workspace, graphs, self.num_blocks * block_bytes, self.num_blocks, config.block_size,
                                 self.bytes_per_token)

    def _check_attention(self, kv: LayerKV, max_batch: int) -> None:
        """Raises RuntimeError when attention over caches like this one is off on this device."""
        attention = self.model.layers[0].attention
        if attention.ops.compile_decode is not None:
            quantize = attention.o.takes == PER_TOKEN_INT8 if attention.plain(kv) else None
            attention.ops.compile_decode(kv, self.model.config.num_heads, self.model.dtype, max_batch, quantize)
        for window in set(self.model.config.windows):
            selftest.check_attention(attention.ops, kv, self.model.config.num_heads, window, self.model.dtype)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[..., Any]:
        """Queue a step on the device. The returned function waits for its tokens; of a step with grammars, see `Runner`."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self._pool.device)  # of this thread: several may use one engine in turn
        requests = [plan.requests[row] for row in plan.samples]
        rows, decodes = len(requests), plan.num_decode == len(plan.requests) == len(plan.samples)
        if decodes and self._decode is not None:
            batch, graph = self._stage.pack(plan, *self._decode.shape_for(rows, self._stage.width_for(plan))), "decode"
        else:
            graphs = self._mixed is not None and plan.num_decode < len(plan.requests) and not _scores(plan)
            padded = self._mixed.tokens_for(plan.num_tokens) if graphs else None
            batch, graph = self._stage.pack(plan, tokens=padded), "" if padded is None else "mixed"
        if self.tell is not None:
            self.tell(self._stage.staged(batch, graph))
        begin = self._mark()
        logits, tokens, scored = self._run(batch, graph, plan)
        if scored is not None:
            batch = replace(batch, scored=scored)
        logits, tokens = (result if result is None else result[:rows] for result in (logits, tokens))
        if not requests:
            self._last = None
            return lambda: Sampled([], None, scored() if scored else ())
        if batch.draws is not None and batch.draws.penalized is not None:
            self._count(requests)  # now: one that ends before a grammar lets it draw has no slot then
        rest = (logits, tokens, batch, requests, begin if decodes else None)
        grammars = batch.draws is not None and any(one.grammar is not None for one in requests)
        return partial(self._draw, *rest) if grammars else self._sample(*rest)

    @torch.inference_mode()
    def follow(self, staged: Staged) -> None:
        """Run a step that rank 0 has packed."""
        batch = self._stage.repeat(staged)
        logits, tokens, _ = self._run(batch, staged.graph)
        if staged.drawn:
            self._share_pool()
        elif logits is not None and tokens is None:
            self._greedy(logits, batch.slots)

    def _run(self, batch: Batch, graph: str,
             plan: Plan | None = None) -> tuple[Tensor | None, Tensor | None, Callable[[], list] | None]:
        """-> logits, greedy tokens and what waits for the plan's `Sampled.scored`, or None what is not computed."""
        if graph == "decode":
            return *self._decode.run(batch.step, batch.slots), None
        step, drawn, scored = batch.step, len(batch.slots), None
        if graph:
            x, residual = self._mixed.run(step)
        elif plan is None or not _scores(plan):
            x, residual = attend(self._pieces(step), step)
        else:
            x, residual = attend(self._pieces(replace(step, logit_rows=None)), step)
            scored = self._score(x, residual, plan)
            x, residual = x[step.logit_rows], residual[step.logit_rows]
        return self.model.logits(self.model.final(x[:drawn], residual[:drawn])) if drawn else None, None, scored

    def _score(self, x: Tensor, residual: Tensor, plan: Plan) -> Callable[[], list]:
        """Prompt rows that want log-probabilities, some logits at a time."""
        spans: list[tuple[int, int, int]] = []  # row, position of its first target, how many
        rows, targets, count, first = [], [], 0, plan.num_decode
        for row in range(plan.num_decode, len(plan.requests)):
            request, start, tokens = plan.requests[row], plan.starts[row], plan.counts[row]
            if request.prompt_logprobs is not None:
                following = request.tokens[start + 1 : min(start + tokens + 1, request.num_prompt)]
                spans.append((row, start + 1, len(following)))
                rows += range(first, first + len(following))
                targets += following
                count = max(count, request.params.prompt_logprobs)
            first += tokens
        parts = []
        for some, following in zip(*(index(whole, self.device).split(max(SCORED_ROWS, len(self._counted)))
                                     for whole in (rows, targets))):
            logits = self.model.logits(self.model.final(x[some], residual[some]))
            parts.append(logprobs(logits, following, count))
        wait = self._to_host([torch.cat(part) for part in zip(*parts)], None)

        def scored() -> list[tuple[int, int, list[TokenLogprob]]]:
            every, out = zip(targets, *wait()), []
            for row, position, length in spans:
                most = plan.requests[row].params.prompt_logprobs
                out.append((row, position, [TokenLogprob(token, chosen, list(zip(ids, values))[:most])
                                            for token, chosen, values, ids in islice(every, length)]))
            return out

        return scored

    @property
    def lost(self) -> str | None:
        """Why no step can be run any more."""
        return self.group.lost

    def _share_pool(self) -> None:
        if self.group.size > 1:
            self._pool.copy_(self.group.gather(self._pool)[0])

    @torch.inference_mode()
    def _draw(self, logits: Tensor, tokens: Tensor | None, batch: Batch, requests: list[Request],
              begin: torch.cuda.Event | None, rows: list[int], masks: np.ndarray) -> Callable[[], Sampled]:
        """The rest of a step with grammars. rows: of `requests`, each with a row of masks, int32 [len(rows), V/32 or more]."""
        words = torch.from_numpy(masks)
        if self.device.type == "cuda":
            words = words.pin_memory().to(self.device, non_blocking=True)
        draws = replace(batch.draws, allowed=(index(rows, self.device), words) if rows else None)
        return self._sample(logits, tokens, replace(batch, draws=draws), requests, begin)

    def _pieces(self, step: Step) -> Pieces:
        """Token ids below 0 are read from the pool; a failed draw there (-1) reads as token 0, its row is not used. A generator
        to its first line: a graph has to record that too."""
        ids, pool = step.token_ids, self._pool
        if self.device.type == "cuda":
            ids = tokens_triton().resolve(ids, pool)
        else:
            ids = torch.where(ids < 0, pool[(-1 - ids).clamp_min(0)].clamp_min(0), ids)
        return (yield from self.model.pieces(replace(step, token_ids=ids), self.kv))

    def _decode_step(self, step: Step, slots: Tensor) -> tuple[Tensor, Tensor]:
        """-> logits [S, V] of all rows, and the greedy tokens [S], which the pool has then."""
        step = replace(step, logit_rows=None)
        logits = self.model.logits(self.model.final(*attend(self._pieces(step), step)))
        return logits, self._greedy(logits, slots)

    def _greedy(self, logits: Tensor, slots: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tokens_triton().greedy_into(logits, slots, self._pool)
        return self._keep(slots, greedy(logits))

    def _keep(self, slots: Tensor, tokens: Tensor) -> Tensor:
        self._pool.index_copy_(0, slots, tokens)
        return tokens

    def _sample(self, logits: Tensor, tokens: Tensor | None, batch: Batch, requests: list[Request],
                begin: torch.cuda.Event | None) -> Callable[[], Sampled]:
        """tokens: greedy ones, if they are known. begin: of a step whose time is to be counted."""
        slots = batch.slots[: len(requests)]
        if batch.draws is not None:
            tokens = self._keep(slots, sample(logits, batch.draws, self._counts))
            self._share_pool()
            if batch.draws.penalized is not None:
                rows = batch.draws.penalized
                self._counts.add(slots[rows], tokens[rows])
        elif tokens is None:
            tokens = self._greedy(logits, slots)
        results = [tokens]
        if batch.logprob_rows:
            rows = index(batch.logprob_rows, self.device)
            results.extend(logprobs(logits[rows], tokens[rows], batch.logprob_count))
        wait = self._to_host(results, begin)

        def sampled() -> Sampled:
            drawn, *extra = wait()
            scored = batch.scored() if batch.scored else ()
            if not extra:
                return Sampled(drawn, None, scored)
            entries: list[TokenLogprob | None] = [None] * len(drawn)
            for row, chosen, values, ids in zip(batch.logprob_rows, *extra):
                count = requests[row].params.logprobs
                entries[row] = TokenLogprob(drawn[row], chosen, list(zip(ids, values))[:count])
            return Sampled(drawn, entries, scored)

        return sampled

    def _count(self, requests: list[Request]) -> None:
        """What penalties look at, of requests that are new in their slots."""
        for request in requests:
            if request.penalized and self._counted[request.slot] != request.admission:
                self._counted[request.slot] = request.admission
                prompt = request.num_prompt
                self._counts.reset(request.slot, request.tokens[:prompt], request.tokens[prompt:])

    def _mark(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _to_host(self, tensors: list[Tensor], begin: torch.cuda.Event | None) -> Callable[[], list[list]]:
        if self.device.type != "cuda":
            return lambda: [tensor.tolist() for tensor in tensors]
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(hosts, tensors):
            host.copy_(tensor, non_blocking=True)
        done, (before, self._last) = self._mark(), (self._last, None)
        if begin is not None:
            self._last = done

        def wait() -> list[list]:
            done.synchronize()
            self.group.check()
            if before is not None and begin is not None and (period_ms := before.elapsed_time(done)) < LONGEST_STEP_MS:
                self.decode_wall_s += period_ms / 1e3
                self.decode_busy_s += min(begin.elapsed_time(done), period_ms) / 1e3
                self.decode_steps += 1
            return [host.tolist() for host in hosts]

        return wait

    @torch.inference_mode()
    def _record(self, decode: Iterable[tuple[int, int]], mixed: Iterable[int]) -> None:
        """Graphs for decode steps of these (rows, width) and mixed steps of these numbers of tokens, before the first request.
        The one row that is not padding writes to block 0, which nobody owns yet."""
        request = Request("", 0, [0], SamplingParams(max_tokens=None), 2, frozenset(), 0)
        request.slot, request.admission, request.num_tokens, request.blocks = 0, -1, 2, [0]
        for rows, width in decode:
            batch = self._stage.pack(Plan([request], [0], [1], 1, [0]), rows, width)
            self._decode.record(batch.step, batch.slots)
        for tokens in mixed:
            step = self._stage.pack(Plan([request], [0], [1], 0, [0]), tokens=tokens).step
            self._mixed.record(step)
        torch.cuda.synchronize(self.device)

    def _open_graphs(self, max_batch: int) -> tuple[list[tuple[int, int]], list[int]]:
        """Fresh graphs, and all that there can be, the largest first."""
        recorder = Recorder(self._recording)
        self._decode = DecodeGraphs(self._decode_step, recorder, max_batch, self._stage.width)
        self._mixed = MixedGraphs(self._pieces, recorder, self.max_batched_tokens)
        rows, widths = self._decode.rows, self._decode.widths
        return [(r, w) for w in reversed(widths) for r in reversed(rows)], self._mixed.tokens[::-1]

    def _measure_graphs(self, max_batch: int, cache: Callable[[int], list]) -> int:
        """Bytes that all graphs will take: of each kind record the largest, then three more, over a cache of one block."""
        self.kv, total = cache(1), GRAPH_SLACK_BYTES
        for kind in range(2):
            shapes = self._open_graphs(max_batch)[kind]
            for some, of in ((shapes[:1], 1), (shapes[1:4], len(shapes) - 1)):
                before = self._taken()
                self._record(*((some, []) if kind == 0 else ([], some)))
                total += self._more_than(before) * of // max(1, len(some))
            self._decode = self._mixed = None
        del self.kv
        gc.collect()
        return total

    def _taken(self) -> tuple[int, int]:
        """Bytes that torch has, and that are not free on the device (the driver also gives some back, as it likes)."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_reserved(self.device), total - free

    def _more_than(self, before: tuple[int, int]) -> int:
        return max(0, *(now - then for now, then in zip(self._taken(), before)))

    def _measure(self, limits: Limits, num_tokens: int, cache: Callable[[int], list]) -> int:
        """Bytes that the largest step needs beside weights, cache and graphs."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.kv = cache(1)
        self._largest_step(limits, num_tokens)
        del self.kv
        used = torch.cuda.max_memory_allocated(self.device) - before
        torch.cuda.empty_cache()
        return used

    def _largest_step(self, limits: Limits, num_tokens: int) -> None:
        """Prompts of so many tokens in every slot, with everything the sampler can do; then one beside generated tokens in all
        other slots, one of the longest context, which makes all partial sums large. They write to block 0 and want
        log-probabilities of prompts, for which no graphs are used."""
        params = SamplingParams(top_k=50, top_p=0.9, min_p=0.01, presence_penalty=0.1, logit_bias={0: 1.0}, logprobs=20,
                                prompt_logprobs=20, max_tokens=None)
        requests, left = [], num_tokens
        for slot in range(limits.max_batch):
            length = max(1, min(left - (limits.max_batch - slot - 1), self.max_context - 1))
            request = Request("", slot, [0] * length, params, self.max_context, frozenset(), 0)
            request.slot, request.admission, request.num_tokens = slot, -1, length + 1
            request.blocks = [0] * -(-length // limits.block_size)
            requests.append(request)
            left -= length
        lengths = [request.num_prompt for request in requests]
        self.launch(Plan(requests, [0] * len(requests), lengths, 0, list(range(len(requests)))))()
        prompt, *others = requests
        if others:
            prompt.tokens = [0] * self.max_context
            count = min(num_tokens - len(others), self.max_context)
            starts = [self.max_context - 1, *[0] * (len(others) - 1), self.max_context - count]
            self.launch(Plan([*others, prompt], starts, [1] * len(others) + [count], len(others), []))()

"""Every step that a scheduler plans, packed by one stage, against what the requests themselves say."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nybble.engine.batch import Batch, Stage
from nybble.engine.messages import SamplingParams
from nybble.engine.request import Request
from nybble.engine.sampler import random_keys
from nybble.engine.scheduler import Limits, Plan, Scheduler

BLOCK = 4


def check(batch: Batch, plan: Plan, texts: dict[str, list[int]], pool: list[int]) -> None:
    """texts: all tokens of each request, also those that the host has not seen. pool: what each slot drew last."""
    step, tokens = batch.step, [(row, at) for row, (start, count) in enumerate(zip(plan.starts, plan.counts))
                                for at in range(start, start + count)]  # fmt: skip
    requests = plan.requests
    ids = [pool[-1 - token] if token < 0 else token for token in step.token_ids.tolist()[: len(tokens)]]
    assert ids == [texts[requests[row].request_id][at] for row, at in tokens]
    assert step.positions.tolist()[: len(tokens)] == [at for _, at in tokens]
    cells = [requests[row].blocks[at // BLOCK] * BLOCK + at % BLOCK for row, at in tokens]
    assert step.slots.tolist() == cells + [-1] * (len(step.slots) - len(tokens))
    ends = [start + count for start, count in zip(plan.starts, plan.counts)]
    assert step.context_len.tolist()[: len(ends)] == ends
    assert step.query_start.tolist()[: len(ends) + 1] == [sum(plan.counts[:row]) for row in range(len(ends) + 1)]
    for table, request, end in zip(step.block_table.tolist(), requests, ends):
        assert table[: -(-end // BLOCK)] == request.blocks[: -(-end // BLOCK)]
    longest = max(ends[plan.num_decode :], default=0)
    assert longest <= (step.max_prompt_context or 0) < 2 * longest + BLOCK
    assert step.max_context >= max(ends)
    assert step.max_query == max(plan.counts[plan.num_decode :], default=0)
    last = [sum(plan.counts[: row + 1]) - 1 for row in plan.samples]
    assert step.logit_rows.tolist()[: len(last)] == last
    drawing, draws = [requests[row] for row in plan.samples], batch.draws
    assert batch.slots.tolist()[: len(drawing)] == [request.slot for request in drawing]
    assert (draws is None) == all(request.plain for request in drawing)
    if draws is not None:
        assert draws.temperature.tolist() == [request.params.temperature for request in drawing]
        assert draws.penalized is None or draws.penalized.tolist() == [i for i, one in enumerate(drawing) if one.penalized]
        assert (draws.penalized is None) == (not any(one.penalized for one in drawing))
        generated = [ends[row] - request.num_prompt for row, request in zip(plan.samples, drawing)]
        keys = random_keys(np.array([request.seed for request in drawing], np.uint64), np.array(generated))
        np.testing.assert_array_equal(draws.keys.numpy(), keys)
        pairs = [] if draws.forbidden is None else list(zip(*(part.tolist() for part in draws.forbidden)))
        assert pairs == [(i, token) for i, one in enumerate(drawing) if generated[i] < one.params.min_tokens
                         for token in one.stop_ids]  # fmt: skip
        wishes = [one.params.logprobs for one in drawing]
        assert batch.logprob_rows == [i for i, wish in enumerate(wishes) if wish is not None]
        assert batch.logprob_count == max(wish or 0 for wish in wishes)


@pytest.mark.parametrize("seed", range(30))
def test_every_planned_step_is_packed_as_its_requests_say(seed: int) -> None:
    rng = random.Random(seed)
    blocks, overlap = rng.choice([14, 60]), seed % 2
    scheduler = Scheduler(Limits(blocks, BLOCK, 6, rng.choice([8, 40]), prefix_caching=seed % 3 > 0))
    stage, pool, texts = Stage(48, 48, 6, 4 * blocks, BLOCK, torch.device("cpu")), [0] * 7, {}
    choices = [{}, {}, {"temperature": 0.5}, {"temperature": 0.25, "presence_penalty": 1.0}, {"logprobs": 2, "min_tokens": 3},
               {"logprobs": 0}]
    waiting = [Request(str(i), 0, [rng.randrange(3) for _ in range(rng.randrange(1, 20))],
                       SamplingParams(**({"temperature": 0.0} | rng.choice(choices[: 1 + seed % 6]))), 0, frozenset({i}), i * 7)
               for i in range(14)]  # fmt: skip
    for request in waiting:
        request.max_tokens_total = request.num_prompt + rng.randrange(1, 25)
        texts[request.request_id] = list(request.tokens)
    in_flight, followed = [], 0
    while waiting or scheduler.running or scheduler.waiting or in_flight:
        if waiting and rng.random() < 0.4:
            scheduler.add(waiting.pop())
        plan = scheduler.plan()
        drawn = []
        if plan is not None:
            decodes = plan.num_decode == len(plan.requests) == len(plan.samples)
            batch = stage.pack(plan, rows=6, width=blocks) if decodes else stage.pack(plan)
            check(batch, plan, texts, pool)
            followed += decodes
            for request in (plan.requests[row] for row in plan.samples):
                pool[request.slot] = rng.randrange(3)
                texts[request.request_id].append(pool[request.slot])
                drawn.append((request, pool[request.slot]))
        accepted, in_flight = (in_flight, drawn) if overlap else (drawn, [])
        for request, token in accepted:
            if request.finish_reason is None:
                scheduler.accept(request, token)
                if len(request.tokens) == request.max_tokens_total:
                    scheduler.finish(request, "length")
    assert followed >= 10

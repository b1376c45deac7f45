"""Blocks and schedules under random attack: nothing is lost, nothing is written twice, everybody is served."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check, check_pool

from nybble.engine.blocks import BlockPool
from nybble.engine.messages import SamplingParams
from nybble.engine.request import Request
from nybble.engine.scheduler import Limits, Plan, Scheduler

SIZE = 4


def request(name: str, prompt: list[int], answer: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=answer)
    return Request(name, 0, prompt, params, len(prompt) + answer, frozenset(), 0)


# ---- blocks -------------------------------------------------------------------------------------------------------


class Holder:
    """What a request does with a pool, without a scheduler: match, take, register what is full, release."""

    def __init__(self, pool: BlockPool, tokens: list[int]) -> None:
        self.blocks, self.chain = pool.match(tokens, len(tokens), len(tokens) - 1)
        self.hits = len(self.blocks)
        self.blocks = self.blocks + pool.take(-(-len(tokens) // SIZE) - self.hits)
        for n in range(self.hits, len(tokens) // SIZE):
            self.chain = pool.register(self.blocks[n], self.chain, tokens, len(tokens), n * SIZE)
        self.computed = len(tokens)


@settings(max_examples=150, deadline=None)
@given(
    num_blocks=st.integers(4, 14),
    caching=st.booleans(),
    moves=st.lists(
        st.tuples(st.sampled_from(["start", "end", "forget"]), st.integers(0, 9), st.integers(1, 16)), max_size=60
    ),
)
def test_every_block_is_free_cached_or_held(num_blocks: int, caching: bool, moves: list[tuple[str, int, int]]) -> None:
    pool = BlockPool(num_blocks, SIZE, caching)
    holders: list[Holder] = []
    for move, which, length in moves:
        if move == "start":
            tokens = [which % 3] * length  # few different prefixes, so that they are shared
            if pool.available >= -(-length // SIZE):
                holders.append(Holder(pool, tokens))
        elif holders:
            pool.release(holders.pop(which % len(holders)).blocks, forget=move == "forget")
        held = {block for holder in holders for block in holder.blocks}
        assert pool.num_free + pool.num_cached + len(held) == num_blocks
        check_pool(pool, ((holder.blocks, holder.computed) for holder in holders))
    for holder in holders:
        pool.release(holder.blocks)
    assert pool.available == num_blocks


def test_a_prefix_is_found_by_its_tokens_and_stops_before_the_last_token() -> None:
    pool = BlockPool(8, SIZE)
    first = Holder(pool, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], 10, 9)[0] == first.blocks[:2]
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8], 8, 7)[0] == first.blocks[:1]  # the 8th token must be computed
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 0, 9], 9, 8)[0] == first.blocks[:1]
    assert pool.match([0, 2, 3, 4, 5, 6, 7, 8, 9], 9, 8)[0] == []
    # the same tokens, some of them generated: other kernels computed them
    assert pool.match([1, 2, 3, 4, 5, 6, 7, 8, 9], 6, 8)[0] == first.blocks[:1]


def test_a_second_block_of_a_prefix_is_not_found_under_another_first() -> None:
    pool = BlockPool(8, SIZE)
    Holder(pool, [1, 1, 1, 1, 5, 5, 5, 5, 0])
    other = Holder(pool, [2, 2, 2, 2, 6, 6, 6, 6, 0])
    assert pool.match([2, 2, 2, 2, 5, 5, 5, 5, 0], 9, 8)[0] == other.blocks[:1]


def test_the_longest_unused_content_is_forgotten_first_and_tails_before_heads() -> None:
    pool = BlockPool(4, SIZE)
    old = Holder(pool, [1] * 8)
    new = Holder(pool, [2] * 8)
    pool.release(old.blocks)
    pool.release(new.blocks)
    assert pool.take(1) == [old.blocks[1]]
    assert pool.match([1] * 9, 9, 8)[0] == old.blocks[:1]
    assert pool.match([2] * 9, 9, 8)[0] == new.blocks
    with pytest.raises(ValueError, match="asked for 1 blocks, 0 of 4"):
        pool.take(1)


def test_check_finds_a_block_with_two_writers() -> None:
    pool = BlockPool(4, SIZE)
    (block,) = pool.take(1)
    check_pool(pool, [([block], 2)])
    with pytest.raises(AssertionError):
        check_pool(pool, [([block], 2), ([block], 2)])
    with pytest.raises(AssertionError):
        check_pool(pool, [])
    pool.release([block])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block])


# ---- schedules ----------------------------------------------------------------------------------------------------


class Device:
    """Checks what a real one would need: every token's K and V are in the blocks that a row reads.

    `cells[block, offset]` is (position, token id, is a prompt token) last written there, in the order in which steps run.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cells: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self.last: dict[int, int] = {}  # slot -> token drawn last
        self.drawn = 0

    def run(self, plan: Plan) -> list[tuple[Request, int]]:
        size = self.scheduler.limits.block_size
        table = [list(r.blocks) for r in plan.requests]
        rows = list(zip(plan.requests, plan.starts, plan.counts, table))
        texts = [self.text(r) for r in plan.requests]
        written: set[tuple[int, int]] = set()
        for row, (r, start, count, blocks) in enumerate(rows):
            if row < plan.num_decode:
                assert count == 1, "a decode row has one token"
                assert start >= r.num_prompt, "a decode row has a generated token"
            else:
                assert start + count <= r.num_prompt, "a prompt row has prompt tokens only"
            for position in range(start, start + count):
                cell = blocks[position // size], position % size
                assert cell not in written, "two rows write one slot"
                written.add(cell)
                self.cells[cell] = position, texts[row][position], position < r.num_prompt
        for row, (r, start, count, blocks) in enumerate(rows):
            for position in range(start + count):
                want = position, texts[row][position], position < r.num_prompt
                assert self.cells[blocks[position // size], position % size] == want, f"{r} reads another's K and V"
        results = []
        for row in plan.samples:
            r, start, count, _ = rows[row]
            assert start + count == r.num_tokens - 1, "only the last token draws"
            self.drawn += 1
            self.last[r.slot] = self.drawn % 3
            results.append((r, self.last[r.slot]))
        return results

    def text(self, r: Request) -> list[int]:
        """The request's tokens, those in flight from the device's own memory."""
        return r.tokens + [self.last[r.slot]] if r.in_flight and r.slot in self.last else r.tokens


def commit(scheduler: Scheduler, results: list[tuple[Request, int]]) -> None:
    for r, token in results:
        if r.finish_reason is None:
            scheduler.accept(r, token)
            if len(r.tokens) >= r.max_tokens_total:
                scheduler.finish(r, "length")


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(5, 24),
    max_batch=st.integers(1, 6),
    extra_budget=st.integers(0, 12),
    chunked=st.booleans(),
    caching=st.booleans(),
    overlap=st.booleans(),
)
def test_every_request_ends_once_and_reads_its_own_cache(
    seed: int, num_blocks: int, max_batch: int, extra_budget: int, chunked: bool, caching: bool, overlap: bool
) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(Limits(num_blocks, SIZE, max_batch, max_batch + extra_budget, chunked, caching))
    device, everybody = Device(scheduler), []
    in_flight: list[tuple[Request, int]] = []
    arrivals = rng.randint(1, 14)
    longest = num_blocks * SIZE
    steps = 0
    while len(everybody) < arrivals or in_flight or not all(r.finish_reason for r in everybody):
        steps += 1
        assert steps < 3000, f"stuck: {scheduler.running} {list(scheduler.waiting)}"
        while len(everybody) < arrivals and rng.random() < 0.5:
            prompt = [rng.choice([7, 8])] * rng.randint(1, min(30, longest - 1))
            r = request(str(len(everybody)), prompt, rng.randint(1, longest - len(prompt)))
            everybody.append(r)
            scheduler.add(r)
        live = [r for r in everybody if r.finish_reason is None]
        if live and rng.random() < 0.05:
            scheduler.finish(rng.choice(live), rng.choice(["abort", "error"]))
        plan = scheduler.plan()
        if plan is not None:
            limit = scheduler.limits.max_batched_tokens
            assert plan.num_tokens <= limit or not chunked
            assert len(plan.requests) <= scheduler.limits.max_rows
            assert plan.num_tokens > 0
        results = device.run(plan) if plan is not None else []
        check(scheduler)
        order = [everybody.index(r) for r in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order), "first come, first served"
        if overlap:
            results, in_flight = in_flight, results
        commit(scheduler, results)
        check(scheduler)
    for r in everybody:
        assert r.finish_reason in ("length", "abort", "error")
        if r.finish_reason == "length":
            assert len(r.tokens) == r.max_tokens_total
    assert scheduler.pool.available == num_blocks
    assert not scheduler.running
    assert not scheduler.waiting


def drain(scheduler: Scheduler) -> list[Plan]:
    device, plans = Device(scheduler), []
    while (plan := scheduler.plan()) is not None:
        plans.append(plan)
        commit(scheduler, device.run(plan))
        check(scheduler)
    return plans


def test_the_latest_arrival_is_preempted_and_computed_again_as_prompt_then_single_tokens() -> None:
    scheduler = Scheduler(Limits(4, SIZE, 2, 64, prefix_caching=False))
    first, second = request("first", [1] * 5, 9), request("second", [2] * 2, 8)
    scheduler.add(first)
    scheduler.add(second)
    plans = drain(scheduler)
    assert scheduler.preemptions == 1
    assert (len(first.tokens), len(second.tokens)) == (14, 10)
    again = [p for p in plans if second in p.requests and p.requests.count(second) > 1]
    assert len(again) == 1
    rows = [(s, c) for r, s, c in zip(again[0].requests, again[0].starts, again[0].counts) if r is second]
    assert rows[-1] == (0, 2)
    assert [(p, 1) for p in range(2, 2 + len(rows) - 1)] == sorted(rows[:-1])


def test_rows_that_generate_come_with_the_longest_context_first() -> None:
    scheduler = Scheduler(Limits(64, SIZE, 4, 64))
    for length in (5, 20, 3, 12):
        scheduler.add(request(str(length), [length] * length, 3))
    prompts, *steps = drain(scheduler)
    assert prompts.counts == [5, 20, 3, 12], "prompts in order of arrival"
    for step, plan in enumerate(steps):
        assert plan.starts == [20 + step, 12 + step, 5 + step, 3 + step]
        assert [r.request_id for r in plan.requests] == ["20", "12", "5", "3"]


def test_a_prompt_is_cut_to_the_budget_beside_running_requests() -> None:
    scheduler = Scheduler(Limits(64, SIZE, 4, 8))
    scheduler.add(request("short", [1] * 3, 20))
    scheduler.add(request("long", [2] * 20, 1))
    plans = drain(scheduler)
    assert [p.counts for p in plans[:4]] == [[3, 5], [1, 7], [1, 7], [1, 1]]
    whole = Scheduler(Limits(64, SIZE, 4, 8, chunked_prefill=False))
    whole.add(request("short", [1] * 3, 20))
    whole.add(request("long", [2] * 20, 1))
    assert [p.counts for p in drain(whole)[:2]] == [[3], [1, 20]]


def test_few_prompt_tokens_wait_for_the_interval_and_many_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nybble.engine.scheduler.WORTH_A_STEP", 20)
    for lengths, waited in (([10], 4), ([10, 9], 4), ([20], 0), ([10, 10], 0), ([5, 5, 30], 4)):  # of the last, two find a slot
        scheduler = Scheduler(Limits(64, SIZE, 4, 64, prefix_caching=False, prefill_interval=5))
        device = Device(scheduler)
        for name in "ab":
            scheduler.add(request(name, [1] * 3, 40))
        commit(scheduler, device.run(scheduler.plan()))
        for length in lengths:
            scheduler.add(request(str(length), [2] * length, 1))
        for step in range(5):
            plan = scheduler.plan()
            commit(scheduler, device.run(plan))
            assert plan.counts[2:] == (lengths[:2] if step == waited else [])
            if step == waited:
                break


def test_requests_in_one_step_share_the_prefix_that_one_of_them_computes() -> None:
    scheduler = Scheduler(Limits(64, SIZE, 4, 64))
    for name in "abc":
        scheduler.add(request(name, [5] * 10, 1))
    (plan,) = drain(scheduler)
    assert plan.counts == [10, 2, 2]
    assert scheduler.prefix_hits == 16


def test_what_a_failed_request_computed_is_not_offered_to_others() -> None:
    for reason, found in (("abort", 8), ("error", 0)):
        scheduler = Scheduler(Limits(64, SIZE, 4, 64))
        scheduler.add(request("first", [5] * 10, 9))
        first = scheduler.plan().requests[0]
        scheduler.finish(first, reason)
        scheduler.add(request("second", [5] * 10, 1))
        scheduler.plan()
        assert scheduler.prefix_hits == found


def test_limits_say_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="max_batched_tokens = 3 is below max_batch = 4"):
        Limits(8, 4, 4, 3)
    with pytest.raises(ValueError, match="at least one of each"):
        BlockPool(0, 4)

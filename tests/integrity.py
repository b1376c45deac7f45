"""What must hold of blocks, slots and lengths between any two calls of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nybble.engine.blocks import BlockPool
from nybble.engine.request import NO_SLOT
from nybble.engine.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """AssertionError says what is broken."""
    size = scheduler.limits.block_size
    check_pool(scheduler.pool, ((r.blocks, r.num_computed) for r in scheduler.running))
    slots = [r.slot for r in scheduler.running]
    assert sorted(slots + scheduler._slots) == list(range(scheduler.limits.max_batch)), "slots lost or used twice"
    for request in scheduler.running:
        assert request.finish_reason is None, f"{request} runs"
        assert request.num_computed <= request.num_tokens <= request.max_tokens_total, f"{request}"
        assert len(request.blocks) * size >= request.num_computed, f"{request} has no room"
    for request in scheduler.waiting:
        assert request.slot == NO_SLOT, f"{request} waits and holds a slot"
        assert not request.blocks, f"{request} waits and holds blocks"


def check_pool(pool: BlockPool, tables: Iterable[tuple[Sequence[int], int]] = ()) -> None:
    """Every block is in exactly one state and only full, findable blocks are shared.

    tables: (blocks, computed tokens) of every request that holds any.
    """
    held = [0] * pool.num_blocks
    for blocks, num_computed in tables:
        for position, block in enumerate(blocks):
            held[block] += 1
            full, holders = (position + 1) * pool.block_size <= num_computed, pool._holders[block]
            assert full or holders == 1, f"block {block} is being written and has {holders} holders"
    assert held == pool._holders, "holders differ from the blocks in the requests' tables"
    free, cached = set(pool._free), set(pool._cached)
    assert len(free) == len(pool._free), "a block is free twice"
    assert not free & cached, "a block is both free and cached"
    idle = {block for block, count in enumerate(held) if count == 0}
    assert free | cached == idle, f"blocks lost or in use while free: {(free | cached) ^ idle}"
    named = {block: key for key, (block, _) in pool._index.items()}
    assert len(named) == len(pool._index), "one block has two contents"
    assert named == {b: k for b, k in enumerate(pool._key_of) if k is not None}, "index and contents differ"
    assert cached <= set(named), "a cached block cannot be found"
    assert not free & set(named), "a free block can be found"
    for block, count in enumerate(held):
        assert count < 2 or block in named, f"block {block} is shared and not findable"

"""Who owns which block of the paged KV cache. Integers only: no tensor, no request.

A block is free, cached (nobody's, but its content can still be found), or held by one or more requests. Only full blocks are
ever shared, and a full block is never written again, so no block has two writers. Content is found by the exact chain
(identity of the prefix before it, its tokens): the dictionary hashes the chain and compares the tokens, so a hash collision
cannot hand out somebody else's prefix.

A block's key also says how many of its tokens were prompt tokens. Prompt tokens and generated tokens go through different
kernels whose last bits may differ, so a prompt that repeats a generated text computes it anew instead of changing its own
tokens with the state of the cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0  # identity of the empty prefix

Key = tuple[int, int, tuple[int, ...]]  # prefix identity, prompt tokens in this block, tokens


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. All operations cost O(blocks they name)."""

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks = {num_blocks}, block_size = {block_size}: a KV cache wants at least one of each")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._holders = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._index: dict[Key, tuple[int, int]] = {}  # content -> (block, identity of the prefix that ends with it)
        self._key_of: list[Key | None] = [None] * num_blocks
        self._identities = ROOT

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """Blocks that `take` could hand out now."""
        return len(self._free) + len(self._cached)

    def take(self, count: int) -> list[int]:
        """`count` blocks to write, held once each; the content that was used longest ago is forgotten first."""
        if count > self.available:
            raise ValueError(f"asked for {count} blocks, {self.available} of {self.num_blocks} are available")
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def match(self, tokens: Sequence[int], num_prompt: int, limit: int) -> tuple[list[int], int]:
        """The longest cached prefix of `tokens` in whole blocks, at most `limit` tokens -> (held blocks, prefix identity)."""
        blocks: list[int] = []
        identity = ROOT
        if self.prefix_caching:
            for start in range(0, limit - self.block_size + 1, self.block_size):
                found = self._index.get(self._key(identity, tokens, num_prompt, start))
                if found is None:
                    break
                block, identity = found
                if self._holders[block] == 0:
                    del self._cached[block]
                self._holders[block] += 1
                blocks.append(block)
        return blocks, identity

    def register(self, block: int, identity: int, tokens: Sequence[int], num_prompt: int, start: int) -> int:
        """Make the full held block of tokens[start : start + block_size], which follows prefix `identity`, findable.

        -> identity of the prefix that ends with it. The first block with some content keeps the name; a twin stays private.
        """
        if not self.prefix_caching:
            return ROOT
        key = self._key(identity, tokens, num_prompt, start)
        found = self._index.get(key)
        if found is not None:
            return found[1]
        self._identities += 1
        self._index[key] = (block, self._identities)
        self._key_of[block] = key
        return self._identities

    def release(self, blocks: Sequence[int], forget: bool = False) -> None:
        """Give up one hold of each. `blocks` is in order of position: its tail becomes the first to be evicted, so a prefix
        outlives what follows it. `forget` drops the content of blocks that nobody else holds."""
        for block in reversed(blocks):
            if self._holders[block] < 1:
                raise ValueError(f"block {block} was released more often than held")
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if forget:
                    self._forget(block)
                if self._key_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def _key(self, identity: int, tokens: Sequence[int], num_prompt: int, start: int) -> Key:
        end = start + self.block_size
        return identity, min(max(num_prompt - start, 0), self.block_size), tuple(tokens[start:end])

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            del self._index[key]
            self._key_of[block] = None

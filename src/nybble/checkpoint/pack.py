"""Small integers in 32-bit words: the dense little-endian bit stream that compressed-tensors, GPTQ and AWQ share.

Element i of a row occupies bits [bits * i, bits * (i + 1)) of the row's stream, least significant first; 3-bit elements
straddle words. Words are little-endian, as on every machine this runs on, so they are packed as bytes. Signs, zero points and
orders are the formats' business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers [N, K] -> int32 words [N, ceil(bits * K / 32)], the rest zero."""
    n, k = values.shape
    values = values.to(torch.uint8)
    if 32 % bits == 0:
        fields = torch.nn.functional.pad(values, (0, -k % (32 // bits))).view(n, -1, 8 // bits)
    else:
        stream = (values[..., None] >> torch.arange(bits, dtype=torch.uint8)) & 1
        fields, bits = torch.nn.functional.pad(stream.view(n, -1), (0, -k * bits % 32)).view(n, -1, 8), 1
    packed = fields[..., 0].contiguous()
    for i in range(1, fields.shape[-1]):
        packed |= fields[..., i] << (bits * i)
    return packed.view(torch.int32)


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 words [N, W] -> uint8 [N, count]. Raises ValueError when the words are too few or too many for `count`, TypeError
    for another dtype."""
    packed = _bytes(words)
    n, width = words.shape
    if width != -(-bits * count // 32):
        per_word = 32 // bits
        if 32 % bits and width == -(-count // per_word):  # compressed-tensors until 2026: only whole values in a word
            fields = (words[..., None] >> torch.arange(0, per_word * bits, bits, dtype=torch.int32)) & ((1 << bits) - 1)
            return fields.view(n, -1)[:, :count].to(torch.uint8)
        raise ValueError(f"{width} words per row cannot be {count} values of {bits} bits")
    if 32 % bits == 0:
        fields = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
        return torch.stack(fields, -1).view(n, -1)[:, :count].contiguous()
    stream = ((packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(n, -1)[:, :count * bits]
    return (stream.view(n, count, bits) << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_nibbles(words: Tensor, order: Sequence[int]) -> Tensor:
    """int32 words [N, W] -> uint8 [N, 8 * W], the nibbles of each word in `order`. Raises TypeError for another dtype."""
    packed = _bytes(words).view(*words.shape, 4)
    return torch.stack([(packed[..., i // 2] >> 4 * (i % 2)) & 15 for i in order], -1).flatten(1)


def _bytes(words: Tensor) -> Tensor:
    if words.dtype != torch.int32 or words.dim() != 2:
        raise TypeError(f"{words.dtype} {list(words.shape)} is no matrix of int32 words")
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)

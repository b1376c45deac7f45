"""Small integers in 32-bit words: the dense little-endian bit stream that compressed-tensors, GPTQ and AWQ share.

Element i of a row occupies bits [bits * i, bits * (i + 1)) of the row's stream, least significant first; 3-bit elements
straddle words. Signs, zero points and orders are the formats' business.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_rows(values: Tensor, bits: int) -> Tensor:
    """Unsigned integers [N, K] -> int32 words [N, ceil(bits * K / 32)], the rest zero."""
    n, k = values.shape
    if 32 % bits == 0:
        per_word = 32 // bits
        padded = torch.nn.functional.pad(values.to(torch.int64), (0, -k % per_word)).view(n, -1, per_word)
        words = (padded << (bits * torch.arange(per_word))).sum(-1)
    else:
        stream = (values.to(torch.int64)[..., None] >> torch.arange(bits)) & 1
        stream = torch.nn.functional.pad(stream.view(n, -1), (0, -k * bits % 32)).view(n, -1, 32)
        words = (stream << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_rows(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 words [N, W] -> uint8 [N, count]. Raises ValueError when the words are too few or too many for `count`."""
    n, width = words.shape
    if width != -(-bits * count // 32):
        raise ValueError(f"{width} words per row cannot be {count} values of {bits} bits")
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).view(n, -1)[:, :count].contiguous()
    stream = ((words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1).view(n, -1)[:, :count * bits]
    return (stream.view(n, count, bits) << torch.arange(bits, dtype=torch.int32)).sum(-1).to(torch.uint8)

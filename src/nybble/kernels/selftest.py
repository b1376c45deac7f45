"""Whether a kernel computes what the reference computes on this very device, asked once per kernel and scheme at load.

A compiler, driver or GPU that a kernel was never tried on should cost speed, not answers: what fails here is refused by
`registry.choose` with the reason, loudly, and the next kernel in line is taken.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import torch

from nybble.formats.numerics import random_qtensor
from nybble.kernels import reference
from nybble.kernels.registry import LinearKernel, LinearShape, choose

OUT, IN = 320, 1024  # a tail for tiles of 128 and 256 rows, groups of 128, and a sum in parts where a kernel has those
TOKENS = (1, 40, 300)  # a batch of each kind of tile


def failure(kernel: LinearKernel, shape: LinearShape) -> str | None:
    """Why `kernel` is not to be trusted with layers like `shape` (also when it cannot be built); None when it is."""
    if shape.scheme.weight is None or shape.has_order or shape.act_scale is not None:
        return None  # nothing is unpacked, or not made up in a line
    small = replace(shape, out_features=OUT, in_features=IN)
    group = shape.scheme.weight.group
    if group is not None and IN % group or kernel.accepts(small) is not None:
        return None  # the trial would be of something else
    return _trial(kernel, small)


@cache
def _trial(kernel: LinearKernel, shape: LinearShape) -> str | None:
    assert shape.scheme.weight is not None
    generator = torch.Generator(shape.device).manual_seed(0)
    weight = random_qtensor(shape.scheme.weight, (OUT, IN), generator, torch.float32)
    known = choose(replace(shape, dtype=torch.float32), reference.KERNELS).kernel
    expected_of = known.pack(weight, replace(shape, dtype=torch.float32))
    try:
        packed = kernel.pack(weight, shape)
        for tokens in TOKENS:
            x = torch.randn(tokens, IN, device=shape.device, generator=generator).to(shape.dtype)
            rows = reference.quantize_rows(x)
            out = kernel.run(packed, rows if kernel.takes is not None else x).float()
            want = known.run(expected_of, rows if known.takes is not None else x.float()).float()
            error = ((out - want).norm() / want.norm()).item()
            # 16-bit outputs are off by 2^-9 each; products of 16-bit weights and 8-bit rows by a little more
            if not error < 0.02:
                return _loud(kernel, shape, f"its start-up test on {tokens} tokens is off by {error:.2g} of the result")
    except Exception as error:
        return _loud(kernel, shape, f"its start-up test failed: {type(error).__name__}: {str(error).strip()[:200]}")
    return None


def _loud(kernel: LinearKernel, shape: LinearShape, reason: str) -> str:
    logging.getLogger(__name__).warning("kernel %r is not used for %s on %s: %s", kernel.name, shape.scheme.name,
                                        shape.device, reason)
    return reason

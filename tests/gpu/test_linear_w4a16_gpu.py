"""W4A16 on a Hopper GPU: every scheme, tile and shape against float64, one result for every batch, nothing past the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from nybble.formats.numerics import random_qtensor
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import INT4, UINT4, Scheme, Spec
from nybble.kernels import linear_hopper_w4a16 as w4a16
from nybble.kernels.linear_hopper_w4a16 import Packed, Tile
from nybble.kernels.registry import LinearShape, choose

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SPECS = [Spec(INT4, (1, g)) for g in (None, 32, 64, 128)] + [Spec(UINT4, (1, g), zero=True) for g in (32, 128)]
SHAPES = [(256, 512), (960, 576), (200, 1152), (1003, 384), (5120, 5120), (8320, 2944), (16384, 768)]
TOKENS = (1, 3, 16, 17, 33, 65, 100, 130, 257, 400, 1030)
PLANNED = [
    launch.tile
    for tokens in (1, 16, 32, 64, 80, 128, 160, 192, 256, 384, 512, 1024, 4096)
    for n, shares in ((5120, 2), (15360, 1), (27648, 1))
    for launch in w4a16.plan(tokens, n, 5120, shares, 132)
]
TILES = sorted({tile._replace(split=split, stagger=tile.stagger and not split) for tile in PLANNED for split in (False, True)})


def case(spec: Spec, n: int, k: int, dtype: torch.dtype) -> tuple[QTensor, LinearShape]:
    weight = random_qtensor(spec, (n, k), torch.Generator("cuda").manual_seed(n + k), torch.float32)
    if weight.zero is not None:
        weight = replace(weight, zero=torch.rand_like(weight.zero) * 15 if spec.group == 32 else (weight.zero * 1.3).round())
    weight.scale[5] = 0
    return weight, LinearShape(Scheme("", weight.spec, None, 5e-3), n, k, CUDA, dtype)


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.num.name}-{s.group}")
def test_against_float64_and_one_result_for_every_batch(spec: Spec, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, wanted = case(spec, n, k, dtype)
    kernel = choose(wanted).kernel
    assert kernel is w4a16.KERNELS[0]
    packed, x = kernel.pack(weight, wanted), torch.randn(max(TOKENS), k, device=CUDA, dtype=dtype)
    x[2] = 0
    whole = kernel.run(packed, x)
    assert relative(whole, x.double() @ dequantize(weight, torch.float64).t()) < (3e-3 if dtype == torch.bfloat16 else 5e-4)
    assert not whole[2].any()
    assert not whole[:, 5].any()
    for tokens in TOKENS:
        assert torch.equal(kernel.run(packed, x[:tokens]), whole[:tokens]), tokens
    assert torch.equal(kernel.run(packed, x[100:103]), whole[100:103])


@pytest.mark.parametrize("shares", [1, 2, 3])
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(str(int(v)) for v in tile))
def test_every_tile_gives_the_same_bits_every_time(tile: Tile, shares: int) -> None:
    for n, k in ((1003, 1024), (2560, 1408)):
        weight, wanted = case(SPECS[3], n, k, torch.bfloat16)
        packed: Packed = replace(w4a16.KERNELS[0].pack(weight, wanted), shares=shares)
        x = torch.randn(600, k, device=CUDA, dtype=torch.bfloat16)
        want = w4a16.KERNELS[0].run(replace(packed, tile=Tile(64, 1, 2, 1)), x)
        assert relative(want, x.double() @ dequantize(weight, torch.float64).t()) < 3e-3
        for tokens in (1, tile.tokens, tile.tokens + 3, 600):
            for _ in range(3):  # a race between programs that share a tile would show
                assert torch.equal(w4a16.KERNELS[0].run(replace(packed, tile=tile), x[:tokens]), want[:tokens]), tokens


@pytest.mark.parametrize("tokens", [1, 17, 128])
def test_nothing_is_read_or_written_past_the_end(tokens: int) -> None:
    n, k = 202, 576
    weight, wanted = case(SPECS[2], n, k, torch.float16)
    poisoned = torch.full((tokens * k + 8192,), float("nan"), device=CUDA, dtype=torch.float16)
    x = poisoned[: tokens * k].view(tokens, k).normal_()
    outputs = torch.full((8, 200_000), 7.0, device=CUDA, dtype=torch.float16)  # what the next allocations are cut from
    del outputs
    out = w4a16.KERNELS[0].run(w4a16.KERNELS[0].pack(weight, wanted), x)
    assert relative(out, x.double() @ dequantize(weight, torch.float64).t()) < 5e-4
    assert poisoned[tokens * k :].isnan().all()


def test_a_kernel_that_starts_early_waits_for_its_input() -> None:
    """Each product reads the output of the one right before it, in one graph, many times."""
    k = 2048
    weight, wanted = case(SPECS[3], k, k, torch.bfloat16)
    kernel, first = w4a16.KERNELS[0], torch.randn(40, k, device=CUDA, dtype=torch.bfloat16)
    packed = kernel.pack(weight, wanted)
    expected = [first]
    for _ in range(6):
        expected.append(kernel.run(packed, expected[-1]).clone())
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [first]
        for _ in range(6):
            outs.append(kernel.run(packed, outs[-1]))
    for _ in range(5):
        for out in outs[1:]:
            out.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))

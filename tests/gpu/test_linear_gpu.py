"""The same linears on the GPU: bitwise where integer, one result whatever the batch, nothing written past the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import SCHEMES, Scheme, scheme_of
from nybble.kernels import linear_hopper, linear_triton
from nybble.kernels.linear_triton import Tile
from nybble.kernels.registry import LinearKernel, LinearShape, choose
from nybble.kernels.types import Rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SHAPES = [(256, 512), (960, 576), (5120, 5120), (6016, 2944)]
TOKENS = [1, 3, 16, 17, 24, 48, 64, 96, 128, 160, 257, 1030]
QUANTIZED = ["w4a8", "w8a8", "w4a8_qqq_g128", "w4a8_g128", "w4a8_g64", "w4a8_g32"]


def weight_of(scheme: Scheme, n: int, k: int) -> QTensor:
    spec = scheme.weight
    assert spec is not None
    groups = k // (spec.group or k)
    if spec.over is not None:
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=CUDA)
        scale = torch.rand(n, groups, device=CUDA) * 17
        return QTensor(spec, codes, scale, None, torch.rand(n, 1, device=CUDA) / k)
    w = torch.randn(n, k, device=CUDA)
    scale = w.view(n, groups, -1).abs().amax(-1) / (7 if spec.num.bits == 4 else 127)
    zero = torch.rand(n, groups, device=CUDA) * 15 if spec.zero else None
    return quantize_weight(w, spec, scale, zero)


def rows_of(tokens: int, k: int) -> Rows:
    codes = torch.randint(-127, 128, (tokens, k), dtype=torch.int8, device=CUDA)
    codes[-1] = torch.where(codes[-1] < 0, -127, 127)
    codes[0] = 0 if tokens > 1 else codes[0]
    return Rows(codes, torch.rand(tokens, device=CUDA) + 0.5)


def ask(name: str, n: int, k: int) -> LinearShape:
    return LinearShape(SCHEMES[name], n, k, CUDA, torch.bfloat16)


def kernels(shape: LinearShape) -> list[LinearKernel]:
    """Every kernel of ours that accepts."""
    return [kernel for kernel in (*linear_hopper.KERNELS, *linear_triton.KERNELS) if kernel.accepts(shape) is None]


def whole_groups(name: str, k: int) -> bool:
    weight = SCHEMES[name].weight
    return weight is not None and k % (weight.group or k) == 0


def relative(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", QUANTIZED)
def test_against_float64_and_one_result_for_every_batch(name: str, shape: tuple[int, int]) -> None:
    n, k = shape
    if not whole_groups(name, k):
        pytest.skip("whole groups only")
    weight, all_rows = weight_of(SCHEMES[name], n, k), rows_of(max(TOKENS), k)
    want = (all_rows.codes.double() * all_rows.scale.double()[:, None]) @ dequantize(weight, torch.float64).t()
    assert kernels(ask(name, n, k))
    for kernel in kernels(ask(name, n, k)):
        packed = kernel.pack(weight, ask(name, n, k))
        whole = kernel.run(packed, all_rows)
        assert relative(whole, want) < 3e-3, kernel.name  # bf16 rounding of the output
        for tokens in TOKENS:
            part = Rows(all_rows.codes[:tokens], all_rows.scale[:tokens])
            same = torch.equal(kernel.run(packed, part), whole[:tokens])
            assert same, f"{kernel.name}: {tokens} tokens differ from {max(TOKENS)}"


@pytest.mark.parametrize("name", ["w4a8", "w8a8"])
def test_per_channel_is_bitwise_the_integer_reference(name: str) -> None:
    n, k = 960, 576
    shape = replace(ask(name, n, k), dtype=torch.float32)
    weight, x = weight_of(SCHEMES[name], n, k), rows_of(130, k)
    exact = (x.codes.double() @ weight.codes.double().t()).float() * weight.scale.t() * x.scale[:, None]
    for kernel in kernels(shape):
        assert torch.equal(kernel.run(kernel.pack(weight, shape), x), exact), kernel.name


@pytest.mark.parametrize("name", ["w4a8", "w8a8", "w4a8_g128", "w4a16_g128"])
def test_tile_and_split_change_nothing(name: str) -> None:
    n, k, tokens = 640, 3072, 37
    weight = weight_of(SCHEMES[name], n, k)
    x = rows_of(tokens, k) if SCHEMES[name].act else torch.randn(tokens, k, device=CUDA, dtype=torch.bfloat16)
    kernel = choose(ask(name, n, k), linear_triton.KERNELS).kernel
    packed = kernel.pack(weight, ask(name, n, k))
    tiles = [
        Tile(64, 16, 128, 4, 4, 4),
        Tile(64, 64, 128, 4, 3, 4),
        Tile(128, 64, 128, 1, 3, 8),
        Tile(128, 32, 128, 4, 3, 4, 1),
    ]
    outs = [kernel.run(replace(packed, tile=tile), x) for tile in tiles]
    assert all(torch.equal(out, outs[0]) for out in outs[1:])
    for _ in range(50):  # a race between split programs would show
        assert torch.equal(kernel.run(replace(packed, tile=tiles[0]), x), outs[0])
    assert not packed.arrivals.any()


@pytest.mark.parametrize("name", ["w4a16", "w4a16_g32", "w4a16_g64", "w4a16_g128", "w4a16_zero_g128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_w4a16(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    n, k = shape
    if not whole_groups(name, k):
        pytest.skip("whole groups only")
    weight, x = weight_of(SCHEMES[name], n, k), torch.randn(130, k, device=CUDA, dtype=dtype)
    kernel = choose(replace(ask(name, n, k), dtype=dtype), linear_triton.KERNELS).kernel
    packed = kernel.pack(weight, replace(ask(name, n, k), dtype=dtype))
    want = x.double() @ dequantize(weight, torch.float64).t()
    whole = kernel.run(packed, x)
    assert relative(whole, want) < SCHEMES[name].tol
    for tokens in (1, 16, 33, 65):
        assert torch.equal(kernel.run(packed, x[:tokens]), whole[:tokens])


@pytest.mark.parametrize("tokens", [1, 17, 128])
def test_nothing_is_written_or_read_past_the_end(tokens: int) -> None:
    """Input and weight sit before poison; a read past the end would meet it, a write would change it."""
    n, k = 200, 576
    weight, x = weight_of(SCHEMES["w4a8"], n, k), rows_of(tokens, k)
    shape = replace(ask("w4a8", n, k), dtype=torch.float32)
    poisoned = torch.full((tokens * k + 4096,), 127, dtype=torch.int8, device=CUDA)
    poisoned[: tokens * k] = x.codes.view(-1)
    x = Rows(poisoned[: tokens * k].view(tokens, k), x.scale)
    exact = (x.codes.double() @ weight.codes.double().t()).float() * weight.scale.t() * x.scale[:, None]
    for kernel in kernels(shape):
        assert torch.equal(kernel.run(kernel.pack(weight, shape), x), exact), kernel.name
    assert (poisoned[tokens * k :] == 127).all()


@pytest.mark.parametrize("vocabulary", [32000, 1003])
def test_logits(vocabulary: int) -> None:
    hidden = torch.randn(130, 576, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(vocabulary, 576, device=CUDA, dtype=torch.bfloat16)
    out = linear_triton.logits(hidden, weight)
    assert (out - hidden.double() @ weight.double().t()).abs().max().item() < 1e-3
    for rows in (slice(0, 1), slice(5, 40), slice(64, 130)):
        assert torch.equal(linear_triton.logits(hidden[rows], weight), out[rows])


HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU")
HOPPER_TILES = [
    linear_hopper.Tile(8, 1, True, 4, 2),
    linear_hopper.Tile(16, 1, True, 2, 2),
    linear_hopper.Tile(24, 1, False, 4, 2),
    linear_hopper.Tile(64, 1, False, 1, 2),
    linear_hopper.Tile(80, 2, False, 3, memory=True),
    linear_hopper.Tile(80, 1, False, 8, memory=True),
    linear_hopper.Tile(80, 2, waves=1, order=4),
    linear_hopper.Tile(96, 2, waves=1, lag=2),
    linear_hopper.Tile(128, 1, False, 2),
    linear_hopper.Tile(128, 1, stream=True),
    linear_hopper.Tile(128, 2, cluster_k=3),
    linear_hopper.Tile(128, 2, waves=1, order=2, stream=True, lag=2),
    linear_hopper.Tile(128, 1, False, 3, memory=True, ahead=3),
    linear_hopper.Tile(176, 1, ahead=3),
    linear_hopper.Tile(64, 1, False, 2, 2, ahead=6),  # more than the stages that fit beside group scales
    linear_hopper.Tile(192, 1, False, 2, ahead=1),
    linear_hopper.Tile(208, 1, waves=1, order=4, stream=True, ahead=3),
    linear_hopper.Tile(256, 1, waves=1, order=2, stream=True, ahead=3),
    linear_hopper.Tile(256, 1, False, 3, memory=True, ahead=3),
    linear_hopper.Tile(16, 1, True, 5, 2, ahead=6),
    linear_hopper.Tile(64, 1, False, 6, 2, memory=True),
    linear_hopper.Tile(64, 1, False, 3, memory=True, ahead=6),
    linear_hopper.Tile(96, 1, waves=1, order=4, ahead=3),
    linear_hopper.Tile(112, 2, ahead=3),
    linear_hopper.Tile(144, 1, waves=1, order=4, ahead=3),
]


def on_the_grid(n: int, k: int, whole: bool) -> QTensor:
    """Groups on the int8 grid by whole scales, the largest and zero among them; or by float16 ones, among them halves, whose
    odd multiples lie between two codes."""
    weight = weight_of(SCHEMES["w4a8_qqq_g128"], n, k)
    scale = torch.randint(1, 17, weight.scale.shape, device=CUDA).float()
    if not whole:
        scale = (torch.rand_like(scale) * 15.9).half().float()
        scale[2::3] = scale[2::3].round() - 0.5
    scale[0], scale[1] = 16, 0
    return replace(weight, scale=scale)


@HOPPER
@pytest.mark.parametrize("tile", HOPPER_TILES, ids=lambda tile: "x".join(str(int(v)) for v in tile))
@pytest.mark.parametrize("mode", [linear_hopper.PER_CHANNEL, linear_hopper.GROUPED, linear_hopper.ROUNDED])
@pytest.mark.parametrize("shape", [(960, 576), (5120, 5120), (200, 1152), (1003, 384)])
def test_every_hopper_tile_is_bitwise_exact(mode: int, tile: linear_hopper.Tile, shape: tuple[int, int]) -> None:
    (n, k), name = shape, "w4a8_qqq_g128" if mode else "w4a8"
    if not whole_groups(name, k):
        pytest.skip("whole groups only")
    weight = on_the_grid(n, k, mode == linear_hopper.GROUPED) if mode else weight_of(SCHEMES[name], n, k)
    wanted = replace(ask(name, n, k), dtype=torch.float32)
    kernel = linear_hopper.KERNELS[0]
    packed = kernel.pack(weight, wanted)
    assert isinstance(packed, linear_hopper.Packed)
    assert packed.mode == mode
    inner = weight.codes.double()
    if weight.over is not None:
        inner = torch.round(inner * weight.scale.double().repeat_interleave(128, 1))  # to even, as QQQ rounds
    channel = weight.scale if weight.over is None else weight.over
    for tokens in (1, 5, tile.tokens, tile.tokens + 3, 300):
        x = rows_of(tokens, k)
        exact = (x.codes.double() @ inner.t()).float() * channel.t() * x.scale[:, None]
        for _ in range(3):  # a race between programs that share a tile would show
            assert torch.equal(kernel.run(replace(packed, tile=tile), x), exact), tokens
    assert not packed.arrivals.any()


@HOPPER
def test_qqq_scales_that_are_not_float16_stay_exact() -> None:
    wanted = replace(ask("w4a8_qqq_g128", 512, 1024), dtype=torch.float32)
    weight, x = weight_of(SCHEMES["w4a8_qqq_g128"], 512, 1024), rows_of(33, 1024)
    kernel = linear_hopper.KERNELS[0]
    inner = torch.round(weight.codes.float() * weight.scale.repeat_interleave(128, 1)).clamp(-128, 127)
    assert weight.over is not None
    exact = (x.codes.double() @ inner.double().t()).float() * weight.over.t() * x.scale[:, None]
    assert torch.equal(kernel.run(kernel.pack(weight, wanted), x), exact)


@HOPPER
@pytest.mark.parametrize("whole", [True, False])
def test_group_scales_that_all_rows_share(whole: bool) -> None:
    """One of 128 channels of every row; [1, groups], not [N, groups]."""
    weight, x = on_the_grid(200, 1152, whole), rows_of(33, 1152)
    spec = replace(weight.spec, tile=(None, 128))
    weight = replace(weight, spec=spec, scale=weight.scale[3:4])
    wanted = replace(ask("w4a8_qqq_g128", 200, 1152), scheme=scheme_of(spec, SCHEMES["w4a8"].act), dtype=torch.float32)
    kernel = linear_hopper.KERNELS[0]
    assert kernel.accepts(wanted) is None
    inner = torch.round(weight.codes.double() * weight.scale.double().repeat_interleave(128, 1))
    assert weight.over is not None
    exact = (x.codes.double() @ inner.t()).float() * weight.over.t() * x.scale[:, None]
    assert torch.equal(kernel.run(kernel.pack(weight, wanted), x), exact)


@pytest.mark.parametrize("name", ["w4a8", "w8a8", "w4a8_g128"])
def test_a_kernel_that_starts_early_waits_for_its_input(name: str) -> None:
    """The scales of each product are the output of the one right before it, in one graph, many times."""
    k = 2048
    wanted = replace(ask(name, k, k), dtype=torch.float32)
    weight = weight_of(SCHEMES[name], k, k)
    one = rows_of(1, k)
    codes = torch.randint(-127, 128, (k, k), dtype=torch.int8, device=CUDA)
    for kernel in kernels(wanted):
        packed = kernel.pack(weight, wanted)

        def chain(kernel: LinearKernel = kernel, packed: object = packed) -> torch.Tensor:
            return kernel.run(packed, Rows(codes, kernel.run(packed, one)[0]))

        first = kernel.run(packed, one)[0].clone()
        torch.cuda.synchronize()
        expected = kernel.run(packed, Rows(codes, first)).clone()
        torch.cuda.synchronize()
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [chain() for _ in range(6)]
        for _ in range(5):
            for out in outs:
                out.zero_()
            graph.replay()
            assert all(torch.equal(out, expected) for out in outs), kernel.name

"""W8A8 on a Hopper GPU: int8 to the bit, FP8 against float64 of the codes, every tile one result, nothing past the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import FP8, INT8_CHANNEL, PER_TOKEN_FP8, PER_TOKEN_INT8, Spec, scheme_of
from nybble.kernels import linear_hopper_w8, reference
from nybble.kernels.linear_hopper_w8 import BLOCKS, EVEN_BLOCKS, INTEGER, NARROW, WIDE, Tile
from nybble.kernels.registry import LinearKernel, LinearShape, choose
from nybble.kernels.types import Rows

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
STATIC, GROUPS = Spec(FP8, (None, None)), Spec(FP8, (1, 128), dynamic=True)
FLOAT8 = [((1, None), PER_TOKEN_FP8, None), ((None, None), PER_TOKEN_FP8, None), ((None, None), STATIC, 0.013),
          ((128, 128), GROUPS, None), ((1, 128), GROUPS, None)]  # fmt: skip
SHAPES = [(960, 576), (5120, 5120), (200, 1152), (1003, 400), (64, 16)]
TOKENS = (1, 7, 64, 131, 300, 700)


def tiles(kind: int) -> set[Tile | None]:
    """None: the one for the batch; then all in the tables, and some that nothing chooses."""
    more = {Tile(24, 1, 1, 2), Tile(48, 1, 2, 2), Tile(128, 2, 2, order=3)}
    if kind == INTEGER:  # two sums of the widest fit no registers
        more |= {Tile(256, 2, 4)}
    if kind == EVEN_BLOCKS:
        more |= {*WIDE[BLOCKS], Tile(256, 2, turned=128), Tile(128, 2, 4, order=3, turned=64)}
    return {None, *(row[-1] for row in NARROW[kind]), *WIDE[kind], *more}


def float8_weight(n: int, k: int, tile: tuple[int | None, int | None]) -> QTensor:
    codes = (torch.randn(n, k, device=CUDA) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows, columns = (1 if t is None else -(-size // t) for t, size in zip(tile, (n, k)))
    return QTensor(Spec(FP8, tile), codes, torch.rand(rows, columns, device=CUDA) + 0.5)


def int8_case(n: int, k: int) -> tuple[LinearShape, QTensor, Rows, torch.Tensor]:
    """-> (what is asked for, weight, input, the exact result in float32)."""
    weight = QTensor(
        INT8_CHANNEL, torch.randint(-127, 128, (n, k), dtype=torch.int8, device=CUDA), torch.rand(n, 1, device=CUDA)
    )
    codes = torch.randint(-127, 128, (max(TOKENS), k), dtype=torch.int8, device=CUDA)
    codes[0], codes[1] = torch.where(codes[0] < 0, -127, 127), 0
    weight.codes[0], weight.codes[-1] = 127, -127
    x = Rows(codes, torch.rand(max(TOKENS), device=CUDA) + 0.5)
    exact = (codes.double() @ weight.codes.double().t()).float() * weight.scale.t() * x.scale[:, None]
    return LinearShape(scheme_of(INT8_CHANNEL, PER_TOKEN_INT8), n, k, CUDA, torch.float32), weight, x, exact


def head(x: Rows | torch.Tensor, tokens: int) -> Rows | torch.Tensor:
    return Rows(x.codes[:tokens], x.scale[:tokens]) if isinstance(x, Rows) else x[:tokens]


def run_poisoned(kernel: LinearKernel, packed: object, x: Rows | torch.Tensor, n: int) -> torch.Tensor:
    """The memory the output will get holds NaN before."""
    tokens = (x.codes if isinstance(x, Rows) else x).shape[0]
    torch.full((tokens, n), float("nan"), device=CUDA)
    return kernel.run(packed, x)


@pytest.mark.parametrize("shape", SHAPES)
def test_int8_is_exact_with_every_tile(shape: tuple[int, int]) -> None:
    wanted, weight, x, exact = int8_case(*shape)
    kernel = linear_hopper_w8.KERNELS[0]
    packed = kernel.pack(weight, wanted)
    for tile in tiles(INTEGER):
        for tokens in TOKENS:
            out = run_poisoned(kernel, replace(packed, tile=tile), head(x, tokens), shape[0])
            assert torch.equal(out, exact[:tokens]), (tile, tokens)
    assert kernel.run(packed, head(x, 0)).shape == (0, shape[0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tile", "act", "scale"), FLOAT8)
def test_fp8_is_close_and_the_same_with_every_tile(tile: tuple, act: Spec, scale: float | None, shape: tuple[int, int]) -> None:
    n, k = shape
    weight, x = float8_weight(n, k, tile), torch.randn(max(TOKENS), k, device=CUDA)
    x[1] = 0
    wanted = LinearShape(scheme_of(weight.spec, act), n, k, CUDA, torch.float32, act_scale=scale)
    kernel = linear_hopper_w8.KERNELS[1]
    assert kernel.accepts(wanted) is None
    given = None if scale is None else torch.tensor([[scale]], device=CUDA)
    codes, scales = reference.quantize_float8(x, act, given)
    spread = scales.double().repeat_interleave(128 if act.group else k, 1)[:, :k]
    exact = (codes.double() * spread) @ dequantize(weight, torch.float64).t()
    packed = kernel.pack(weight, wanted)
    whole = kernel.run(packed, x)
    # the tensor core cuts sums of 128 or 2048 products 13 bits after the largest's point; rounding to bf16 costs 1.7e-3
    assert ((whole - exact).norm() / exact.norm()).item() < (3e-4 if packed.kind >= BLOCKS else 1.2e-3)
    for chosen in tiles(packed.kind):
        for tokens in TOKENS:
            out = run_poisoned(kernel, replace(packed, tile=chosen), x[:tokens], n)
            assert torch.equal(out, whole[:tokens]), (chosen, tokens)
    assert kernel.run(packed, x[:0]).shape == (0, n)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("act", "scale"), [(PER_TOKEN_FP8, None), (GROUPS, None), (STATIC, 0.013)])
def test_activations_become_the_references_codes(act: Spec, scale: float | None, dtype: torch.dtype) -> None:
    x = (torch.randn(37, 1040, device=CUDA) * torch.logspace(-6, 4, 37, device=CUDA)[:, None]).to(dtype)
    x[3], x[5, 7] = 0, 6e4
    given = None if scale is None else torch.tensor([[scale]], device=CUDA)
    codes, scales = linear_hopper_w8.quantize(x, act, given, 64)
    wanted, wanted_scales = reference.quantize_float8(x, act, given)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    if scale is None:
        assert torch.equal(scales[:, :37].t() if act.group else scales[:, None], wanted_scales)


@pytest.mark.parametrize("tokens", [1, 17, 128, 300])
def test_nothing_is_read_or_written_past_the_end(tokens: int) -> None:
    """The input sits before poison; its memory ends inside a tile of tokens and of channels."""
    wanted, weight, x, exact = int8_case(200, 592)
    kernel = linear_hopper_w8.KERNELS[0]
    packed = kernel.pack(weight, wanted)
    room = torch.full((tokens * 592 + 4096,), 127, dtype=torch.int8, device=CUDA)
    room[: tokens * 592] = x.codes[:tokens].reshape(-1)
    out = kernel.run(packed, Rows(room[: tokens * 592].view(tokens, 592), x.scale[:tokens]))
    assert torch.equal(out, exact[:tokens])
    assert (room[tokens * 592 :] == 127).all()


@pytest.mark.parametrize("shape", [(960, 576), (5120, 1040), (200, 1152)])
def test_16_bit_outputs_are_the_exact_ones_rounded(shape: tuple[int, int]) -> None:
    wanted, weight, x, exact = int8_case(*shape)
    kernel = linear_hopper_w8.KERNELS[0]
    packed = kernel.pack(weight, replace(wanted, dtype=torch.bfloat16))
    for tile in (None, *WIDE[INTEGER]):
        for tokens in TOKENS:
            out = run_poisoned(kernel, replace(packed, tile=tile), head(x, tokens), shape[0])
            assert torch.equal(out, exact[:tokens].bfloat16()), (tile, tokens)


@pytest.mark.parametrize("shape", [(960, 128), (960, 256), (1024, 1152), (5120, 2176)])
@pytest.mark.parametrize(("tile", "act"), [((1, None), PER_TOKEN_FP8), ((1, 128), GROUPS)])
def test_16_bit_outputs_of_fp8_are_the_float32_ones_rounded(tile: tuple, act: Spec, shape: tuple[int, int]) -> None:
    """Sums of one, two, nine and seventeen steps: outputs leave through the memory that the last two had."""
    weight, x = float8_weight(*shape, tile), torch.randn(max(TOKENS), shape[1], device=CUDA)
    kernel = linear_hopper_w8.KERNELS[1]
    wanted = LinearShape(scheme_of(weight.spec, act), *shape, CUDA, torch.float32)
    whole = kernel.run(kernel.pack(weight, wanted), x)
    packed = kernel.pack(weight, replace(wanted, dtype=torch.bfloat16))
    for chosen in (None, *WIDE[packed.kind]):
        for tokens in TOKENS:
            out = run_poisoned(kernel, replace(packed, tile=chosen), x[:tokens], shape[0])
            assert torch.equal(out, whole[:tokens].bfloat16()), (chosen, tokens)


def test_repeated_runs_in_a_graph_agree() -> None:
    """Launches overlap and share their cluster's copies: a race would show."""
    wanted, weight, x, exact = int8_case(5120, 2048)
    kernel = linear_hopper_w8.KERNELS[0]
    packed = kernel.pack(weight, wanted)
    for tokens in (16, 128, 700):
        part = head(x, tokens)
        kernel.run(packed, part)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [kernel.run(packed, part) for _ in range(20)]
        for _ in range(5):
            for out in outs:
                out.zero_()
            graph.replay()
            assert all(torch.equal(out, exact[:tokens]) for out in outs)


def test_it_is_chosen() -> None:
    for spec, act in ((INT8_CHANNEL, PER_TOKEN_INT8), (Spec(FP8, (1, None)), PER_TOKEN_FP8), (Spec(FP8, (128, 128)), GROUPS)):
        shape = LinearShape(scheme_of(spec, act), 512, 1024, CUDA, torch.bfloat16)
        choice = choose(shape)
        assert choice.kernel.name.startswith("hopper"), choice.refusals

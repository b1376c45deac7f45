"""16-bit weights on a Hopper GPU: against float64, every tile one result, nothing past the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from nybble.formats.spec import scheme_of
from nybble.kernels import linear_hopper_16, selftest
from nybble.kernels.linear_hopper_16 import Packed, most_tokens, multiply
from nybble.kernels.linear_hopper_w8 import Tile
from nybble.kernels.registry import LinearShape, choose, ops_for

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(960, 576), (5120, 5120), (200, 1160), (1003, 400), (64, 8), (15360, 1024)]  # 5120 x 5120 is added in shares
TOKENS = (1, 7, 64, 131, 256, 300)
CLOSE = 2e-5  # a tensor core's float32 sums lose a bit in each of K / 16 additions; rounding to bf16 costs 1.7e-3
OTHERS = {Tile(8), Tile(24, 1, 1, 2), Tile(48, 1, 2, 2), Tile(64, 3), Tile(128, 2, 4, staged=True), Tile(144, 2, 2, order=3),
          Tile(256, 2, 2, staged=True), Tile(128, 3, 1, staged=True), Tile(32, 1, 4, rows_held=40),
          Tile(64, 2, 2, rows_held=120), Tile(128, 4, rows_held=216)}  # fmt: skip
SHARED = {Tile(16, 1, 1, 2, shares=2), Tile(64, 2, 2, shares=2), Tile(128, 3, 1, shares=3), Tile(256, 2, 2, shares=3),
          Tile(128, 2, 1, shares=4), Tile(32, 2, 4, shares=2), Tile(64, 2, 2, shares=2, rows_held=88),
          Tile(128, 3, 1, shares=4, rows_held=176)}  # fmt: skip


def case(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> (weight, input, the result in float64)."""
    generator = torch.Generator(CUDA).manual_seed(n + k)
    weight = torch.randn(n, k, device=CUDA, generator=generator).to(dtype)
    x = torch.randn(max(TOKENS), k, device=CUDA, generator=generator).to(dtype)
    x[1] = 0
    return weight, x, x.double() @ weight.double().t()


def run_poisoned(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """The memory the output will get holds NaN before."""
    torch.full((len(x), packed.weight.shape[0]), float("nan"), device=CUDA, dtype=packed.dtype)
    return multiply(packed, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_tile_gives_one_close_result(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x, exact = case(*shape, dtype)
    packed = Packed(weight, torch.float32)
    for tiles in ({None}, OTHERS, *({tile for tile in SHARED if tile.shares == n} for n in (2, 3, 4))):
        first = None
        for tile in tiles:
            if tile is not None and -(-shape[1] // 64) < tile.shares:
                continue  # a share each at least
            for tokens in TOKENS:
                out = run_poisoned(replace(packed, tile=tile), x[:tokens])
                assert ((out - exact[:tokens]).norm() / exact[:tokens].norm()).item() < CLOSE, (tile, tokens)
                first = multiply(replace(packed, tile=tile), x) if first is None else first
                assert torch.equal(out, first[:tokens]), (tile, tokens)
                rounded = run_poisoned(replace(packed, tile=tile, dtype=dtype), x[:tokens])
                assert torch.equal(rounded, out.to(dtype)), (tile, tokens)
    assert multiply(packed, x[:0]).shape == (0, shape[0])


@pytest.mark.parametrize("tokens", [1, 17, 128, 256])
def test_nothing_is_read_or_written_past_the_end(tokens: int) -> None:
    """Input and weight sit before infinities; their memory ends inside a tile of tokens, of rows and of channels."""
    weight, x, exact = case(200, 600, torch.bfloat16)
    rooms = []
    for part in (x[:tokens], weight):
        room = torch.full((part.numel() + 4096,), float("inf"), dtype=torch.bfloat16, device=CUDA)
        room[: part.numel()] = part.reshape(-1)
        rooms.append(room[: part.numel()].view(part.shape))
    out = multiply(Packed(rooms[1], torch.float32), rooms[0])
    assert ((out - exact[:tokens]).norm() / exact[:tokens].norm()).item() < CLOSE


@pytest.mark.parametrize("shape", [(512, 640), (5120, 2048)])
def test_what_is_no_number_stays_so(shape: tuple[int, int]) -> None:
    weight, x, _ = case(*shape, torch.bfloat16)
    x[2, 5], x[3, 9], weight[7, 11] = float("nan"), float("inf"), float("nan")
    out, want = multiply(Packed(weight, torch.bfloat16), x[:64]), F.linear(x[:64].float(), weight.float())
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(out.isinf(), want.isinf())


def test_repeated_runs_in_a_graph_agree() -> None:
    """Launches overlap, share their cluster's copies and send sums to each other: a race would show."""
    for n in (15360, 5120):
        weight, x, _ = case(n, 2048, torch.bfloat16)
        packed = Packed(weight, torch.bfloat16)
        for tokens in (16, 128, 256):
            want = multiply(packed, x[:tokens])
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = [multiply(packed, x[:tokens]) for _ in range(20)]
            for _ in range(5):
                for out in outs:
                    out.zero_()
                graph.replay()
                assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    weight, hidden, exact = case(32001, 1024, dtype)
    ops = ops_for(CUDA)
    whole = ops.logits(hidden.float(), weight)
    assert whole.dtype == torch.float32
    assert ((whole - exact).norm() / exact.norm()).item() < CLOSE
    for tokens in (1, 5, 128, 200):
        assert torch.equal(ops.logits(hidden[:tokens], weight), whole[:tokens])
    odd = ops.logits(hidden[:, :1020], weight[:, :1020])  # not a map's: another kernel's
    assert ((odd[0] - hidden[0, :1020].double() @ weight[:, :1020].double().t()).norm() / odd[0].norm()).item() < CLOSE


def test_it_is_chosen_and_larger_batches_are_not_its() -> None:
    shape = LinearShape(scheme_of(None, None), 512, 1024, CUDA, torch.bfloat16)
    choice = choose(shape)
    assert choice.kernel is linear_hopper_16.KERNELS[0]
    assert selftest.failure(choice.kernel, shape) is None
    wrong = replace(choice.kernel, run=lambda packed, x: choice.kernel.run(packed, x).roll(1, -1))
    assert "off by" in (selftest.failure(wrong, shape) or "")
    weight, x, _ = case(5120, 5120, torch.bfloat16)
    packed = choice.kernel.pack(weight, replace(shape, out_features=5120, in_features=5120))
    assert packed.weight.data_ptr() == weight.data_ptr()  # not copied
    assert torch.equal(choice.kernel.run(packed, x[: most_tokens(5120, 5120)])[:5], choice.kernel.run(packed, x[:5]))
    more = x.repeat(4, 1)
    assert torch.equal(choice.kernel.run(packed, more), F.linear(more, weight))

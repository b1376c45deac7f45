"""Fused ops and paged attention on a GPU: against `kernels.reference`, and bit for bit against themselves in other batches."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from ops_cases import attention_case, make_step, poisoned_cache  # noqa: E402

from nybble.formats.numerics import quantize_rows  # noqa: E402
from nybble.kernels import reference  # noqa: E402
from nybble.kernels.registry import Ops, ops_for  # noqa: E402
from nybble.kernels.types import LayerKV, Rows, Step, Turn  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
KINDS = ("bf16", "fp16", "int8", "int4", "fp8", "fp8_e5m2")
BF16 = torch.bfloat16


def on_gpu(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def case(name: str, *shape, **more) -> tuple[torch.Tensor, LayerKV, Step]:
    return attention_case(name, *shape, device="cuda", dtype=torch.float16 if name == "fp16" else BF16, **more)


def attend(q: torch.Tensor, kv: LayerKV, step: Step, scale: float = 0.1, window: int = 0) -> torch.Tensor:
    """The op with its output buffer's memory full of NaN."""
    from nybble.kernels.attention_triton import attention

    poison = torch.full_like(q, float("nan"))
    del poison  # the caching allocator hands the same memory to the op
    return attention(q, kv, step, scale, window)


def check(q: torch.Tensor, kv: LayerKV, step: Step, scale: float = 0.1, window: int = 0) -> None:
    want = reference.attention(q.float(), kv, step, scale, window)
    got = attend(q, kv, step, scale, window).float()
    assert torch.isfinite(got).all()
    assert (got - want).norm() <= 4e-3 * want.norm()  # outputs and probabilities are 16-bit
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1)])
def test_mixed_batch(name: str, dim: int, heads: int, kv_heads: int) -> None:
    check(*case(name, [1, 70, 700, 2400, 130, 33, 300], [1, 1, 1, 1, 130, 20, 3], heads, kv_heads, dim, 32), dim**-0.5)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_block_sizes(block_size: int, kv_heads: int) -> None:
    check(*case("int8", [500, 65, 200], [1, 1, 120], 4, kv_heads, 128, block_size))


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("window", [1, 100, 1024])
def test_window(name: str, window: int) -> None:
    for kv_heads in (4, 1):
        check(*case(name, [1500, 90, 700], [1, 1, 300], 4, kv_heads, 64, 64), window=window)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_long_context(kv_heads: int) -> None:
    check(*case("int8", [70000, 40], [1, 1], 2, kv_heads, 64, 64), 0.05)


def test_fp32_model() -> None:
    q, kv, step = attention_case("fp32", [300, 40, 90], [1, 1, 70], 4, 2, 64, 16, device="cuda")
    torch.testing.assert_close(attend(q, kv, step), reference.attention(q, kv, step, 0.1, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 5e3])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_values_of_any_size(scale: float, kv_heads: int) -> None:
    """V at the ends of what fp16 parameters hold: probabilities times scale_v must neither overflow nor vanish in fp16."""
    q, kv, step = case("int8", [300, 80], [1, 60], 2, kv_heads, 64, 64)
    for part in (kv.v_params,):
        part.copy_((part.float() * scale).clamp(-6e4, 6e4))
    want = reference.attention(q.float(), kv, step, 0.1, 0)
    got = attend(q, kv, step).float()
    assert (got - want).norm() <= 1e-2 * want.norm()


def rows_of(step: Step, rows: list[int], keep_width: bool) -> tuple[Step, torch.Tensor]:
    """The step with some of its rows only, and the indices of their tokens."""
    start = step.query_start.tolist()
    tokens = torch.cat([torch.arange(start[r], start[r + 1]) for r in rows]).cuda()
    counts = [start[r + 1] - start[r] for r in rows]
    context = step.context_len[rows]
    longest = int(context.max())
    decode = sum(r < step.num_decode for r in rows)
    table = step.block_table[rows] if keep_width else step.block_table[rows, : -(-longest // 16)].contiguous()
    return Step(step.token_ids[tokens], step.positions[tokens], step.slots[tokens],
                torch.tensor([0, *counts]).cumsum(0).int().cuda(), context, table, decode, max(counts[decode:], default=0),
                step.max_context if keep_width else longest, None), tokens


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
def test_a_row_s_bits_do_not_depend_on_the_batch(name: str, heads: int, kv_heads: int) -> None:
    contexts, queries = [900, 3, 2300, 256, 257, 90, 400, 130], [1, 1, 1, 1, 1, 90, 129, 1]
    q, kv, step = case(name, contexts, queries, heads, kv_heads, 128, 16, decode=5)
    whole = attend(q, kv, step)
    assert torch.equal(attend(q, kv, step), whole)
    for rows in ([0], [1], [2, 4], [3, 1, 0], [5], [6], [7], [4, 6, 5], [0, 1, 2, 3, 4]):
        some, tokens = rows_of(step, rows, keep_width=len(rows) % 2 == 0)
        assert torch.equal(attend(q[tokens].contiguous(), kv, some), whole[tokens]), rows


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("window", [0, 150])
def test_sharing_a_row_among_programs_moves_no_bit(name: str, window: int) -> None:
    """Summed in registers or by `_combine`, in one group of splits or two."""
    from nybble.kernels.attention_triton import decode

    for contexts in ([3, 770, 300, 2300], [17000, 100]):
        q, kv, step = case(name, contexts, [1] * len(contexts), 8, 2, 128, 32)
        outs = []
        for programs in (1, 2, 3, 7, 40):
            outs.append(torch.full_like(q, float("nan")))
            decode(q, kv, step, 0.1, window, outs[-1], programs=programs)
        assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("group", [1, 4])
def test_many_rows_take_the_direct_path_with_the_same_bits(name: str, group: int) -> None:
    """400 rows x 12 heads are enough programs that one sums all splits of a row; alone, a row is shared and combined."""
    contexts = [(37 * i) % 1900 + 1 for i in range(400)]
    q, kv, step = case(name, contexts, [1] * 400, 12 * group, 12, 128, 64)
    whole = attend(q, kv, step)
    for row in (0, 7, 51, 399):
        some, tokens = rows_of(step, [row], keep_width=False)
        assert torch.equal(attend(q[tokens].contiguous(), kv, some), whole[tokens])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("window", [0, 150])
def test_chunks_of_a_prompt_give_the_same_bits(name: str, window: int) -> None:
    length = 700
    q, kv, step = case(name, [length], [length], 8, 2, 128, 32, decode=0)
    whole = attend(q, kv, step, window=window)
    for sizes in ([64] * 10 + [60], [1, 130, 7, 500, 62], [333, 367]):
        done, parts = 0, []
        for size in sizes:
            chunk = replace(step, query_start=torch.tensor([0, size], dtype=torch.int32, device="cuda"), max_query=size,
                            context_len=torch.tensor([done + size], dtype=torch.int32, device="cuda"), max_context=done + size)
            parts.append(attend(q[done : done + size].contiguous(), kv, chunk, window=window))
            done += size
        assert torch.equal(torch.cat(parts), whole), sizes


@pytest.mark.parametrize("dim", [128, 80])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_layers_repeat_each_other_s_launches_whatever_their_scales(name: str, dim: int, monkeypatch) -> None:
    from nybble.kernels import attention_triton as kernels

    launch, launched = kernels.launch, []
    monkeypatch.setattr(kernels, "launch", lambda kernel, *rest, **options: launched.append(kernel) or
                        launch(kernel, *rest, **options))
    q, kv, step = case(name, [900, 1500, 70, 700], [1, 1, 70, 300], 8, 2, dim, 64)
    before: dict = {}
    for layer, (k_scale, v_scale) in enumerate([(0.05, 0.02), (0.5, 0.001), (0.01, 1.0)]):
        if name == "fp8":
            kv = replace(kv, k_scale=k_scale, v_scale=v_scale)
        kv = replace(kv, **{part: x.flip(1) for part, x in vars(kv).items() if isinstance(x, torch.Tensor)})
        found = kernels.attention(q.flip(0), kv, step, 0.1, 0, before=before)
        assert len(launched) == len(set(launched)) * (layer + 1)
        assert torch.equal(found, attend(q.flip(0), kv, step))


def test_a_graph_replays_with_other_contexts() -> None:
    """Captured at full table width with padding rows; replayed after contexts and tables changed in place."""
    q, kv, step = case("int8", [900, 100, 30, 1], [1] * 4, 8, 8, 128, 64)
    from nybble.kernels.attention_triton import attention

    attention(q, kv, step, 0.1, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, kv, step, 0.1, 0)
    for contexts in ([900, 100, 30, 1], [500, 64, 0, 1]):
        step.context_len.copy_(torch.tensor(contexts))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, attention(q, kv, step, 0.1, 0))
        assert torch.isfinite(out).all()


# ---- fused ops ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["triton", "hopper"])
def ops(request: pytest.FixtureRequest) -> Ops:
    from nybble.kernels import nvrtc, ops_triton

    if request.param == "triton":
        return ops_triton.OPS
    if torch.cuda.get_device_capability()[0] != 9 or nvrtc.missing():
        pytest.skip("needs a Hopper GPU and NVRTC")
    from nybble.kernels import ops_hopper

    return ops_hopper.OPS


def is_rounded(rows: Rows, exact: torch.Tensor) -> None:
    step = exact.abs().amax(-1, keepdim=True) / 127
    assert ((rows.codes * rows.scale[:, None] - exact).abs() <= step * 0.502).all()
    assert (rows.codes.abs().amax(1) == 127).all()


def same_row(one: Rows, rows: Rows, row: int) -> None:
    assert torch.equal(one.codes[0], rows.codes[row])
    assert torch.equal(one.scale[0], rows.scale[row])


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("width", [80, 576, 4096, 5120, 8192, 13824])
def test_rms_norm_and_row_independence(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x, residual = on_gpu(33, width, dtype=dtype), on_gpu(33, width, seed=1, dtype=dtype)
    weight = on_gpu(width, seed=2, dtype=dtype)
    for other in (residual, None):
        wide = (x if other is None else (x.float() + other.float()).to(dtype)).double()
        exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        for given in (weight.float(), weight):  # models have float32 ones
            rows, h = ops.rms_norm(x, given, 1e-5, other, True)
            assert torch.equal(h.double(), wide)
            is_rounded(rows, exact)
        y, _ = ops.rms_norm(x, weight, 1e-5, other, False)
        torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-6)
        same_row(ops.rms_norm(x[7:8], weight, 1e-5, None if other is None else other[7:8], True)[0], rows, 7)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("width", [96, 1536, 13824, 14336])
def test_silu_mul_and_quantize_rows(ops: Ops, width: int, dtype: torch.dtype) -> None:
    x = on_gpu(33, 2 * width, dtype=dtype) * 3
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    rows = ops.silu_mul(x, True)
    is_rounded(rows, exact)
    same_row(ops.silu_mul(x[9:10], True), rows, 9)
    torch.testing.assert_close(ops.silu_mul(x, False).double(), exact, rtol=2**-8, atol=1e-5)
    x[3], x[4] = 0, (torch.arange(2 * width) % 255 - 127 + 0.5).to(dtype)  # nothing, and ties
    codes, scale = quantize_rows(x.cpu())
    got = ops.quantize_rows(x)
    assert torch.equal(got.codes.cpu(), codes)
    assert torch.equal(got.scale.cpu(), scale)


@pytest.mark.parametrize(
    ("width", "block"), [(96, 4), (96, 32), (2432, 128), (1536, 512), (13824, 512), (14336, 2048), (8192, 8192)]
)
def test_silu_mul_turned_by_hadamard_s_matrix(ops: Ops, width: int, block: int) -> None:
    x = on_gpu(5, 2 * width) * 3
    gate, up = x.double().chunk(2, -1)
    matrix = torch.ones(1, 1, dtype=torch.float64, device="cuda")
    while len(matrix) < block:  # Sylvester: [[H, H], [H, -H]]
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    exact = ((gate / (1 + (-gate).exp()) * up).view(5, -1, block) @ matrix / block**0.5).view(5, width)
    rows = ops.silu_mul(x, True, block)
    is_rounded(rows, exact)
    same_row(ops.silu_mul(x[2:3], True, block), rows, 2)
    torch.testing.assert_close(ops.silu_mul(x, False, block).double(), exact, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("width", [576, 13824])
def test_what_is_not_a_number_reaches_the_scale_of_its_row(ops: Ops, width: int, bad: float, dtype: torch.dtype) -> None:
    """Else a request that overflowed would go on with zeros where it should end with an error."""
    x, weight = on_gpu(6, 2 * width, dtype=dtype), on_gpu(width, seed=1, dtype=dtype)

    def rows() -> list[Rows]:
        half = x[:, width:].contiguous()
        return [ops.rms_norm(half, weight, 1e-5, half, True)[0], ops.quantize_rows(half), ops.silu_mul(x, True),
                ops.silu_mul(x[:3], True), ops.silu_mul(x, True, 64)]

    whole = rows()
    x[1, width + 77] = bad
    for found, before in zip(rows(), whole, strict=True):
        assert not found.scale[1].isfinite()
        others = torch.arange(len(found.scale)) != 1
        assert torch.equal(found.scale[others], before.scale[others])
        assert torch.equal(found.codes[others], before.codes[others])


SHAPES = [(4, 2, 1, 4), (8, 4, 1, 1), (2, 4, 4, 4), (3, 3, 1, 5), (1, 5, 1, 1)]


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("name", "heads", "kv_heads", "block_size"),
                         [("int8", 40, 40, 64), ("int8", 16, 4, 32), ("int8", 20, 4, 128),
                          ("int4", 8, 8, 64), ("int4", 32, 8, 128), ("int4", 16, 8, 64), ("int4", 20, 4, 64)])
def test_generated_tokens_at_once_have_the_bits_of_three_ops(name: str, heads: int, kv_heads: int, block_size: int,
                                                             quantize: bool) -> None:
    from nybble.kernels import attention_triton, decode_hopper, nvrtc, ops_triton

    if nvrtc.refusal(torch.device("cuda")):
        pytest.skip("wants a Hopper GPU")
    contexts = [1, 2, 33, 64, 65, 350, 512, 700, 1000, 300]
    _, kv, step = case(name, contexts, [1] * 10, heads, kv_heads, 128, block_size)
    kept = torch.arange(10) != 3
    step.slots[3] = -1  # padding: writes nothing
    angle = torch.arange(1000)[:, None] / 10.0 ** torch.linspace(0, 3, 64)
    qkv, cos_sin = on_gpu(10, (heads + 2 * kv_heads) * 128), torch.cat((angle.cos(), angle.sin()), 1).cuda()
    copies = [{n: x.clone() for n, x in vars(kv).items() if isinstance(x, torch.Tensor)} for _ in range(1 + len(SHAPES))]
    caches = [replace(kv, **copy) for copy in copies]
    q = ops_triton.rope_write(qkv, caches[0], step, cos_sin, kv_heads, None, None, 0.0)
    check(q, caches[0], step)
    want = torch.full_like(q, float("nan"))
    attention_triton.decode(q, caches[0], step, 0.1, 0, want)
    assert decode_hopper.fits(qkv, heads, kv, step, 128, 0)
    for cache, shape in zip(caches[1:], SHAPES, strict=True):
        found = decode_hopper.run(qkv, heads, cache, step, 0.1, cos_sin, quantize, decode_hopper.Shape(*shape))
        if quantize:
            rows = ops_triton.quantize_rows(want.flatten(1))
            assert torch.equal(found.codes[kept], rows.codes[kept])
            assert torch.equal(found.scale[kept], rows.scale[kept])
        else:
            assert torch.equal(found[kept], want[kept])
            seen = decode_hopper.run(q, heads, cache, step, 0.1, None, False, decode_hopper.Shape(*shape))
            assert torch.equal(seen, want)
        for one, other in zip(copies[0].values(), vars_of(cache), strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("rows", [6, 128])
def test_older_tiles_are_copied_while_the_newest_token_is_still_being_written(name: str, rows: int) -> None:
    from nybble.kernels import decode_hopper, nvrtc

    if nvrtc.refusal(torch.device("cuda")):
        pytest.skip("wants a Hopper GPU")
    contexts = [1 + 37 * row % 800 for row in range(rows)]
    _, kv, step = case(name, contexts, [1] * rows, 40, 40, 128, 64)
    assert step.sees_own
    ops, angle = ops_for(torch.device("cuda")), torch.arange(1000)[:, None] / 10.0 ** torch.linspace(0, 3, 64)
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1).cuda()
    inputs = [on_gpu(rows, 120 * 128, seed=seed) for seed in range(12)]

    def attended(qkv: torch.Tensor, wait: bool) -> torch.Tensor:
        q = ops.rope_write(qkv, kv, step, cos_sin, 40, None, None, 0.0)
        if wait:
            torch.cuda.synchronize()
        return decode_hopper.run(q, 40, kv, step, 0.1, None, False)

    want = [attended(qkv, True) for qkv in inputs]
    for _ in range(5):
        for one, other in zip([attended(qkv, False) for qkv in inputs], want):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_generated_token_that_is_not_a_number_reaches_the_scale_of_its_row(name: str) -> None:
    from nybble.kernels import decode_hopper, nvrtc

    if nvrtc.refusal(torch.device("cuda")):
        pytest.skip("wants a Hopper GPU")
    _, kv, step = case(name, [1, 33, 350], [1] * 3, 8, 2, 128, 64)
    qkv, cos_sin = on_gpu(3, 12 * 128), torch.ones(1000, 128, device="cuda")
    whole = decode_hopper.run(qkv, 8, kv, step, 0.1, cos_sin, True)
    qkv[1] = float("nan")
    found = decode_hopper.run(qkv, 8, kv, step, 0.1, cos_sin, True)
    assert found.scale[1].isnan()
    for row in (0, 2):
        same_row(Rows(found.codes[row:], found.scale[row:]), whole, row)


def vars_of(kv: LayerKV) -> list[torch.Tensor]:
    return [x for x in vars(kv).values() if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", ["fp32", *KINDS])
@pytest.mark.parametrize(("dim", "rotary", "normed"), [(128, 128, True), (80, 32, False), (96, 96, False), (256, 64, True)])
def test_rope_write(name: str, dim: int, rotary: int, normed: bool) -> None:
    from nybble.kernels.ops_triton import rope_write

    heads, kv_heads = 12, 3
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(name, BF16)
    step = make_step([500, 40, 90], [1, 1, 61], 32, 30, "cuda")
    step.slots[20] = -1
    qkv = on_gpu(63, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angle = torch.arange(600)[:, None] / 10 ** torch.linspace(0, 4, rotary // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1).cuda()
    norms = (on_gpu(dim, seed=3, dtype=dtype), on_gpu(dim, seed=4, dtype=dtype)) if normed else (None, None)
    caches = [poisoned_cache(name, 30, kv_heads, 32, dim, "cuda", k_scale=0.02, v_scale=0.013) for _ in range(2)]
    want = reference.rope_write(qkv, caches[0], step, cos_sin, kv_heads, *norms, 1e-6)
    got = rope_write(qkv, caches[1], step, cos_sin, kv_heads, *norms, 1e-6)
    ulp = 1e-5 if name == "fp32" else 2**-7
    torch.testing.assert_close(got, want, rtol=ulp, atol=1e-4)
    for part in ("k", "v"):
        a, b = (getattr(c, part) for c in caches)
        if a.element_size() == 1:
            a, b = a.view(torch.uint8).int(), b.view(torch.uint8).int()
            if name == "int4":
                a, b = torch.cat((a & 15, a >> 4), -1), torch.cat((b & 15, b >> 4), -1)
            assert (a - b).abs().max() <= 2
            assert (a != b).float().mean() < 1e-2
        else:
            torch.testing.assert_close(a, b, rtol=ulp, atol=1e-4, equal_nan=True)
        if caches[0].k_params is not None:
            a, b = (getattr(c, f"{part}_params") for c in caches)
            torch.testing.assert_close(a, b, rtol=2**-6, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"),
                         [(40, 40, 128), (32, 8, 128), (9, 3, 64), (5, 5, 80), (12, 4, 96), (8, 1, 256)])
def test_hopper_writes_the_cache_that_triton_writes(name: str, heads: int, kv_heads: int, dim: int) -> None:
    from nybble.kernels import cache_hopper, nvrtc, ops_triton

    if nvrtc.refusal(torch.device("cuda")):
        pytest.skip("wants a Hopper GPU")
    step = make_step([500, 40, 90], [1, 1, 61], 32, 30, "cuda")
    step.slots[20] = -1
    qkv = on_gpu(63, (heads + 2 * kv_heads) * dim) * 2 ** on_gpu(63, 1, seed=1, dtype=torch.float32) * 3
    qkv[5], qkv[8], qkv[9], qkv[10] = 0.25, qkv[8] * 1e4, qkv[9] * 1e-6, -0.0
    qkv[6, :5], qkv[7] = float("nan"), qkv[7] + 30  # at one end of its range a minimum is rounded by many steps
    qkv = qkv.to(torch.float16 if name == "fp16" else BF16)
    angle = torch.arange(600)[:, None] / 10 ** torch.linspace(0, 4, dim // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1).cuda()
    scales = {"k_scale": 0.02, "v_scale": 0.013} if name.startswith("fp8") else {}
    caches = [poisoned_cache(name, 30, kv_heads, 32, dim, "cuda", **scales) for _ in range(4)]
    want = ops_triton.rope_write(qkv, caches[0], step, cos_sin, kv_heads, None, None, 0.0)
    assert cache_hopper.fits(qkv, caches[0], dim, dim)
    for cache, shape in zip(caches[1:], (None, cache_hopper.Shape(2, 1), cache_hopper.Shape(5, 4))):
        got = cache_hopper.rope_write(qkv, cache, step, cos_sin, kv_heads, dim, shape)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(vars_of(cache), vars_of(caches[0]), strict=True):
            if name != "int4" or dim == 128 or one.dtype != torch.float16:
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
            else:  # Triton sums the errors of a head in an order of its own
                torch.testing.assert_close(one, other, rtol=2**-9, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dim", [128, 80])
@pytest.mark.parametrize(("block_size", "window"), [(64, 0), (16, 50)])
def test_hopper_gathers_what_triton_gathers(name: str, dim: int, block_size: int, window: int) -> None:
    from nybble.kernels import attention_triton, cache_hopper, nvrtc

    if nvrtc.refusal(torch.device("cuda")):
        pytest.skip("wants a Hopper GPU")
    q, kv, step = case(name, [500, 40, 290, 700], [1, 33, 161, 300], 6, 3, dim, block_size)
    rooms = []

    def room(shape: tuple[int, ...], **options) -> torch.Tensor:
        rooms.append(torch.full(shape, 7.0, **options))
        return rooms[-1]

    for gather in (attention_triton._gather, cache_hopper.Gather(q.device)):
        launch = lambda kernel, *rest, **options: attention_triton.launch(  # noqa: E731
            gather if kernel is attention_triton._gather or isinstance(kernel, cache_hopper.Gather) else kernel,  # noqa: B023
            *rest, **options)
        attention_triton.prompt(q, kv, step, 0.1, window, torch.empty_like(q), launch=launch, room=room)
    assert torch.equal(*(each.view(torch.int16) for each in rooms))


@pytest.mark.parametrize("name", ["fp32", *KINDS])
@pytest.mark.parametrize(("dim", "rotary", "heads"), [(64, 64, 9), (80, 32, 12), (96, 96, 3), (128, 128, 24), (256, 64, 6)])
def test_turned_rope_write_and_its_independence_of_the_batch(name: str, dim: int, rotary: int, heads: int) -> None:
    from nybble.kernels.ops_triton import rope_write, turn_heads

    kv_heads = 3
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(name, BF16)
    matrix = torch.float32 if dtype == torch.float32 else torch.float16
    step = make_step([500, 40, 90], [1, 1, 61], 32, 30, "cuda")
    step.slots[20] = -1
    qkv = on_gpu(63, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angle = torch.arange(600)[:, None] / 10 ** torch.linspace(0, 4, rotary // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1).cuda()
    random = (on_gpu(kv_heads, dim, dim, seed=5 + i, dtype=torch.float32) for i in range(4))
    k, q, v, out = (torch.linalg.qr(x)[0].to(matrix) for x in random)  # stored by columns: strides are to be minded
    turn = Turn(k, q, on_gpu(kv_heads, dim, seed=9, dtype=torch.float32), *((v, out) if name == "int4" else ()))
    caches = [poisoned_cache(name, 30, kv_heads, 32, dim, "cuda", k_scale=0.02, v_scale=0.013) for _ in range(3)]
    want = reference.rope_write(qkv, caches[0], step, cos_sin, kv_heads, None, None, 1e-6, turn)
    got = rope_write(qkv, caches[1], step, cos_sin, kv_heads, None, None, 1e-6, turn)
    room = {"rtol": 1e-5, "atol": 1e-4} if name == "fp32" else {"rtol": 2**-7, "atol": 2e-2}
    torch.testing.assert_close(got, want, **room)
    torch.testing.assert_close(turn_heads(got, out), reference.turn_heads(got, out), **room)
    room = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 4e-2, "int8": 0.05, "int4": 0.9, "fp8": 0.6, "fp8_e5m2": 1.2}[name]
    rows = torch.unique(step.block_table[2, :3]).long()
    for a, b in zip(*(reference.gather_kv(c, rows, 96) for c in caches[:2])):
        assert torch.equal(a.isnan(), b.isnan())
        assert (a - b).nan_to_num().abs().max() <= room
        # K enters the product in fp16: an 8-bit code now and then falls to the other side of a step
        assert ((a - b).nan_to_num().abs() > room / 8).float().mean() < (0.2 if name in ("int8", "fp8") else 1e-2)
    alone = replace(step, positions=step.positions[1:2], slots=step.slots[1:2], query_start=step.query_start[:2])
    assert torch.equal(rope_write(qkv[1:2], caches[2], alone, cos_sin, kv_heads, None, None, 1e-6, turn), got[1:2])
    block, offset = divmod(int(step.slots[1]), 32)
    for part in ("k", "v"):
        one, all_ = (getattr(c, part)[block, :, offset] for c in (caches[2], caches[1]))
        assert torch.equal(one.contiguous().view(torch.uint8), all_.contiguous().view(torch.uint8))

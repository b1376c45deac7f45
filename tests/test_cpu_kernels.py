"""The C kernels against float64 arithmetic and the torch references, and the promise that batching never changes a bit.

Every test runs on the code for this machine, on AVX2 code where the machine has it, and on the portable loops.
"""

import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import reduce
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from nybble.formats.numerics import quantize_rows, quantize_weight
from nybble.formats.qtensor import QTensor, dequantize, inner_codes
from nybble.formats.spec import FP8, INT4, INT8, INT8_CHANNEL, PER_TOKEN_INT8, SCHEMES, Scheme, Spec
from nybble.kernels import cpu, reference
from nybble.kernels.registry import LinearShape
from nybble.kernels.types import LayerKV, Rows, Step, Turn

BUILDS = {"native": (), "portable": ("-DNYBBLE_PORTABLE",)}
if platform.machine() == "x86_64" and "avx2" in Path("/proc/cpuinfo").read_text():
    BUILDS["avx2"] = ("-march=x86-64-v3",)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quiet():
    """One thread, because torch's OpenMP stalls on a busy machine; the tests about threads ask for more."""
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BUILDS, scope="module")
def build(request) -> tuple[str, ...]:
    if cpu._compiler() is None:
        pytest.skip("no C compiler on this machine")
    return BUILDS[request.param]


@pytest.fixture
def ops(build):
    return cpu.ops(*build)


def linear(build, weight, scheme, floating=False):
    shape = LinearShape(scheme, *weight.shape, CPU, torch.float32)
    kernel = next(k for k in cpu.kernels(*build) if k.accepts(shape) is None)
    packed = kernel.pack(weight, shape)
    return lambda x: kernel.run(packed, x)


def random_codes(spec: Spec, n: int, k: int, generator) -> QTensor:
    low, high = int(spec.num.qmin), int(spec.num.qmax)
    codes = torch.randint(low, high + 1, (n, k), generator=generator).to(torch.int8)
    groups = k // spec.group if spec.group else 1
    scale = torch.rand(n, groups, generator=generator) * 0.02
    if spec.over is not None:  # QQQ: small multipliers that bring int4 onto the int8 grid
        scale = torch.rand(n, groups, generator=generator) * 20
        return QTensor(spec, codes, scale, over=torch.rand(n, 1, generator=generator) * 0.01)
    return QTensor(spec, codes, scale)


LINEAR_SHAPES = [(1, 192, 576), (3, 1, 1536), (17, 33, 100), (65, 192, 576), (13, 50, 1), (250, 40, 256), (0, 64, 64)]


@pytest.mark.parametrize("scheme", ["w4a8", "w4a8_g128", "w4a8_g64", "w4a8_g32", "w4a8_qqq_g128", "w8a8"])
@pytest.mark.parametrize(("m", "n", "k"), LINEAR_SHAPES)
def test_linear_equals_float64(build, scheme, m, n, k):
    spec = SCHEMES[scheme].weight
    if spec.group and k % spec.group:
        k = max(1, k // spec.group) * spec.group
    generator = torch.Generator().manual_seed(n * k)
    weight = random_codes(spec, n, k, generator)
    rows = Rows(torch.randint(-127, 128, (m, k), generator=generator).to(torch.int8), torch.rand(m, generator=generator))
    got = linear(build, weight, SCHEMES[scheme])(rows)
    want = rows.codes.double() @ dequantize(weight, torch.float64).t() * rows.scale.double()[:, None]
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6 * float(want.abs().max()) if m else 0)


@pytest.mark.parametrize("num", [INT4, INT8])
@pytest.mark.parametrize(("m", "k"), [(1, 1040), (5, 1040), (31, 1037)])
def test_integer_part_is_exact(build, num, m, k):
    """With unit scales the output is the int32 itself, here with the largest codes (< 2^24, so exact in fp32)."""
    weight = torch.full((40, k), int(num.qmax), dtype=torch.int8)
    weight[1::2] = int(num.qmin)
    codes = torch.full((m, k), 127, dtype=torch.int8)
    codes[::3] = -127
    got = linear(build, QTensor(Spec(num), weight, torch.ones(40, 1)), Scheme("unit", Spec(num), PER_TOKEN_INT8))(
        Rows(codes, torch.ones(m)))
    assert torch.equal(got.to(torch.int64), codes.long() @ weight.long().t())


def test_per_channel_and_qqq_equal_the_reference_bitwise(build):
    for name in ("w4a8", "w8a8", "w4a8_qqq_g128"):
        weight = random_codes(SCHEMES[name].weight, 70, 384, torch.Generator().manual_seed(3))
        rows = Rows(*quantize_rows(torch.randn(9, 384, generator=torch.Generator().manual_seed(4))))
        want = reference._run_int8_act((weight, torch.float32), rows)
        assert torch.equal(linear(build, weight, SCHEMES[name])(rows), want)


@pytest.mark.parametrize("k", [136, 200, 320])
def test_whole_scales_of_a_ragged_last_group_equal_the_reference(build, k):
    """Scales of 1 to 16 are multiplied in groups, which the C code walks by one length: the last one's is another."""
    generator = torch.Generator().manual_seed(k)
    codes = torch.randint(-8, 8, (40, k), generator=generator, dtype=torch.int8)
    scale = torch.randint(1, 17, (40, -(-k // 128)), generator=generator).float()
    weight = QTensor(SCHEMES["w4a8_qqq_g128"].weight, codes, scale, None, torch.rand(40, 1, generator=generator))
    rows = Rows(*quantize_rows(torch.randn(5, k, generator=generator)))
    exact = rows.codes.double() @ inner_codes(weight).double().t()
    want = exact.float() * weight.over.t() * rows.scale[:, None]
    assert torch.equal(linear(build, weight, SCHEMES["w4a8_qqq_g128"])(rows), want)


def test_qqq_uses_every_int8_code(build):
    weight = QTensor(SCHEMES["w4a8_qqq_g128"].weight, torch.tensor([[-8, 7] * 64]).to(torch.int8), torch.tensor([[17.0]]),
                     over=torch.ones(1, 1))
    assert inner_codes(weight).min() == -128
    got = linear(build, weight, SCHEMES["w4a8_qqq_g128"])(Rows(torch.full((1, 128), 127, dtype=torch.int8), torch.ones(1)))
    assert got.item() == 127 * 64 * (-128 + 119)


def test_groups_out_of_order(build):
    """GPTQ g_idx: the group of each input channel is data."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(256, generator=generator) // 64
    weight = replace(random_codes(SCHEMES["w4a8_g64"].weight, 24, 256, generator), order=order)
    rows = Rows(*quantize_rows(torch.randn(5, 256, generator=generator)))
    want = rows.codes.double() @ dequantize(weight, torch.float64).t() * rows.scale.double()[:, None]
    got = linear(build, weight, SCHEMES["w4a8_g64"])(rows)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize(("tile", "k"), [((None, None), 64), ((16, 32), 96), ((None, 32), 64), ((1, 32), 80), ((16, 32), 80),
                                         ((1, 7), 50)])
def test_tiles_of_several_rows_and_ragged_groups(build, tile, k):
    """Of each kernel that accepts: what the C code refuses is the reference's."""
    spec = Spec(INT8, tile)
    sizes = [1 if t is None else -(-size // t) for t, size in zip(tile, (37, k))]
    weight = QTensor(spec, torch.randint(-127, 128, (37, k)).to(torch.int8), torch.rand(*sizes) + 0.1)
    rows, scheme = Rows(*quantize_rows(torch.randn(4, k))), Scheme("tiles", spec, PER_TOKEN_INT8)
    want = rows.codes.double() @ dequantize(weight, torch.float64).t() * rows.scale.double()[:, None]
    shape = LinearShape(scheme, 37, k, CPU, torch.float32)
    accepted = [kernel for kernel in (*cpu.kernels(*build), *reference.KERNELS) if kernel.accepts(shape) is None]
    assert len(accepted) == 1 + (k % (tile[1] or k) == 0)
    for kernel in accepted:
        torch.testing.assert_close(kernel.run(kernel.pack(weight, shape), rows).double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scheme", ["w4a8", "w4a8_g64", "w8a8"])
def test_a_linear_row_does_not_depend_on_its_batch(build, scheme):
    generator = torch.Generator().manual_seed(5)
    run = linear(build, random_codes(SCHEMES[scheme].weight, 100, 576, generator), SCHEMES[scheme])
    rows = Rows(*quantize_rows(torch.randn(300, 576, generator=generator)))
    torch.set_num_threads(2)
    whole = run(rows)
    for first, last in ((0, 1), (7, 8), (5, 22), (299, 300), (239, 243)):
        assert torch.equal(run(Rows(rows.codes[first:last], rows.scale[first:last])), whole[first:last])


def test_refusals_name_the_reason(build):
    kernel = cpu.kernels(*build)[0]
    ask = lambda weight, act, k=576: kernel.accepts(LinearShape(Scheme("x", weight, act), 8, k, CPU, torch.float32))  # noqa: E731
    assert ask(Spec(INT4), PER_TOKEN_INT8) is None
    assert "int8 activations" in ask(Spec(INT4), None)
    assert "fp8" in ask(Spec(FP8), PER_TOKEN_INT8)
    assert "zero" in ask(Spec(INT4, zero=True), PER_TOKEN_INT8)
    packed = kernel.pack(random_codes(Spec(INT4), 8, 64, torch.Generator().manual_seed(0)),
                         LinearShape(SCHEMES["w4a8"], 8, 64, CPU, torch.float32))
    with pytest.raises(ValueError, match="64"):
        kernel.run(packed, Rows(torch.zeros(1, 32, dtype=torch.int8), torch.ones(1)))
    assert "128" in ask(Spec(INT4, (1, 128)), PER_TOKEN_INT8, 576 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 101, 576), (3, 7, 65), (4, 49, 64), (21, 100, 37), (9, 1, 16)])
def test_logits_and_float_linear(build, ops, dtype, m, n, k):
    generator = torch.Generator().manual_seed(m)
    hidden, weight = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator).to(dtype)
    got = ops.logits(hidden, weight)
    torch.testing.assert_close(got.double(), hidden.double() @ weight.double().t(), rtol=1e-5, atol=1e-5 * k**0.5)
    assert torch.equal(got, torch.cat([ops.logits(hidden[i : i + 1], weight) for i in range(m)]))
    assert torch.equal(got, linear(build, weight, SCHEMES["16bit"])(hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_channel_stays_in_its_channel(ops, dtype):
    weight = torch.randn(20, 37).to(dtype)
    weight[3] = float("nan")
    for rows in (1, 9):
        got = ops.logits(torch.randn(rows, 37), weight)
        assert got[:, 3].isnan().all()
        assert torch.cat((got[:, :3], got[:, 4:]), 1).isfinite().all()


def test_float_weights_keep_subnormals_and_infinities(ops):
    """Every half and every bfloat16 there is, through the widening of one input channel."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16)[:, None]
    for dtype in (torch.float16, torch.bfloat16):
        weight = every.view(dtype)
        for rows in (1, 6):
            got = ops.logits(torch.ones(rows, 1), weight)
            assert torch.equal(got.nan_to_num(nan=7.0), weight.float().t().expand(rows, -1).nan_to_num(nan=7.0))


@pytest.mark.parametrize(("m", "k"), [(1, 576), (3, 1537), (70, 33), (2, 1)])
def test_quantize_rows_bitwise(ops, m, k):
    """Against numpy's correctly rounded divisions; the reference too (seed 111 holds a tie that a second rounding moves)."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(111)) * torch.logspace(-8, 8, m)[:, None]
    x[m // 2] = 0
    absmax = np.maximum(np.abs(x.numpy()).max(-1), np.float32(1e-10))
    codes = np.rint(x.numpy() * (np.float32(127) / absmax)[:, None])
    for got in (ops.quantize_rows(x), Rows(*quantize_rows(x))):
        assert (got.codes.numpy() == codes).all()
        assert (got.scale.numpy() == absmax / np.float32(127)).all()


def test_quantize_rows_ties_saturation_and_nan(ops):
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -127.0], [1.0, float("nan"), 0, 0, 0, 0]])
    got = ops.quantize_rows(x)
    assert got.codes[0].tolist() == [127, 0, 2, 2, 0, -127]
    assert got.scale[0] == 1
    assert got.scale[1].isnan()


@pytest.mark.parametrize(("m", "h"), [(1, 576), (9, 100), (40, 17)])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(ops, m, h, residual):
    x, weight = torch.randn(m, h), torch.rand(h) + 0.5
    x[0] = 0
    other = torch.randn(m, h) if residual else None
    total = x if other is None else x + other
    wide = total.double()
    want = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got, hidden = ops.rms_norm(x, weight, 1e-5, other, False)
    assert torch.equal(hidden, total)
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)
    rows, hidden = ops.rms_norm(x, weight, 1e-5, other, True)
    assert torch.equal(hidden, total)
    expected = quantize_rows(got)
    assert torch.equal(rows.codes, expected[0])
    assert torch.equal(rows.scale, expected[1])
    alone, _ = ops.rms_norm(x[m - 1 :], weight, 1e-5, None if other is None else other[m - 1 :], False)
    assert torch.equal(alone, got[m - 1 :])


@pytest.mark.parametrize("size", [3, 16])
def test_a_hadamard_block_that_does_not_fit_is_refused(ops, size):
    with pytest.raises(ValueError, match=f"Hadamard block of {size} for 24 channels"):
        ops.silu_mul(torch.randn(2, 48), True, size)


@pytest.mark.parametrize(("m", "i", "size"), [(3, 1536, 512), (9, 96, 32), (2, 12, 4), (1, 4096, 4096)])
def test_silu_mul_with_a_hadamard(ops, m, i, size):
    x = torch.randn(m, 2 * i) * 8
    sylvester = reduce(torch.kron, [torch.tensor([[1.0, 1], [1, -1]], dtype=torch.float64)] * (size.bit_length() - 1))
    y = ops.silu_mul(x, False).double().unflatten(-1, (-1, size)) @ sylvester
    got = ops.silu_mul(x, False, size)
    torch.testing.assert_close(got.double(), y.flatten(1) / size**0.5, rtol=1e-5, atol=1e-4)
    assert torch.equal(got, reference.hadamard_blocks(ops.silu_mul(x, False), size))
    rows, expected = ops.silu_mul(x, True, size), quantize_rows(got)
    assert torch.equal(rows.codes, expected[0])
    assert torch.equal(rows.scale, expected[1])


@pytest.mark.parametrize(("m", "i"), [(1, 1536), (9, 100), (21, 7)])
def test_silu_mul(ops, m, i):
    x = torch.randn(m, 2 * i) * 8
    x[0, :4] = torch.tensor([0.0, -100.0, 100.0, -88.5])
    gate, up = x.double().chunk(2, -1)
    got = ops.silu_mul(x, False)
    torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=1e-6, atol=1e-30)
    expected = quantize_rows(got)
    rows = ops.silu_mul(x, True)
    assert torch.equal(rows.codes, expected[0])
    assert torch.equal(rows.scale, expected[1])
    assert torch.equal(ops.silu_mul(x[m - 1 :], False), got[m - 1 :])


# ---- cache and attention ------------------------------------------------------------------------------------------

KV_NAMES = ["fp32", "bf16", "fp16", "int8", "int4"]


def empty_cache(name: str, blocks: int, heads: int, block_size: int, dim: int) -> LayerKV:
    """Poisoned: NaN everywhere (255 codes with NaN scales), so that reading what was never written shows."""
    if name in ("int8", "int4"):
        codes = lambda: torch.full((blocks, heads, block_size, dim if name == "int8" else dim // 2), 255, dtype=torch.uint8)  # noqa: E731
        groups = () if name == "int8" else (2,)
        params = lambda: torch.full((blocks, heads, *groups, block_size, 2), float("nan"), dtype=torch.float16)  # noqa: E731
        return LayerKV(name, codes(), codes(), params(), params())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    shape = (blocks, heads, block_size, dim)
    return LayerKV(name, torch.full(shape, float("nan"), dtype=dtype), torch.full(shape, float("nan"), dtype=dtype))


def step_of(chunks: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> Step:
    """One row per (first position, tokens) with its block table."""
    positions = [p for first, count in chunks for p in range(first, first + count)]
    slots = [tables[r][p // block_size] * block_size + p % block_size
             for r, (first, count) in enumerate(chunks) for p in range(first, first + count)]
    width = max(map(len, tables))
    starts = [0]
    for _, count in chunks:
        starts.append(starts[-1] + count)
    int32 = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    contexts = [first + count for first, count in chunks]
    table = int32([t + [0] * (width - len(t)) for t in tables])
    return Step(torch.zeros(len(positions), dtype=torch.int64), int32(positions), torch.tensor(slots), int32(starts),
                int32(contexts), table, sum(c == 1 for _, c in chunks), max(c for _, c in chunks), max(contexts), None)


def cos_sin(positions: int, rotary: int) -> torch.Tensor:
    angle = torch.arange(positions)[:, None] / 10000 ** (torch.arange(rotary // 2) / (rotary // 2))
    return torch.cat((angle.cos(), angle.sin()), -1).float()


@pytest.mark.parametrize("name", KV_NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(3, 1, 64, 64), (4, 2, 40, 24), (2, 2, 16, 16)])
def test_rope_write_equals_reference_bitwise(ops, name, heads, kv_heads, dim, rotary):
    step = step_of([(0, 5), (9, 1), (3, 2)], [[2], [0, 3], [1]], 8)
    step.slots[3] = -1
    qkv = torch.randn(8, (heads + 2 * kv_heads) * dim)
    qkv[2] = 1.25  # constant vectors: scale 0, codes 0
    qkv[4] *= 300
    got, want = (empty_cache(name, 4, kv_heads, 8, dim) for _ in range(2))
    table = cos_sin(16, rotary)
    q = ops.rope_write(qkv, got, step, table, kv_heads, None, None, 1e-6)
    assert torch.equal(q, reference.rope_write(qkv, want, step, table, kv_heads, None, None, 1e-6))
    assert torch.equal(got.k.view(torch.uint8), want.k.view(torch.uint8))
    assert torch.equal(got.v.view(torch.uint8), want.v.view(torch.uint8))
    for a, b in ((got.k_params, want.k_params), (got.v_params, want.v_params)):
        if a is not None:  # an int4 minimum holds a mean, whose last bit may depend on the order of the sum
            assert torch.equal(a[..., 0].nan_to_num(-1), b[..., 0].nan_to_num(-1))
            ulps = (a.view(torch.int16).int() - b.view(torch.int16).int()).abs().max()
            assert ulps <= (1 if name == "int4" else 0)


@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "fp8"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (2, 1, 40)])
def test_a_turn_is_undone_by_the_query(ops, name, heads, kv_heads, dim):
    """q' . k' is q . k but for a number per query; float64 matrices as the oracle."""
    generator = torch.Generator().manual_seed(dim)
    step = step_of([(0, 9)], [[1, 0]], 8)
    qkv = torch.randn(9, (heads + 2 * kv_heads) * dim, generator=generator)
    k = torch.randn(kv_heads, dim, dim, generator=generator, dtype=torch.float64) / dim**0.5 + torch.eye(dim)
    shift = torch.randn(kv_heads, dim, generator=generator)
    turn = Turn(k.float(), torch.linalg.inv(k).mT.float().contiguous(), shift)
    plain = LayerKV("fp32", *(torch.zeros(2, kv_heads, 8, dim) for _ in range(2)))
    q = reference.rope_write(qkv, plain, step, cos_sin(16, dim), kv_heads, None, None, 1e-6)
    keys, _ = reference.gather_kv(plain, torch.tensor([1, 0]), 9)
    if name == "fp8":
        kv = LayerKV(name, *(torch.zeros(2, kv_heads, 8, dim, dtype=torch.uint8).view(torch.float8_e4m3fn) for _ in range(2)))
    else:
        kv = empty_cache(name, 2, kv_heads, 8, dim)
    turned = ops.rope_write(qkv, kv, step, cos_sin(16, dim), kv_heads, None, None, 1e-6, turn)
    want_keys = (keys.double() - shift.double()[:, None]) @ k
    want_q = torch.einsum("thgd,hde->thge", q.double().unflatten(1, (kv_heads, -1)), torch.linalg.inv(k).mT).flatten(1, 2)
    torch.testing.assert_close(turned.double(), want_q, rtol=1e-4, atol=1e-4)
    got_keys, _ = reference.gather_kv(kv, torch.tensor([1, 0]), 9)
    room = {"fp32": 1e-5, "int8": 0.51 / 255, "int4": 0.6 / 15, "fp8": 2**-4}[name]
    span = want_keys.abs().amax(-1, keepdim=True) if name == "fp8" else want_keys.amax(-1, True) - want_keys.amin(-1, True)
    assert ((got_keys - want_keys).abs() <= span * room + 1e-4).all()


@pytest.mark.parametrize("dim", [16, 80, 128])
def test_int4_bytes_are_quarters_of_a_head_in_two_groups(ops, dim):
    """The layout, written out; and the errors of each half sum to zero (up to the half-precision minimum)."""
    qkv = torch.randn(3, 3 * dim, generator=torch.Generator().manual_seed(dim))
    kv = empty_cache("int4", 1, 1, 4, dim)
    ops.rope_write(qkv, kv, step_of([(0, 3)], [[0]], 4), cos_sin(4, dim), 1, None, None, 1e-6)
    values = qkv[:, 2 * dim :]
    for t in range(3):
        codes = torch.zeros(dim)
        for j in range(dim // 4):
            low, high = int(kv.v[0, 0, t, 2 * j]), int(kv.v[0, 0, t, 2 * j + 1])
            for quarter, code in enumerate((low & 15, low >> 4, high & 15, high >> 4)):
                codes[quarter * (dim // 4) + j] = code
        for half in range(2):
            scale, minimum = kv.v_params[0, 0, half, t].float()
            part = slice(half * dim // 2, (half + 1) * dim // 2)
            error = codes[part] * scale + minimum - values[t, part]
            assert error.abs().max() <= 0.6 * scale
            assert abs(error.mean()) <= minimum.abs() * 2**-11
            torch.testing.assert_close(scale, (values[t, part].max() - values[t, part].min()) / 15, rtol=1e-3, atol=0)


def test_rope_write_head_norms(ops):
    step = step_of([(2, 6)], [[1, 0]], 4)
    qkv, table = torch.randn(6, 5 * 32), cos_sin(16, 32)
    q_norm, k_norm = torch.rand(32) + 0.5, torch.rand(32) + 0.5
    got, want = (empty_cache("fp32", 2, 1, 4, 32) for _ in range(2))
    q = ops.rope_write(qkv, got, step, table, 1, q_norm, k_norm, 1e-6)
    torch.testing.assert_close(q, reference.rope_write(qkv, want, step, table, 1, q_norm, k_norm, 1e-6))
    torch.testing.assert_close(got.k, want.k, equal_nan=True)
    assert torch.equal(got.v.nan_to_num(), want.v.nan_to_num())


def test_nan_reaches_the_cache(ops):
    qkv = torch.randn(1, 3 * 16)
    qkv[0, 20] = float("nan")
    kv = empty_cache("int8", 1, 1, 4, 16)
    kv.k_params.zero_()
    ops.rope_write(qkv, kv, step_of([(0, 1)], [[0]], 4), cos_sin(4, 16), 1, None, None, 1e-6)
    assert kv.k_params[0, 0, 0].isnan().all()


def filled(name, lengths, kv_heads, block_size, dim, generator, spare=2):
    """Caches of some rows in shuffled blocks, with unused blocks and unused slots left poisoned; and the block tables."""
    needed = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(needed) + spare, generator=generator).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    kv = empty_cache(name, sum(needed) + spare, kv_heads, block_size, dim)
    step = step_of([(0, length) for length in lengths], tables, block_size)
    qkv = torch.randn(sum(lengths), 3 * kv_heads * dim, generator=generator)
    reference.rope_write(qkv, kv, step, cos_sin(max(lengths), dim), kv_heads, None, None, 1e-6)
    return kv, tables


@pytest.mark.parametrize("name", KV_NAMES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "window"), [(3, 1, 64, 0), (4, 4, 40, 0), (6, 2, 128, 50), (8, 2, 24, 7)])
def test_attention_equals_float64(ops, name, heads, kv_heads, dim, window):
    generator = torch.Generator().manual_seed(dim)
    lengths, tails = [1, 70, 300, 64, 130], [1, 1, 3, 64, 100]
    kv, tables = filled(name, lengths, kv_heads, 16, dim, generator)
    step = step_of([(n - t, t) for n, t in zip(lengths, tails)], tables, 16)
    q = torch.randn(sum(tails), heads, dim, generator=generator)
    got = ops.attention(q, kv, step, dim**-0.5, window)
    first = 0
    for length, tail, table in zip(lengths, tails, tables):
        k, v = reference.gather_kv(kv, torch.tensor(table), length)
        k, v = (x.double().repeat_interleave(heads // kv_heads, 0) for x in (k, v))
        scores = q[first : first + tail].double().transpose(0, 1) @ k.transpose(1, 2) * dim**-0.5
        age = torch.arange(length - tail, length)[:, None] - torch.arange(length)[None]
        hidden = (age < 0) | ((age >= window) if window else False)
        want = (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)
        torch.testing.assert_close(got[first : first + tail].double(), want, rtol=1e-5, atol=2e-6 * float(v.abs().max()))
        first += tail


@pytest.mark.parametrize("name", KV_NAMES)
@pytest.mark.parametrize("window", [0, 90])
def test_attention_bits_do_not_depend_on_chunks_batch_or_blocks(ops, name, window):
    """A 600-token prompt at once, in chunks, token by token, and beside other rows, from two block layouts: the same bits."""
    length, heads, kv_heads, dim = 600, 4, 2, 32
    kv, tables = filled(name, [length, 40], kv_heads, 16, dim, torch.Generator().manual_seed(1))
    other, other_tables = filled(name, [length, 40], kv_heads, 8, dim, torch.Generator().manual_seed(1), spare=5)
    for length_, a, b in zip((length, 40), tables, other_tables):  # the same tokens in other blocks
        for source, target in ((kv.k, other.k), (kv.v, other.v), (kv.k_params, other.k_params), (kv.v_params, other.v_params)):
            for p in range(length_ if source is not None else 0):
                to, of = (x if x.dim() == 4 else x.transpose(2, 3) for x in (target, source))
                to[b[p // 8], :, p % 8] = of[a[p // 16], :, p % 16]
    q = torch.randn(length, heads, dim, generator=torch.Generator().manual_seed(2))
    run = lambda chunks, queries, cache=kv, rows=tables, size=16: ops.attention(  # noqa: E731
        queries, cache, step_of(chunks, rows, size), dim**-0.5, window)
    torch.set_num_threads(2)
    whole = run([(0, length)], q, rows=tables[:1])
    assert whole.isfinite().all()
    for first, count in ((0, 1), (0, 63), (63, 2), (65, 200), (265, 335)):
        assert torch.equal(run([(first, count)], q[first : first + count], rows=tables[:1]), whole[first : first + count])
    for p in (0, 1, 63, 64, 255, 256, 511, 512, 599):
        assert torch.equal(run([(p, 1)], q[p : p + 1], rows=tables[:1]), whole[p : p + 1])
        mixed = run([(p, 1), (20, 20)], torch.cat((q[p : p + 1], q[:20])), other, other_tables, 8)
        assert torch.equal(mixed[:1], whole[p : p + 1])


def test_thread_count_changes_no_bit(build, ops):
    generator = torch.Generator().manual_seed(9)
    kv, tables = filled("int8", [700], 1, 16, 64, generator)
    q, step = torch.randn(700, 3, 64, generator=generator), step_of([(699, 1)], tables, 16)
    prompt, table = step_of([(0, 700)], tables, 16), cos_sin(700, 64)
    run = linear(build, random_codes(SCHEMES["w4a8_g64"].weight, 512, 576, generator), SCHEMES["w4a8_g64"])
    x = torch.randn(200, 576, generator=generator)
    rows = Rows(*quantize_rows(x))
    weight = torch.randn(999, 576, generator=generator)
    qkv, again = torch.randn(700, 5 * 64, generator=generator), empty_cache("int8", *kv.k.shape[:1], 1, 16, 64)

    def work():
        rotated = ops.rope_write(qkv, again, prompt, table, 1, None, None, 1e-6)
        norm, hidden = ops.rms_norm(x, weight[0], 1e-6, x, True)
        return (ops.attention(q[-1:], kv, step, 0.125, 0), ops.attention(q, kv, prompt, 0.125, 0), run(rows), rotated, hidden,
                again.k[tables[0][:40]], again.v[tables[0][:40]], ops.logits(x[:9], weight), *norm, *ops.silu_mul(x, True),
                *ops.quantize_rows(x))

    alone = work()
    torch.set_num_threads(3)
    for a, b in zip(alone, work()):
        assert torch.equal(a, b)


def test_callers_in_several_threads_share_the_workers(build):
    generator = torch.Generator().manual_seed(9)
    run = linear(build, random_codes(SCHEMES["w4a8_g64"].weight, 512, 576, generator), SCHEMES["w4a8_g64"])
    batches = [Rows(*quantize_rows(torch.randn(m, 576, generator=generator))) for m in (1, 5, 40, 3) * 50]
    want = [run(rows) for rows in batches]
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as callers:
        for a, b in zip(callers.map(run, batches), want):
            assert torch.equal(a, b)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
def test_a_thread_that_ends_gives_its_memory_back(ops):
    kv, tables = filled("int8", [900], 3, 16, 64, torch.Generator().manual_seed(0))
    step, q = step_of([(0, 900)], tables, 16), torch.randn(900, 9, 64)

    def grown_mib(threads: int) -> float:
        resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20  # noqa: E731
        before = resident()
        for _ in range(threads):
            thread = Thread(target=ops.attention, args=(q, kv, step, 0.1, 0))
            thread.start()
            thread.join()
        return resident() - before

    grown_mib(4)
    assert grown_mib(60) < 6  # it was 15


def test_a_forked_child_computes_too(build):
    generator = torch.Generator().manual_seed(9)
    run = linear(build, random_codes(SCHEMES["w8a8"].weight, 512, 576, generator), SCHEMES["w8a8"])
    rows = Rows(*quantize_rows(torch.randn(40, 576, generator=generator)))
    torch.set_num_threads(2)
    want = run(rows)  # starts the workers, which the child does not inherit
    child = os.fork()
    if child == 0:
        os._exit(0 if (run(rows).numpy() == want.numpy()).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_what_the_kernels_do_not_take_goes_to_the_reference(ops):
    x = torch.randn(3, 64).bfloat16()
    assert torch.equal(ops.quantize_rows(x).codes, reference.quantize_rows(x).codes)
    kv = LayerKV("fp8", *(torch.zeros(2, 1, 8, 16, dtype=torch.float8_e4m3fn) for _ in range(2)))
    qkv, step, table = torch.randn(5, 3 * 16), step_of([(0, 5)], [[1]], 8), cos_sin(8, 16)
    q = ops.rope_write(qkv, kv, step, table, 1, None, None, 1e-6)
    got = ops.attention(q, kv, step, 0.25, 0)
    assert torch.equal(got, reference.attention(q, kv, step, 0.25, 0))


# ---- building -----------------------------------------------------------------------------------------------------

PROBE = """
import warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    from nybble.kernels import cpu
    print(cpu.kernels(), cpu.ops())
    cpu.kernels()
print(len(seen), str(seen[0].message))
"""


def test_without_a_compiler_one_warning_says_what_to_install(tmp_path):
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    out = subprocess.run([sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True).stdout
    first, second = out.splitlines()
    assert first == "() None"
    assert second.startswith("1 ")
    assert "apt install gcc" in second
    assert "torch kernels" in second


def test_import_compiles_nothing_and_the_cache_is_used(tmp_path):
    if cpu._compiler() is None:
        pytest.skip("no C compiler on this machine")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    run = lambda code: subprocess.run([sys.executable, "-c", code], env=environment, check=True)  # noqa: E731
    run("import nybble.kernels.cpu")
    assert list(tmp_path.rglob("*.so")) == []
    run("from nybble.kernels import cpu; assert cpu.ops()")
    (built,) = (p for p in tmp_path.rglob("*") if p.is_file())  # and nothing half-written beside it
    stamp = built.stat().st_mtime_ns
    run("from nybble.kernels import cpu; assert cpu.ops()")
    assert built.stat().st_mtime_ns == stamp


def test_schemes_with_int8_weights_and_a_rounded_float_matrix(build):
    """From a float matrix, as the quantizer makes them: the product stays within the rounding of the weights."""
    weight, x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), torch.randn(6, 256)
    q = quantize_weight(weight, INT8_CHANNEL, weight.abs().amax(1, keepdim=True) / 127)
    got = linear(build, q, SCHEMES["w8a8"])(Rows(*quantize_rows(x)))
    assert (got - x @ weight.t()).norm() / (x @ weight.t()).norm() < 0.02

"""Laws of the formats: cut and join commute with dequantize, packing loses nothing, arithmetic meets published vectors."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nybble.checkpoint.pack import pack_rows, unpack_rows
from nybble.formats.numerics import (
    SMALLEST_ABSMAX,
    quantize_min_max,
    quantize_rows,
    quantize_weight,
    to_float8,
)
from nybble.formats.qtensor import QTensor, cut, dequantize, inner_codes, join
from nybble.formats.spec import (
    FP8,
    FP8_E5M2,
    INT4,
    INT8,
    INT8_CHANNEL,
    SCHEMES,
    UINT4,
    Spec,
    describe,
    fit_group,
    scheme_of,
)

WEIGHTS = {
    "channel": Spec(INT4, (1, None)), "group": Spec(INT4, (1, 32)), "tensor": Spec(INT8, (None, None)),
    "zero": Spec(UINT4, (1, 32), zero=True), "int8": Spec(INT8, (1, None)), "qqq": Spec(INT4, (1, 32), over=INT8_CHANNEL),
    "fp8": Spec(FP8, (1, None)), "block": Spec(FP8, (32, 32)), "fp8 tensor": Spec(FP8, (None, None)),
    "int block": Spec(INT8, (32, 32)),
}


def make(spec: Spec, n: int, k: int, seed: int, ordered: bool = False) -> QTensor:
    """Random codes, scales and zeros of a spec."""
    g = torch.Generator().manual_seed(seed)
    rows = 1 if spec.tile[0] is None else -(-n // spec.tile[0])
    columns = 1 if spec.tile[1] is None else -(-k // spec.tile[1])
    if spec.num.kind == "float":
        codes = (torch.randn(n, k, generator=g) * 50).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(int(spec.num.qmin), int(spec.num.qmax) + 1, (n, k), generator=g).to(torch.int8)
    scale = torch.rand(rows, columns, generator=g) + 0.1
    zero = torch.randint(0, 16, (rows, columns), generator=g).float() if spec.zero else None
    over = torch.rand(n, 1, generator=g) if spec.over else None
    order = torch.randint(0, columns, (k,), generator=g) if ordered else None
    return QTensor(spec, codes, scale * (10 if spec.over else 1), zero, over, order)


def by_loops(q: QTensor) -> torch.Tensor:
    """Dequantize one element at a time, from the definition."""
    n, k = q.shape
    out = torch.empty(n, k, dtype=torch.float64)
    for i in range(n):
        for j in range(k):
            row = 0 if q.spec.tile[0] is None else i // q.spec.tile[0]
            column = int(q.order[j]) if q.order is not None else 0 if q.spec.tile[1] is None else j // q.spec.tile[1]
            scale = float(q.scale[row, column])
            code = float(q.codes[i, j].float()) - (float(q.zero[row, column]) if q.zero is not None else 0.0)
            if q.over is not None:
                inner = torch.tensor(code, dtype=torch.float32) * torch.tensor(scale, dtype=torch.float32)
                out[i, j] = min(max(round(float(inner)), -128), 127) * float(q.over[i, 0])
            else:
                out[i, j] = code * scale
    return out


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("n", "k"), [(4, 64), (33, 96), (48, 80)])  # the last two leave parts of blocks and of groups
def test_dequantize_is_the_definition(name, n, k):
    q = make(WEIGHTS[name], n, k, seed=n)
    assert torch.equal(dequantize(q, torch.float64), by_loops(q))


@given(name=st.sampled_from(sorted(WEIGHTS)), seed=st.integers(0, 99), n=st.integers(2, 70),
       k=st.sampled_from([32, 64, 96, 80]), axis=st.sampled_from([0, 1]),
       ends=st.tuples(st.integers(0, 96), st.integers(0, 96)), ordered=st.booleans())
@settings(max_examples=150, deadline=None)
def test_cut_commutes_with_dequantize(name, seed, n, k, axis, ends, ordered):
    q = make(WEIGHTS[name], n, k, seed, ordered and WEIGHTS[name].group is not None and WEIGHTS[name].tile[0] == 1)
    start, stop = sorted(min(end, q.shape[axis]) for end in ends)
    assume(start < stop)
    whole = dequantize(q, torch.float64)
    part = cut(q, axis, start, stop)
    assert torch.equal(dequantize(part, torch.float64), whole[start:stop] if axis == 0 else whole[:, start:stop])
    # And a cut of a cut, which tensor parallel does to joined weights.
    again = cut(part, 1 - axis, 0, part.shape[1 - axis])
    assert torch.equal(dequantize(again, torch.float64), dequantize(part, torch.float64))


@given(name=st.sampled_from(sorted(WEIGHTS)), seed=st.integers(0, 99),
       rows=st.lists(st.integers(1, 40), min_size=1, max_size=4), k=st.sampled_from([32, 64, 80]))
@settings(max_examples=100, deadline=None)
def test_join_commutes_with_dequantize(name, seed, rows, k):
    parts = [make(WEIGHTS[name], n, k, seed + i) for i, n in enumerate(rows)]
    joined = join(parts)
    assert torch.equal(dequantize(joined, torch.float64), torch.cat([dequantize(p, torch.float64) for p in parts]))
    at = 0
    for part in parts:
        piece = cut(joined, 0, at, at + part.shape[0])
        assert torch.equal(dequantize(piece, torch.float64), dequantize(part, torch.float64))
        at += part.shape[0]


def test_join_refuses_what_differs():
    a = make(WEIGHTS["group"], 4, 64, 0)
    with pytest.raises(ValueError, match="cannot join"):
        join([a, make(WEIGHTS["channel"], 4, 64, 0)])
    with pytest.raises(ValueError, match="cannot join"):
        join([a, make(WEIGHTS["group"], 4, 96, 0)])
    with pytest.raises(ValueError, match="ordered differently"):
        join([a, make(WEIGHTS["group"], 4, 64, 0, ordered=True)])


def test_inner_codes_saturate():
    # QQQ: 7 * 30 = 210 does not fit int8 and stops at 127; halves round to even.
    q = QTensor(WEIGHTS["qqq"], torch.tensor([[7, -8, 1, 3]], dtype=torch.int8).repeat(1, 8), torch.tensor([[30.0]]),
                over=torch.tensor([[2.0]]))
    assert inner_codes(q)[0, :4].tolist() == [127, -128, 30, 90]
    halves = QTensor(WEIGHTS["qqq"], torch.tensor([[1, 3, 5, -1]], dtype=torch.int8).repeat(1, 8), torch.tensor([[0.5]]),
                     over=torch.tensor([[1.0]]))
    assert inner_codes(halves)[0, :4].tolist() == [0, 2, 2, 0]


@given(bits=st.integers(2, 8), n=st.integers(1, 9), k=st.integers(1, 130), seed=st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_unpack_inverts_pack(bits, n, k, seed):
    values = torch.randint(0, 1 << bits, (n, k), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    words = pack_rows(values, bits)
    assert words.dtype == torch.int32
    assert words.shape == (n, -(-bits * k // 32))
    assert torch.equal(unpack_rows(words, bits, k), values)


@pytest.mark.parametrize(("bits", "codes", "words"), [
    # compressed-tensors 0.20.1, codes with 2^(bits - 1) added.
    (4, range(-8, 0), [0x76543210]), (4, range(8), [0xFEDCBA98]),
    (3, [i % 8 - 4 for i in range(32)], [0x88FAC688, 0xC688FAC6, 0xFAC688FA]), (8, [-128, -1, 0, 127], [0xFF807F00]),
])
def test_packing_golden_words(bits, codes, words):
    packed = pack_rows(torch.tensor([list(codes)]) + (1 << (bits - 1)), bits)
    assert [w & 0xFFFFFFFF for w in packed[0].tolist()] == words


def test_unpack_refuses_a_wrong_width():
    with pytest.raises(ValueError, match="cannot be"):
        unpack_rows(torch.zeros(2, 3, dtype=torch.int32), 4, 32)


@given(group=st.sampled_from([None, 32, 64, 128, 256, 100]), k=st.integers(1, 2000))
@settings(max_examples=200, deadline=None)
def test_fit_group_divides(group, k):
    fit = fit_group(group, k)
    assert fit is None or k % fit == 0
    if group is not None and k % group == 0:
        assert fit == group
    elif fit is not None:
        assert fit >= 32
        assert fit & (fit - 1) == 0
        assert group is not None
        assert not any(k % bigger == 0 and bigger < group for bigger in (64, 128, 256) if bigger > fit)


def test_fit_group_of_known_models():
    assert (fit_group(128, 576), fit_group(128, 1536), fit_group(128, 48), fit_group(128, 4096)) == (64, 128, None, 128)


def test_schemes_are_found_by_what_they_mean():
    for scheme in SCHEMES.values():
        assert scheme_of(scheme.weight, scheme.act) is scheme
        assert describe(scheme.weight)
    assert scheme_of(Spec(INT4, (1, 16)), None).name == "int4[1x16]/16bit"


@given(seed=st.integers(0, 999), scale=st.sampled_from([1e-12, 1e-3, 1.0, 1e4]))
@settings(max_examples=50, deadline=None)
def test_quantize_rows_error_is_half_a_step(seed, scale):
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * scale
    codes, steps = quantize_rows(x)
    assert codes.abs().max() <= 127
    error = (codes.double() * steps.double()[:, None] - x.double()).abs().amax(-1)
    assert (error <= steps.double() * 0.5 * (1 + 1e-5)).all()
    assert torch.equal(steps, x.abs().amax(-1).clamp_min(SMALLEST_ABSMAX) / 127)


def test_quantize_rows_edges():
    codes, steps = quantize_rows(torch.tensor([[0.0, 0.0], [127.0, -127.0], [0.5, 127.0], [1.5, 127.0]]))
    assert codes.tolist() == [[0, 0], [127, -127], [0, 127], [2, 127]]  # halves to even
    assert torch.isfinite(steps).all()
    assert (steps > 0).all()


@given(seed=st.integers(0, 999), shift=st.floats(-50, 50), levels=st.sampled_from([15, 255]))
@settings(max_examples=50, deadline=None)
def test_min_max_error_is_half_a_step(seed, shift, levels):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) + shift
    codes, scale, minimum = quantize_min_max(x, levels)
    assert (scale.dtype, minimum.dtype, codes.dtype) == (torch.float16, torch.float16, torch.uint8)
    restored = codes.double() * scale.double()[:, None] + minimum.double()[:, None]
    # Half a step, the rounding of the minimum to half precision, and of the scale over all levels.
    bound = scale.double() / 2 + x.abs().amax(-1).double() * 2**-11 + levels * scale.double() * 2**-11 + 1e-6
    assert ((restored - x.double()).abs().amax(-1) <= bound).all()


def test_min_max_of_a_constant():
    codes, scale, minimum = quantize_min_max(torch.full((1, 8), 3.0), 255)
    assert (codes.tolist(), scale.item(), minimum.item()) == ([[0] * 8], 0.0, 3.0)


@pytest.mark.parametrize(("num", "values", "expected"), [
    # OCP e4m3fn: largest 448 = 0x7E, no infinity; smallest subnormal 2^-9; halves to even.
    (FP8, [448.0, 1e9, -1e9, float("inf"), 2**-9, 2**-10, 17.0, 19.0, 0.0],
     [0x7E, 0x7E, 0xFE, 0x7E, 0x01, 0x00, 0x58, 0x5A, 0x00]),
    # e5m2: largest 57344 = 0x7B.
    (FP8_E5M2, [57344.0, 1e9, -1e9, 1.0], [0x7B, 0x7B, 0xFB, 0x3C]),
])
def test_float8_saturates(num, values, expected):
    assert to_float8(torch.tensor(values), 1.0, num).view(torch.uint8).tolist() == expected
    assert to_float8(torch.tensor(values) * 4, 4.0, num).view(torch.uint8).tolist() == expected


def test_dead_groups_are_zeros():
    weight = torch.zeros(2, 64)
    weight[0, :32] = torch.linspace(-1, 1, 32)
    q = quantize_weight(weight, WEIGHTS["group"], torch.tensor([[1 / 7, 0.0], [0.0, 0.0]]))
    assert q.codes[0, :32].abs().max() == 7
    assert torch.isfinite(dequantize(q)).all()
    assert not dequantize(q)[1].any()


def test_bits_per_weight():
    assert make(Spec(INT4, (1, 128)), 8, 256, 0).bits_per_weight == 4 + 16 / 128
    assert make(Spec(UINT4, (1, 128), zero=True), 8, 256, 0).bits_per_weight == 4 + 20 / 128
    assert make(Spec(INT8, (1, None)), 8, 256, 0).bits_per_weight == 8 + 16 / 256

"""Triton linears against float64 and the torch reference, in Triton's interpreter.

The interpreter is chosen when a kernel is decorated, so this file runs itself once more in a process that has it on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import INT4, SCHEMES, UINT4, Scheme, Spec, scheme_of
from nybble.kernels import reference
from nybble.kernels.registry import LinearShape, choose

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
CPU = torch.device("cpu")


@pytest.mark.skipif(INTERPRETING, reason="already inside")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(INTERPRETING, reason="about the compiled mode")
def test_refuses_a_cpu_with_a_reason() -> None:
    from nybble.kernels import linear_triton

    shape = LinearShape(SCHEMES["w4a8"], 64, 128, CPU, torch.float32)
    with pytest.raises(ValueError, match="wants a GPU"):
        choose(shape, linear_triton.KERNELS)


@pytest.mark.skipif(INTERPRETING, reason="needs no interpreter")
def test_nibbles_pair_channel_k_with_k_plus_64() -> None:
    from nybble.kernels.linear_triton import pack_nibbles

    codes = torch.randint(-8, 8, (3, 256), dtype=torch.int8)
    packed = pack_nibbles(codes)
    assert packed.shape == (3, 128)
    for k in (*range(64), *range(128, 192)):
        byte = packed[:, k // 128 * 64 + k % 128].int() & 255
        assert torch.equal(byte & 15, codes[:, k].int() & 15)
        assert torch.equal(byte >> 4, codes[:, k + 64].int() & 15)


def weight_of(scheme: Scheme, n: int, k: int, seed: int = 0) -> QTensor:
    generator = torch.Generator().manual_seed(seed)
    spec = scheme.weight
    assert spec is not None
    groups = k // (spec.group or k)
    w = torch.randn(n, k, generator=generator)
    if spec.over is not None:
        codes = torch.randint(-8, 8, (n, k), dtype=torch.int8, generator=generator)
        scale = torch.rand(n, groups, generator=generator) * 17
        return QTensor(spec, codes, scale, None, torch.rand(n, 1, generator=generator))
    scale = w.view(n, groups, -1).abs().amax(-1) / (7 if spec.num.bits == 4 else 127)
    zero = torch.rand(n, groups, generator=generator) * 15 if spec.zero else None
    return quantize_weight(w, spec, scale, zero)


def rows_of(tokens: int, k: int) -> reference.Rows:
    """Ordinary rows, one row of +-127 only, one of zeros."""
    codes = torch.randint(-127, 128, (tokens, k), dtype=torch.int8)
    codes[-1] = torch.where(codes[-1] < 0, -127, 127)
    if tokens > 1:
        codes[0] = 0
    return reference.Rows(codes, torch.rand(tokens) + 0.5)


SHAPES = [(64, 128), (72, 320), (200, 576)]  # rows and channels off the tile, channels off the 128-wide block

if INTERPRETING:
    from nybble.kernels import linear_triton
    from nybble.kernels.linear_triton import Tile

    @pytest.mark.parametrize("tokens", [1, 17])
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("name", ["w4a8", "w8a8"])
    def test_per_channel_integers_are_bitwise_the_reference(name: str, shape: tuple[int, int], tokens: int) -> None:
        n, k = shape
        weight, x = weight_of(SCHEMES[name], n, k), rows_of(tokens, k)
        ask = LinearShape(SCHEMES[name], n, k, CPU, torch.float32)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        packed = kernel.pack(weight, ask)
        exact = (x.codes.double() @ weight.codes.double().t()).float() * weight.scale.t() * x.scale[:, None]
        for split in (1, 2, 4):
            out = kernel.run(replace(packed, tile=Tile(64, 16, 128, split, 1, 4)), x)
            assert torch.equal(out, exact)
        assert not packed.arrivals.any()

    @pytest.mark.parametrize("name", ["w4a8", "w8a8", "w4a8_g64"])
    def test_every_other_row_of_a_batch(name: str) -> None:
        """Codes and scales that are not contiguous."""
        weight, x = weight_of(SCHEMES[name], 64, 128), rows_of(8, 128)
        ask = LinearShape(SCHEMES[name], 64, 128, CPU, torch.float32)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        packed = kernel.pack(weight, ask)
        some = kernel.run(packed, reference.Rows(x.codes[1::2], x.scale[1::2]))
        assert torch.equal(some, kernel.run(packed, x)[1::2])

    @pytest.mark.parametrize("order", [1, 8])
    def test_many_tiles_and_the_largest_sums(order: int) -> None:
        n, k = 130, 1024
        weight = QTensor(Spec(INT4, (1, None)), torch.full((n, k), -8, dtype=torch.int8), torch.ones(n, 1))
        x = reference.Rows(torch.full((40, k), 127, dtype=torch.int8), torch.ones(40))
        ask = LinearShape(SCHEMES["w4a8"], n, k, CPU, torch.float32)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        packed = replace(kernel.pack(weight, ask), tile=Tile(64, 16, 256, 1, 1, 4, order))
        assert torch.equal(kernel.run(packed, x), torch.full((40, n), -8.0 * 127 * k))

    def test_qqq_meets_the_int8_grid_before_the_dot() -> None:
        scheme = SCHEMES["w4a8_qqq_g128"]
        weight, x = weight_of(scheme, 72, 256), rows_of(3, 256)
        ask = LinearShape(scheme, 72, 256, CPU, torch.float32)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        inner = torch.round(weight.codes.float() * weight.scale.repeat_interleave(128, 1)).clamp(-128, 127)
        assert weight.over is not None
        exact = (x.codes.double() @ inner.double().t()).float() * weight.over.t() * x.scale[:, None]
        assert torch.equal(kernel.run(kernel.pack(weight, ask), x), exact)

    @pytest.mark.parametrize("k", [128, 384, 576])
    @pytest.mark.parametrize("group", [32, 64, 128, 256])
    def test_groups_against_float64(group: int, k: int) -> None:
        if k % group:
            pytest.skip("whole groups only; the next test")
        scheme = replace(SCHEMES["w4a8_g128"], weight=Spec(INT4, (1, group)))
        weight, x = weight_of(scheme, 72, k), rows_of(5, k)
        ask = LinearShape(scheme, 72, k, CPU, torch.float32)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        packed = kernel.pack(weight, ask)
        want = (x.codes.double() * x.scale.double()[:, None]) @ dequantize(weight, torch.float64).t()
        out = kernel.run(packed, x)
        assert ((out - want).norm() / want.norm()).item() < 1e-6
        assert not out[0].any()

    def test_a_ragged_last_group_is_refused() -> None:
        ask = LinearShape(SCHEMES["w4a8_g128"], 64, 576, CPU, torch.float32)
        with pytest.raises(ValueError, match="576 input channels are not whole groups of 128"):
            choose(ask, linear_triton.KERNELS)

    @pytest.mark.parametrize("name", ["w4a8_g64", "w4a16_g64"])
    def test_segments_give_the_same_bits_in_one_program_or_many(name: str) -> None:
        """Rows alone, among others, split or not: one result. (NumPy's float dot depends on its shape, so there one BM.)"""
        n, k, tokens = 72, 960, 19
        scheme = SCHEMES[name]
        weight = weight_of(scheme, n, k)
        ask = LinearShape(scheme, n, k, CPU, torch.float16)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        packed = replace(kernel.pack(weight, ask), segments=4)
        x = rows_of(tokens, k) if scheme.act else torch.randn(tokens, k, dtype=torch.float16)
        one = kernel.run(replace(packed, tile=Tile(64, 32 if scheme.act else 16, 128, 1, 1, 4)), x)
        many = kernel.run(replace(packed, tile=Tile(64, 16, 128, 0, 1, 4)), x)
        assert torch.equal(one, many)
        if scheme.act:
            last = reference.Rows(x.codes[-1:], x.scale[-1:])
            assert torch.equal(kernel.run(replace(packed, tile=Tile(64, 16, 128, 0, 1, 4)), last), one[-1:])

    @pytest.mark.parametrize("k", [128, 576])
    @pytest.mark.parametrize("name", ["w4a16", "w4a16_g32", "w4a16_g64", "w4a16_g128", "w4a16_zero_g128"])
    def test_w4a16_against_float64(name: str, k: int) -> None:
        scheme = SCHEMES[name]
        if k % (scheme.weight.group or k):
            pytest.skip("whole groups only")
        weight = weight_of(scheme, 72, k)
        ask = LinearShape(scheme, 72, k, CPU, torch.float16)
        kernel = choose(ask, linear_triton.KERNELS).kernel
        x = torch.randn(5, k, dtype=torch.float16)
        want = x.double() @ dequantize(weight, torch.float64).t()
        out = kernel.run(kernel.pack(weight, ask), x)
        assert out.dtype == torch.float16
        assert ((out.double() - want).norm() / want.norm()).item() < 1e-3

    @pytest.mark.parametrize("spec", [Spec(INT4, (None, None)), Spec(UINT4, (None, None), zero=True),
                                      Spec(UINT4, (1, None), zero=True)])
    def test_one_scale_and_zero_of_a_whole_tensor_are_every_row_s(spec: Spec) -> None:
        n, k = 72, 192
        codes = torch.randint(int(spec.num.qmin), int(spec.num.qmax) + 1, (n, k), dtype=torch.int8)
        scale = torch.rand(1 if spec.tile[0] is None else n, 1) + 0.1
        weight = QTensor(spec, codes, scale, scale * 9 if spec.zero else None)
        ask = LinearShape(scheme_of(spec, None), n, k, CPU, torch.float16)
        kernel, x = choose(ask, linear_triton.KERNELS).kernel, torch.randn(5, k).half()
        want = x.double() @ dequantize(weight, torch.float64).t()
        out = kernel.run(kernel.pack(weight, ask), x).double()
        assert ((out - want).norm() / want.norm()).item() < 1e-3

    @pytest.mark.parametrize(("vocabulary", "channels"), [(130, 96), (64, 128)])
    def test_logits_against_float64(vocabulary: int, channels: int) -> None:
        hidden, weight = torch.randn(33, channels).half(), torch.randn(vocabulary, channels).half()
        out = linear_triton.logits(hidden, weight)
        want = hidden.double() @ weight.double().t()
        assert out.dtype == torch.float32
        assert (out - want).abs().max().item() < 1e-4

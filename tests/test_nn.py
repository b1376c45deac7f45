"""Layers against float64 arithmetic on the same codes and scales, and rope tables against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nybble.formats.numerics import quantize_rows, quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import FP8, PER_TOKEN_FP8, PER_TOKEN_INT8, SCHEMES, Scheme, Spec, scheme_of
from nybble.kernels import reference
from nybble.kernels.registry import LinearShape, choose, linear_kernels, ops_for
from nybble.kernels.types import Rows
from nybble.nn.linear import Linear, Part, Projection
from nybble.nn.rope import Rope, cos_sin_table

CPU = torch.device("cpu")
OPS = ops_for(CPU)
INTEGER = ("w4a8", "w4a8_g128", "w4a8_g64", "w4a8_g32", "w4a8_qqq_g128", "w8a8")
WEIGHT_ONLY = ("w4a16_g128", "w4a16_zero_g128", "w8a16")


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rounded(weight: Tensor, spec: Spec) -> QTensor:
    """Round to nearest with scales from absmax; on the int8 grid for QQQ."""
    n, k = weight.shape
    groups = weight.view(n, -1, spec.group or k)
    if spec.over is not None:
        over = weight.abs().amax(1, keepdim=True) / 127
        inner = (groups / over[:, :, None]).abs().amax(-1) / 7
        scale = inner.round().clamp_min(1)
        codes = torch.round(groups / (scale * over)[:, :, None]).clamp(-8, 7).view(n, k).to(torch.int8)
        return QTensor(spec, codes, scale, over=over)
    if spec.zero:
        scale = (groups.amax(-1) - groups.amin(-1)) / spec.num.qmax
        return quantize_weight(weight, spec, scale, torch.round(-groups.amin(-1) / scale))
    return quantize_weight(weight, spec, groups.abs().amax(-1) / spec.num.qmax)


def expected(weight: QTensor | Tensor, act: Spec | None, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """float64: the value of every code, multiplied and summed."""
    wide = dequantize(weight, torch.float64) if isinstance(weight, QTensor) else weight.double()
    rows = x.double()
    if act is not None:
        codes, scale = quantize_rows(x)
        rows = codes.double() * scale.double()[:, None]
    return rows @ wide.t() + (0 if bias is None else bias.double())


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize("name", INTEGER + WEIGHT_ONLY)
def test_linear_is_float64_of_the_same_codes(name: str, rows: int) -> None:
    scheme: Scheme = SCHEMES[name]
    weight, x, bias = rounded(random(96, 256, seed=1), scheme.weight), random(rows, 256, seed=2), random(96, seed=3)
    linear = Linear(weight, scheme.act, bias, CPU, torch.float32, OPS)
    assert relative_error(linear(x), expected(weight, scheme.act, x, bias)) <= 1e-3
    assert linear.takes == (PER_TOKEN_INT8 if name in INTEGER else None)
    if linear.takes is not None:
        assert torch.equal(linear(OPS.quantize_rows(x)), linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unquantized_linear_computes_in_the_activations_dtype(dtype: torch.dtype) -> None:
    weight, x = random(40, 64, seed=1).to(dtype), random(5, 64, seed=2)
    out = Linear(weight, None, None, CPU, torch.float32, OPS)(x)
    assert out.dtype == torch.float32
    assert relative_error(out, expected(weight, None, x)) <= 1e-6


def parts(*weights: QTensor | Tensor, act: Spec | None = None, biases: tuple[Tensor | None, ...] = ()) -> list[Part]:
    names = ("layer.q_proj", "layer.k_proj", "layer.v_proj")
    biases = biases or (None,) * len(weights)
    return [Part(name, tuple(w.shape), w, act, b) for name, w, b in zip(names, weights, biases)]


@pytest.mark.parametrize("name", ["16bit", "w4a8", "w4a8_g64", "w4a8_qqq_g128"])
def test_projection_joins_what_it_can(name: str) -> None:
    scheme, x = SCHEMES[name], random(7, 128, seed=9)
    floats = [random(n, 128, seed=n) for n in (64, 32, 32)]
    weights = [w if scheme.weight is None else rounded(w, scheme.weight) for w in floats]
    biases = (random(64, seed=4), None, random(32, seed=5))
    projection = Projection(parts(*weights, act=scheme.act, biases=biases), CPU, torch.float32, OPS)
    assert len(projection.linears) == 1
    wanted = torch.cat([expected(w, scheme.act, x, b) for w, b in zip(weights, biases)], -1)
    assert relative_error(projection(x), wanted) <= 1e-3
    [row] = projection.explain()
    assert row["name"] == "layer.q_proj,k_proj,v_proj"
    assert row["scheme"] == name
    wanted_bits = {"16bit": 32.0, "w4a8": 4 + 16 / 128, "w4a8_g64": 4.25, "w4a8_qqq_g128": 4 + 16 / 128 + 32 / 128}
    assert row["bits_per_weight"] == wanted_bits[name]


def test_projection_runs_separately_what_cannot_be_joined() -> None:
    x = random(7, 128, seed=9)
    per_channel, grouped = SCHEMES["w4a8"].weight, SCHEMES["w4a8_g32"].weight
    weights = [rounded(random(64, 128, seed=1), per_channel), rounded(random(32, 128, seed=2), per_channel),
               rounded(random(32, 128, seed=3), grouped)]
    projection = Projection(parts(*weights, act=PER_TOKEN_INT8), CPU, torch.float32, OPS)
    assert [linear.shape.out_features for linear in projection.linears] == [96, 32]
    assert projection.takes == PER_TOKEN_INT8
    wanted = torch.cat([expected(w, PER_TOKEN_INT8, x) for w in weights], -1)
    assert relative_error(projection(x), wanted) <= 1e-3
    assert torch.equal(projection(Rows(*quantize_rows(x))), projection(x))

    mixed = [random(64, 128, seed=1), *weights[1:]]
    projection = Projection([parts(mixed[0])[0], *parts(*mixed, act=PER_TOKEN_INT8)[1:]], CPU, torch.float32, OPS)
    assert projection.takes is None  # one linear wants floats: each quantizes for itself
    wanted = torch.cat([expected(w, None if isinstance(w, Tensor) else PER_TOKEN_INT8, x) for w in mixed], -1)
    assert relative_error(projection(x), wanted) <= 1e-3


def test_replacing_one_linear_of_a_fused_projection() -> None:
    x, spec = random(5, 128, seed=9), SCHEMES["w4a8_g32"].weight
    floats = [random(n, 128, seed=n) for n in (64, 32, 16)]
    biases = (random(64, seed=4), random(32, seed=5), random(16, seed=6))
    projection = Projection(parts(*floats, biases=biases), CPU, torch.float32, OPS, keep=True)
    projection(x)
    q = rounded(floats[1], spec)
    projection.replace("k_proj", q, PER_TOKEN_INT8)
    wanted = [expected(w, None, x, b) for w, b in zip(floats, biases)]
    wanted[1] = expected(q, PER_TOKEN_INT8, x, biases[1])
    assert relative_error(projection(x), torch.cat(wanted, -1)) <= 1e-3
    assert len(projection.linears) == 3
    for name, weight in (("layer.q_proj", floats[0]), ("v_proj", floats[2])):
        projection.replace(name, rounded(weight, spec), PER_TOKEN_INT8)
    assert len(projection.linears) == 1

    with pytest.raises(ValueError, match=r"layer.k_proj: cannot replace .*\(32, 128\)"):
        projection.replace("k_proj", floats[0], None)
    with pytest.raises(KeyError, match="q_proj"):
        projection.replace("up_proj", floats[0], None)
    with pytest.raises(ValueError, match="editable=True"):
        Projection(parts(*floats), CPU, torch.float32, OPS).pack().replace("k_proj", floats[1], None)


def test_a_scheme_no_kernel_runs_is_refused_with_every_reason() -> None:
    """int8 activations with 16-bit weights are in no table."""
    with pytest.raises(ValueError, match="no kernel runs") as error:
        Linear(random(8, 64), PER_TOKEN_INT8, None, CPU, torch.float32, OPS)
    assert "torch int8" in str(error.value)


def e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 value in float64, half to even: 3 bits after the first, steps of 2^-9 below 2^-6, at most 448."""
    step = torch.exp2(torch.floor(torch.log2(x.abs().double().clamp_min(2.0**-6))) - 3)
    return (torch.round(x.double() / step) * step).clamp(-448, 448)


def float8_values(x: Tensor, act: Spec, scale: float | None) -> Tensor:
    """What x is after fp8, in float64; the division by the scale is fp32, as checkpoints' tools do it."""
    groups = x.split(act.group or x.shape[1], 1)
    scales = [g.abs().amax(1, keepdim=True) / 448 if scale is None else torch.tensor(scale) for g in groups]
    return torch.cat([e4m3(g / s) * s.double() for g, s in zip(groups, scales)], 1)


def float8_weight(n: int, k: int, tile: tuple, seed: int = 1) -> QTensor:
    codes = (random(n, k, seed=seed) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    tiles = [1 if t is None else -(-size // t) for t, size in zip(tile, (n, k))]
    return QTensor(Spec(FP8, tile), codes, random(*tiles, seed=seed + 1).abs() + 0.1)


STATIC_FP8 = Spec(FP8, (None, None))
FLOAT8_CASES = [((None, None), STATIC_FP8, 0.004), ((1, None), STATIC_FP8, 0.02), ((1, None), PER_TOKEN_FP8, None),
                ((128, 128), Spec(FP8, (1, 128), dynamic=True), None)]


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize(("tile", "act", "scale"), FLOAT8_CASES)
def test_fp8_activations_are_rounded_as_the_scheme_says(rows: int, tile: tuple, act: Spec, scale: float | None) -> None:
    """Of every kernel that accepts; 0.004 * 448 is below the largest input, which saturates. The last block is a part."""
    weight, x, bias = float8_weight(160, 192, tile), random(rows, 192, seed=2), random(160, seed=3)
    x[0, 0], x[0, 1] = 5.0, 1e-4
    wanted = float8_values(x, act, scale) @ dequantize(weight, torch.float64).t()
    out = Linear(weight, act, bias, CPU, torch.float32, OPS, scale)(x)
    assert relative_error(out, wanted + bias.double()) <= 1e-6
    assert relative_error(out, expected(weight, None, x, bias)) >= 5e-3  # the rounding shows
    shape = LinearShape(scheme_of(weight.spec, act), 160, 192, CPU, torch.float32, act_scale=scale)
    accepted = [kernel for kernel in linear_kernels(CPU) if kernel.accepts(shape) is None]
    assert all(kernel.takes is None and "fp8" in kernel.name for kernel in accepted)
    for kernel in accepted:
        packed = kernel.pack(weight, shape)
        assert relative_error(kernel.run(packed, x), wanted) <= 1e-6
        assert kernel.run(packed, x[:0]).shape == (0, 160)
    if tile != (128, 128):  # the GPU's product, which torch has on a CPU too
        kernel, shape = reference.SCALED_MM, replace(shape, dtype=torch.bfloat16)
        assert relative_error(kernel.run(kernel.pack(weight, shape), x), wanted) <= 2.0**-8
        assert "GPU" in kernel.accepts(shape)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_zero_points_under_int8_activations(rows: int) -> None:
    weight = rounded(random(40, 128, seed=1), SCHEMES["w4a16_zero_g128"].weight)
    x, shape = random(rows, 128, seed=2), LinearShape(scheme_of(weight.spec, PER_TOKEN_INT8), 40, 128, CPU, torch.float32)
    accepted = [kernel for kernel in linear_kernels(CPU) if kernel.accepts(shape) is None]
    assert accepted
    for kernel in accepted:
        out = kernel.run(kernel.pack(weight, shape), OPS.quantize_rows(x))
        torch.testing.assert_close(out.double(), expected(weight, PER_TOKEN_INT8, x), rtol=1e-4, atol=1e-4)


def test_fp8_activations_are_rounded_per_linear_or_refused() -> None:
    """Linears that share an input but not its static scale stay apart, each with its own."""
    weights, x = [float8_weight(32, 128, (None, None), seed) for seed in (1, 3, 5)], random(7, 128, seed=9)
    scales = (0.004, 0.004, 0.03)
    made = [replace(part, act_scale=s) for part, s in zip(parts(*weights, act=STATIC_FP8), scales)]
    projection = Projection(made, CPU, torch.float32, OPS)
    wanted = [float8_values(x, STATIC_FP8, s) @ dequantize(w, torch.float64).t() for w, s in zip(weights, scales)]
    assert relative_error(projection(x), torch.cat(wanted, -1)) <= 1e-6
    assert [row["name"] for row in projection.explain()] == ["layer.q_proj,k_proj", "layer.v_proj"]
    with pytest.raises(ValueError, match=r"torch fp8: wants .*input_scale.*torch: leaves activations as they"):
        Linear(weights[0], STATIC_FP8, None, CPU, torch.float32, OPS)
    per_batch = LinearShape(scheme_of(weights[0].spec, replace(STATIC_FP8, dynamic=True)), 32, 128, CPU, torch.float32)
    with pytest.raises(ValueError, match="let requests change each other"):
        choose(per_batch)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("kind", "base", "scaling"),
    [
        ("default", 1e4, {}),
        ("linear", 1e4, {"factor": 4.0}),
        ("dynamic", 1e4, {"factor": 2.0}),  # within the original length, where it must change nothing
        ("llama3", 5e5, LLAMA3),  # Llama 3.1
        ("yarn", 1e6, {"factor": 4.0, "original_max_position_embeddings": 32768}),  # Qwen2.5 with 128k
        ("yarn", 1e4, YARN | {"attention_factor": 0.9}),
        ("yarn", 1e4, YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 24, "beta_slow": 2}),
        ("yarn", 1e4, YARN | {"truncate": False}),
    ],
)
def test_rope_table_is_transformers(kind: str, base: float, scaling: dict) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=512, num_attention_heads=4, max_position_embeddings=1024,
                         rope_parameters={"rope_type": kind, "rope_theta": base, **scaling})
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1), torch.arange(1024)[None])
    table = cos_sin_table(Rope(base, kind, 1.0, scaling), 128, 1024, CPU)
    assert table.shape == (1024, 128)
    assert table.dtype == torch.float32
    # 1e-6 of relative error in a frequency is 1e-3 radians at position 1023
    assert (table[:, :64] - cos[0, :, :64]).abs().max() <= 3e-4
    assert (table[:, 64:] - sin[0, :, :64]).abs().max() <= 3e-4


def test_partial_rope_turns_the_first_channels_as_a_narrower_head_would() -> None:
    assert torch.equal(cos_sin_table(Rope(partial=0.5), 128, 32, CPU), cos_sin_table(Rope(), 64, 32, CPU))

"""Scales, GPTQ, rotation, smoothing against independent references; a tiny checkpoint end to end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import make_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from nybble.checkpoint import convert_checkpoint, open_checkpoint
from nybble.checkpoint.compressed import transform_config
from nybble.formats.qtensor import dequantize
from nybble.formats.spec import FP8, INT4, INT8, SCHEMES, Num, Spec
from nybble.kernels.reference import hadamard_blocks
from nybble.models import forward_window, load_model, read_config
from nybble.models.decoder import Layer
from nybble.models.load import build
from nybble.models.window import scratch_kv, window_step
from nybble.quantize import Recipe, auto, calibrate, quantize_checkpoint, run
from nybble.quantize.auto import Candidate, allocate
from nybble.quantize.calibrate import build_layer, take_windows, twin
from nybble.quantize.gptq import follow, one_block, output_error, quantize_gptq, refit_scale
from nybble.quantize.learn import TrainedLayer, learn_scales
from nybble.quantize.recipe import from_dict, from_toml, key_table, shipped_text
from nybble.quantize.resume import Saved
from nybble.quantize.rotate import OnlineHadamard, Rotated, can_rotate, hadamard
from nybble.quantize.rtn import ERROR_POWER, absmax_scale, mse_scale, quantize_rtn, settle, snap
from nybble.quantize.run import group_notes, linear_schemes, resolve_transform
from nybble.quantize.smooth import search, smooth_layer

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
CHANNEL, GROUP = Spec(INT4, (1, None)), Spec(INT4, (1, 32))


def correlated(rows: int, k: int, seed: int = 0) -> Tensor:
    """Inputs with a few directions that carry most of the energy, and one outlier channel, as in a transformer."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 8, generator=random) @ torch.randn(8, k, generator=random)
    x += 0.3 * torch.randn(rows, k, generator=random)
    x[:, 3] *= 20
    return x


def weight_of(n: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def moment_of(x: Tensor) -> Tensor:
    stats = calibrate.Stats(x.shape[1], "cpu", None, 0.0)
    stats.add(x[:100], None)
    stats.add(x[100:], None)
    return stats.moment


# ---- scales ---------------------------------------------------------------------------------------------------------


def test_absmax_scales_are_rounded_before_the_codes():
    w = torch.tensor([[0.7, -0.3, 0.05, 0.0], [0.0, 0.0, 0.0, 0.0]])
    q = quantize_rtn(w, CHANNEL, torch.float16)
    stored = float(np.float16(0.7 / 7))
    assert q.scale.tolist() == [[stored], [0.0]]
    assert q.codes.tolist() == [[round(v / stored) for v in (0.7, -0.3, 0.05, 0.0)], [0, 0, 0, 0]]
    assert q.codes.tolist()[0] == [7, -3, 1, 0]


def test_scale_dtype_bounds_what_is_stored():
    w = weight_of(8, 64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for scale in (absmax_scale(w, GROUP, dtype), mse_scale(w, GROUP, dtype)):
            assert torch.equal(scale, scale.to(dtype).float())
    assert absmax_scale(torch.full((1, 32), 1e6), CHANNEL, torch.float16).item() == 65504.0  # never inf


def test_mse_scale_beats_absmax_and_a_fine_grid_barely_beats_it():
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) ** 3

    def loss(scale: Tensor) -> Tensor:
        codes = torch.clamp(torch.round(w.double() / scale.double()), -8, 7)
        return (codes * scale.double() - w.double()).abs().pow(ERROR_POWER).sum(1)

    widest = w.abs().amax(1, keepdim=True) / 7
    fine = torch.stack([loss(widest * p) for p in np.linspace(0.2, 1.0, 801)]).amin(0)
    found = loss(mse_scale(w, CHANNEL, torch.float32))
    assert (found <= loss(widest)).all()
    assert found.sum() < 0.95 * loss(widest).sum()
    assert found.sum() < 1.1 * fine.sum()


def test_importance_moves_the_scale_towards_channels_that_matter():
    w = torch.tensor([[1.0, 0.11, 0.12, 0.13]])
    weighted = mse_scale(w, CHANNEL, torch.float32, torch.tensor([1e-4, 1.0, 1.0, 1.0]))
    assert weighted.item() < mse_scale(w, CHANNEL, torch.float32, torch.tensor([1.0, 1e-3, 1e-3, 1e-3])).item()


@pytest.mark.parametrize("spec", [Spec(INT4, (1, 32), zero=True), Spec(INT4, (None, None))])
def test_specs_that_are_not_written_are_refused(spec: Spec):
    with pytest.raises(ValueError, match="symmetric weights"):
        quantize_rtn(weight_of(4, 128), spec)


def test_bad_weights_are_refused():
    w = weight_of(4, 48)
    with pytest.raises(ValueError, match="do not divide 48"):
        quantize_rtn(w, Spec(INT4, (1, 32)))
    w[1, 2] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        quantize_rtn(w, CHANNEL)
    with pytest.raises(ValueError, match=r"layer 7.*NaN"):
        quantize_gptq(w, torch.eye(48), CHANNEL, name="layer 7")


@pytest.mark.parametrize("mse", [False, True])
@pytest.mark.parametrize(("name", "error"), [("w4a8", 0.2), ("w4a8_g128", 0.16), ("w4a8_qqq_g128", 0.16), ("w4a16_g64", 0.16),
                                             ("w8a8", 0.0), ("fp8", 0.04)])
def test_tiny_weights_of_fp16_models_do_not_become_zero(name: str, error: float, mse: bool):
    """Scales of a millionth / 127 are below fp16's smallest number, 2^-24, of which such weights are up to 127."""
    spec, w = SCHEMES[name].weight, (weight_of(8, 256) / weight_of(8, 256).abs().amax() * 4e-6).half()
    q = quantize_rtn(w, spec, torch.float16, mse)
    wide, scale = w.double(), q.scale.double() * (1 if q.over is None else q.over.double())
    assert torch.equal(scale, scale.half().double())
    group = spec.group or 256
    values = (q.codes.double().view(8, -1, group) * scale[..., None]).view(8, 256)
    assert (values - wide).norm() <= error * wide.norm()


@pytest.mark.parametrize("largest", [2e-6, 2e-5, 2e-4])
@pytest.mark.parametrize("name", ["w4a8", "w4a8_qqq_g128", "w8a8"])
def test_refitting_tiny_scales_of_fp16_models_lowers_the_error_too(name: str, largest: float):
    w, h = weight_of(16, 256), moment_of(correlated(600, 256))
    w = (w / w.abs().amax() * largest).half()
    greedy, refitted = (quantize_gptq(w, h, SCHEMES[name].weight, sweeps=sweeps) for sweeps in (0, 2))
    assert output_error(w, refitted, h) <= output_error(w, greedy, h)


def test_whole_scales_of_a_few_of_fp16s_steps_stay_what_they_are():
    wanted = torch.randint(1, 80, (4000, 8), generator=torch.Generator().manual_seed(0)) * 2.0**-24
    wanted[0] = torch.tensor([37, *[5] * 7]) * 2.0**-24
    spec = SCHEMES["w4a8_qqq_g128"].weight
    settled = settle(wanted, spec, torch.float16)
    assert torch.equal(settle(settled, spec, torch.float16), settled)


def test_groups_far_below_the_largest_keep_a_scale():
    """Of a row whose scales are whole multiples of one: half a multiple is one, not none."""
    w = weight_of(8, 256)
    w[:, :128] *= 0.02
    q = quantize_rtn(w, SCHEMES["w4a8_qqq_g128"].weight, torch.bfloat16)
    small = (q.codes[:, :128].double() * q.scale[:, :1].double() * q.over.double()) - w[:, :128].double()
    assert small.norm() < 0.8 * w[:, :128].double().norm()


@pytest.mark.parametrize(("dtype", "off"), [(torch.float16, 0.045), (torch.bfloat16, 0.08)])
def test_whole_scales_are_exact_in_the_stored_dtype_and_near(dtype: torch.dtype, off: float):
    wanted = (torch.rand(200, 32, generator=torch.Generator().manual_seed(5)) * 0.03 + 0.01).to(dtype).float()
    wanted[3], wanted[4, 5] = 0.0, 0.0
    whole, unit = snap(wanted, dtype)
    assert torch.equal(whole, whole.round())
    assert whole.min() == 0
    assert whole.max() == 16
    product = whole.double() * unit.double()
    assert torch.equal(product, product.to(dtype).double())
    assert unit[3] == 0
    assert whole[4, 5] == 0
    assert (product / wanted - 1).nan_to_num(0.0).abs().mean() < off
    again = settle(product.float(), SCHEMES["w4a8_qqq_g128"].weight, dtype)
    assert torch.equal(again.double(), product)


def test_gptq_in_fp8_rounds_to_numbers_fp8_holds_and_beats_rounding_to_nearest():
    x, w = correlated(600, 96), weight_of(24, 96)
    h, spec = moment_of(x), SCHEMES["fp8"].weight
    found = quantize_gptq(w, h, spec, sweeps=2)
    assert found.codes.dtype == torch.float8_e4m3fn
    assert output_error(w, found, h) < 0.8 * output_error(w, quantize_rtn(w, spec), h)


def test_gptq_with_whole_scales_loses_little_against_free_ones():
    x, w = correlated(600, 256), weight_of(24, 256)
    h = moment_of(x)
    free = quantize_gptq(w, h, Spec(INT4, (1, 128)), sweeps=2)
    whole = quantize_gptq(w, h, SCHEMES["w4a8_qqq_g128"].weight, sweeps=2)
    assert (whole.codes.int() * whole.scale.repeat_interleave(128, 1).int()).abs().max() <= 128
    exact = whole.codes.double() * (whole.scale * whole.over).double().repeat_interleave(128, 1)
    assert torch.equal(dequantize(whole, torch.float64), exact)
    assert output_error(w, whole, h) < 1.15 * output_error(w, free, h)


@pytest.mark.skipif(INTERPRETING, reason="starts the interpreter")
def test_the_gpu_loop_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not INTERPRETING, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("num", [INT4, INT8, FP8], ids=lambda n: n.name)
@pytest.mark.parametrize("sweep", [False, True])
def test_interpreted_block_is_the_torch_block(num: Num, sweep: bool):
    from nybble.quantize.gptq_triton import one_block as compiled

    random = torch.Generator().manual_seed(9)
    k, n = 200, 37
    matrix = (correlated(400, k).t() @ correlated(400, k) / 400 + torch.eye(k)).contiguous()
    scale = torch.rand(k, n, generator=random) * 0.1 + 0.01
    scale[3, 5] = 0.0
    state = torch.randn(k, n, generator=random) * 0.3 * num.qmax / 7
    codes = torch.randint(-7, 8, (k, n), generator=random).float()
    for start, stop in ((0, 128), (128, 200)):
        mine, theirs = codes.clone(), codes.clone()
        told = one_block(state.clone(), mine, scale, matrix, start, stop, num, sweep)
        same = compiled(state.clone(), theirs, scale, matrix, start, stop, num, sweep)
        assert torch.equal(mine, theirs)
        assert mine.abs().max() <= num.qmax + 1
        torch.testing.assert_close(same, told, rtol=1e-4, atol=1e-5)


# ---- GPTQ -----------------------------------------------------------------------------------------------------------


def surgeon(w: np.ndarray, h: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Optimal brain quantization in natural order, by the textbook: remove a channel from H^-1 by elimination. float64."""
    w, inverse = w.copy(), np.linalg.inv(h)
    codes = np.zeros_like(w)
    for j in range(w.shape[1]):
        codes[:, j] = np.clip(np.rint(w[:, j] / scale[:, j]), -8, 7)
        error = (w[:, j] - codes[:, j] * scale[:, j]) / inverse[j, j]
        w -= np.outer(error, inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


@pytest.mark.parametrize("spec", [CHANNEL, GROUP])
@pytest.mark.parametrize("block", [16, 128])
def test_gptq_is_the_optimal_brain_surgeon_in_float64(spec: Spec, block: int):
    w, h = weight_of(24, 96), moment_of(correlated(400, 96))
    q = quantize_gptq(w, h, spec, torch.float32, damping=0.01, act_order=False, mse=False, sweeps=0, block=block)
    damped = h.double().numpy() + 0.01 * float(h.diagonal().mean()) * np.eye(96)
    scale = absmax_scale(w, spec, torch.float32)
    assert torch.equal(q.scale, scale)
    expected = surgeon(w.double().numpy(), damped, scale.repeat_interleave(96 // scale.shape[1], 1).double().numpy())
    # fp32 error feedback may flip a code that lies on a tie; nothing else
    assert (q.codes.numpy() != expected).mean() < 0.005


def test_without_correlation_gptq_is_rounding_to_nearest():
    w, h = weight_of(16, 64), torch.diag(torch.linspace(1, 9, 64))
    rtn = quantize_rtn(w, GROUP, torch.float16)
    assert torch.equal(quantize_gptq(w, h, GROUP, torch.float16, mse=False).codes, rtn.codes)
    refitted = quantize_gptq(w, h, GROUP, torch.float16, mse=False, sweeps=2)
    assert output_error(w, refitted, h) < output_error(w, rtn, h)


@pytest.mark.parametrize("spec", [CHANNEL, GROUP])
def test_each_refinement_lowers_the_output_error(spec: Spec):
    w, x = weight_of(64, 128), correlated(1000, 128)
    h = moment_of(x)
    errors = [output_error(w, quantize_rtn(w, spec), h)]
    for options in (
        {"act_order": False, "mse": False, "sweeps": 0},
        {"mse": True, "sweeps": 0},
        {"mse": True, "sweeps": 1},
        {"mse": True, "sweeps": 4},
    ):
        errors.append(output_error(w, quantize_gptq(w, h, spec, **options), h))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.5 * errors[1] < 0.25 * errors[0]


def test_output_error_is_the_outputs():
    w, x = weight_of(8, 32).double(), correlated(300, 32).double()
    q = quantize_rtn(w.float(), CHANNEL)
    exact = ((x @ (dequantize(q, torch.float64) - w).t()).square().sum() / (x @ w.t()).square().sum()).item()
    assert output_error(w.float(), q, (x.t() @ x) / 300) == pytest.approx(exact, rel=1e-4)


def test_refitted_scales_are_the_least_squares_solution():
    w, x = weight_of(6, 64).double(), correlated(500, 64).double()
    q = quantize_rtn(w.float(), GROUP, torch.float32)
    h = (x.t() @ x) / 500
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    codes = q.codes.double()
    fitted = refit_scale(w[:, order].float(), codes[:, order].float(), q.scale, GROUP, order, h[order][:, order].float(),
                         torch.float32)
    for n in range(6):
        columns = torch.stack([x[:, :32] @ codes[n, :32], x[:, 32:] @ codes[n, 32:]], 1)
        expected = np.linalg.lstsq(columns.numpy(), (x @ w[n]).numpy(), rcond=None)[0]
        assert fitted[n].numpy() == pytest.approx(expected, rel=2e-3)


def test_follow_is_the_least_squares_solution():
    w, x = weight_of(6, 16).double(), correlated(500, 16).double()
    clean = x + torch.randn(500, 16, generator=torch.Generator().manual_seed(2)).double()
    h, cross = (x.t() @ x) / 500, ((clean - x).t() @ x) / 500
    expected = np.linalg.lstsq(x.numpy(), (clean @ w.t()).numpy(), rcond=None)[0].T
    assert follow(w.float(), h, cross, 1e-9, "it").numpy() == pytest.approx(expected, abs=1e-4)
    assert torch.allclose(follow(w.float(), h, torch.zeros_like(h), 0.01, "it"), w.float())


def test_dead_and_dependent_inputs():
    w, x = weight_of(8, 64), correlated(20, 64)  # 20 rows: rank 20 of 64
    x[:, 10] = 0
    q = quantize_gptq(w, moment_of(x), CHANNEL, torch.float16, damping=1e-6, mse=False, sweeps=1)
    assert torch.isfinite(dequantize(q)).all()
    assert output_error(w, q, moment_of(x)) < output_error(w, quantize_rtn(w, CHANNEL), moment_of(x))
    dead = quantize_gptq(torch.zeros(4, 64), moment_of(x), GROUP)
    assert not dead.codes.any()
    assert not dead.scale.any()


def test_bad_statistics_name_the_layer():
    h = moment_of(correlated(200, 32))
    h[3, 4] = torch.inf
    with pytest.raises(ValueError, match=r"model.layers.3.*NaN or infinity"):
        quantize_gptq(weight_of(4, 32), h, CHANNEL, name="model.layers.3")
    with pytest.raises(ValueError, match=r"model.layers.3.*does not factor"):
        quantize_gptq(weight_of(4, 32), -torch.ones(32, 32) + torch.eye(32), CHANNEL, name="model.layers.3")


# ---- recipes and calibration text -----------------------------------------------------------------------------------


def test_recipe_survives_and_refuses_what_it_does_not_know():
    recipe = Recipe(scheme="w4a16", group=64, method="rtn", damping=0.05, calibration='a "quoted" name')
    assert from_dict(recipe.to_dict()) == recipe
    written = ['scheme = "w4a16"', "group = 64", 'method = "rtn"', "damping = 0.05", "calibration = 'a \"quoted\" name'"]
    assert from_toml("\n".join(written)) == recipe
    for values, named in (({"grupo": 1}, "grupo"), ({"group": "64"}, "group"), ({"act_order": 1}, "act_order"),
                          ({"scheme": "w2a8"}, "scheme"), ({"damping": 0.0}, "damping"), ({"group": 7}, "group")):
        with pytest.raises(ValueError, match=named):
            from_dict(values)
    with pytest.raises(ValueError, match="not TOML"):
        from_toml("group = = 3")
    assert from_dict({"damping": 1}).damping == 1.0


@pytest.mark.parametrize(("config", "reason"), [
    ("{}", "records no recipe"), ('{"nybble": {"recipe": {"converted_from": "x"}}}', "records no recipe"),
    ('{"nybble": 1}', "nybble = 1; wants an object"), ('{"nybble": {"recipe": []}}', "nybble: recipe = .*; wants an object")])
def test_a_checkpoint_without_a_recipe_is_said(tmp_path: Path, config: str, reason: str):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{reason}"):
        Recipe.load(tmp_path)


def test_weights_are_no_recipe(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\0\0\0\xff\xfe")
    with pytest.raises(ValueError, match="model.gguf is no recipe: give a TOML file, or a directory"):
        Recipe.load(tmp_path / "model.gguf")


def test_a_recipe_of_the_wrong_type_says_what_to_write():
    with pytest.raises(ValueError, match=r"group = 'channel' is a str; wants int\. .* 0 is one scale per channel"):
        from_toml('group = "channel"')


def test_windows_spread_over_the_text():
    assert take_windows(range(100), 4, 10, 100).tolist() == [list(range(s, s + 10)) for s in (0, 30, 60, 90)]
    assert take_windows(range(10), 4, 10, 10).shape == (1, 10)
    with pytest.raises(ValueError, match="9 tokens"):
        take_windows(range(9), 4, 10, 9)


def test_calibration_and_evaluation_texts_share_nothing():
    from importlib.resources import files

    sample = (files("nybble.evals") / "data" / "sample.txt").read_text(encoding="utf-8")
    text = shipped_text()
    assert len(text) > 60_000
    assert len(sample) > 20_000
    assert not {line for line in sample.splitlines() if len(line) > 80} & set(text.splitlines())


# ---- rotation and smoothing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 12, 20, 28, 36, 64, 108, 576, 896])
def test_hadamard_is_orthogonal_and_flat(size: int):
    matrix = hadamard(size)
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(matrix.abs(), torch.full_like(matrix, size**-0.5))


class Tensors:
    """A source of named tensors."""

    def __init__(self, config: dict, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def get(self, name: str) -> Tensor:
        return self.tensors[name]

    def act(self, name: str) -> None:
        return None

    def unread(self) -> list[str]:
        return []


def tiny(architecture: str, tied: bool, hidden: int = 48) -> Tensors:
    """A random two-layer model with grouped heads, norms far from 1 and an outlier channel."""
    random = torch.Generator().manual_seed(7)
    config = {"architectures": [architecture], "vocab_size": 96, "hidden_size": hidden, "intermediate_size": 64,
              "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
              "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": tied, "torch_dtype": "float32"}
    if architecture.startswith("Qwen2"):
        del config["head_dim"]
        config["num_attention_heads"], config["num_key_value_heads"] = hidden // 16, 1
    q, kv = config["num_attention_heads"] * 16, config["num_key_value_heads"] * 16
    shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
              "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (64, hidden), "mlp.up_proj": (64, hidden),
              "mlp.down_proj": (hidden, 64)}
    tensors = {"model.embed_tokens.weight": torch.randn(96, hidden, generator=random)}
    tensors["model.norm.weight"] = torch.rand(hidden, generator=random) + 0.5
    if not tied:
        tensors["lm_head.weight"] = torch.randn(96, hidden, generator=random)
    for i in range(2):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.{name}.weight"] = torch.randn(shape, generator=random) * 0.15
            if architecture.startswith("Qwen2") and name[10:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"model.layers.{i}.{name}.bias"] = torch.randn(shape[0], generator=random)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = torch.rand(hidden, generator=random) + 0.5
            tensors[f"model.layers.{i}.{norm}.weight"][5] = 30.0
    return Tensors(config, tensors)


def logits_of(source: Tensors | Rotated, names: list[str]) -> Tensor:
    held = Tensors(dict(source.config), {name: source.get(name) for name in names})
    model = build(read_config(held.config), held, torch.device("cpu"), torch.float32)
    return forward_window(model, torch.arange(40)[None] % 96)


@pytest.mark.parametrize(("architecture", "tied"), [("LlamaForCausalLM", True), ("LlamaForCausalLM", False),
                                                    ("Qwen2ForCausalLM", True)])
def test_rotation_changes_no_logit(architecture: str, tied: bool):
    source = tiny(architecture, tied)
    turned = Rotated(source, read_config(source.config), 3, torch.device("cpu"))
    names = list(source.tensors)
    before, after = logits_of(source, names), logits_of(turned, list({*names, "lm_head.weight"}))
    assert (before - after).abs().max() < 1e-4 * before.abs().max()
    gate = "model.layers.0.mlp.gate_proj.weight"
    spread = lambda w: float(w.abs().amax() / w.square().mean().sqrt())  # noqa: E731
    folded = source.get(gate) * source.get("model.layers.0.post_attention_layernorm.weight")
    assert spread(turned.get(gate)) < 0.5 * spread(folded)


def test_sizes_without_a_hadamard_matrix_are_refused():
    config = read_config(tiny("LlamaForCausalLM", True, hidden=52).config)
    assert "52" in (can_rotate(config) or "")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_smoothing_changes_no_output_and_helps_rounding(architecture: str):
    source = tiny(architecture, True)
    config, device = read_config(source.config), torch.device("cpu")
    tokens = torch.arange(64)[None] % 96
    hidden = source.get("model.embed_tokens.weight")[tokens[0]].clone()
    [(step, kv)] = calibrate.Stream(config, tokens, [hidden]).steps
    layer = build_layer(source, config, 1, device, torch.float32, 64)
    changed = smooth_layer(layer, hidden, kv, step, config, linear_schemes(config, Recipe()))
    assert {name.split(".", 3)[3] for name in changed} >= {"input_layernorm.weight", "self_attn.o_proj.weight"}
    smoothed = build_layer(source, config, 1, device, torch.float32, 64, changed)
    before, after = layer.run(hidden, kv, step), smoothed.run(hidden, kv, step)
    assert (before - after).abs().max() < 1e-4 * before.abs().max()


def test_search_shrinks_the_outlier_and_halves_the_loss():
    x, w = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)), weight_of(32, 64)
    x[:, 9] *= 60
    factors = search(x, w, SCHEMES["w4a8"])
    assert factors.argmax() == 9
    assert factors[9] > 3
    assert (factors >= 1).all()

    def loss(f: np.ndarray) -> float:
        xs, ws = x.double().numpy() / f, w.double().numpy() * f
        steps, scales = np.abs(xs).max(1, keepdims=True) / 127, np.abs(ws).max(1, keepdims=True) / 7
        rounded = (np.round(xs / steps) * steps) @ (np.round(ws / scales) * scales).T
        wanted = x.double().numpy() @ w.double().numpy().T
        return float((((rounded - wanted) ** 2).sum(1) / (wanted**2).sum(1)).mean())

    assert loss(factors.double().numpy()) < 0.5 * loss(np.ones(64))


# ---- a checkpoint, end to end ---------------------------------------------------------------------------------------

TEXT = "the cat sat on the mat and the dog ate the hat while a bird sang in a tree by the sea " * 60


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    words = sorted(set(TEXT.split()))
    config = LlamaConfig(vocab_size=len(words) + 1, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=3, num_key_value_heads=1, head_dim=16, max_position_embeddings=256,
                         tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*words, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.mark.parametrize("recipe", [
    Recipe(method="rtn", group=32, transform="none"),
    Recipe(group=32, samples=4, sequence_length=64, transform="none", drift=0.0),
    Recipe(group=0, samples=4, sequence_length=64, transform="none"),
    Recipe(group=0, samples=4, sequence_length=64, transform="smooth"),
    Recipe(group=0, samples=4, sequence_length=64, transform="rotate"),
    Recipe(scheme="w8a8", samples=4, sequence_length=64),
    Recipe(scheme="fp8", samples=4, sequence_length=64),
    Recipe(scheme="w4a16", group=32, samples=4, sequence_length=64),
    Recipe(scheme="fp8", samples=4, sequence_length=64, static_activations=True),
    Recipe(scheme="w8a8", samples=4, sequence_length=64, online_hadamard=True),
    Recipe(method="rtn", group=0, samples=4, sequence_length=64, transform="rotate", learn_scales=2),
    Recipe(scheme="fp8", method="rtn", samples=4, sequence_length=64, online_hadamard=True, transform="rotate"),
], ids=lambda r: f"{r.scheme}-{r.group}-{r.method}-{r.transform}-{r.static_activations}-{r.online_hadamard}")
def test_quantized_checkpoint_runs_close_to_the_model(checkpoint: Path, tmp_path: Path, recipe: Recipe):
    seen: list[float] = []
    report = quantize_checkpoint(checkpoint, tmp_path / "out", recipe, "int8", checkpoint / "text.txt", "cpu",
                                 lambda what, done: seen.append(done))
    written = open_checkpoint(tmp_path / "out")
    assert written.kv == "int8"
    model, original = load_model(written, "cpu"), load_model(open_checkpoint(checkpoint), "cpu")
    ids = torch.arange(48)[None] % original.config.vocab_size
    before, after = forward_window(original, ids), forward_window(model, ids)
    error = (after - before).square().mean() / before.square().mean()
    assert error < (0.02 if recipe.scheme in ("w8a8", "fp8") else 0.25)
    assert len(report.errors) == 14
    assert str(tmp_path / "out") in str(report)
    assert seen[-1] == 1.0
    if recipe.spec.group:
        assert written.get("model.layers.0.mlp.down_proj.weight").spec.group == 32
        assert written.get("model.layers.0.mlp.up_proj.weight").spec.group is None  # 48 inputs: no power of two >= 32
        assert "one scale per channel" in str(report)
        assert written.scheme_name == f"{recipe.scheme} in several groups"
    recorded = written.config["nybble"]["recipe"]
    assert from_dict(recorded).scheme == recipe.scheme
    own = "none" if recipe.scheme != "w8a8" else "rotate" if recipe.online_hadamard else "rotate+smooth"
    assert recorded["transform"] == recipe.transform.replace("auto", own)


def rounded_layer(path: Path, name: str, scheme: str, **overrides: object) -> tuple[Layer, Layer]:
    """A float layer of a tiny model, and the same with its linears rounded to nearest."""
    make_tiny(path, name, **overrides)
    model = load_model(open_checkpoint(path), "cpu", editable=True)
    floats, layer = model.layers[0], twin(model.layers[0])
    spec, act = SCHEMES[scheme].weight, SCHEMES[scheme].act
    for projection in layer.projections:
        for part in projection.parts:
            projection.replace(part.name, quantize_rtn(part.weight.float(), spec, torch.float16), act)
    return floats, layer


@pytest.mark.parametrize(("name", "scheme"), [("llama_bias", "w4a8"), ("llama_yarn", "w4a8_g32"), ("mistral", "w8a8"),
                                              ("qwen2", "w4a16"), ("qwen3", "fp8"), ("smollm", "w4a8_qqq_g128")])
def test_what_is_learned_on_is_the_layer(tmp_path: Path, name: str, scheme: str):
    floats, layer = rounded_layer(tmp_path, name, scheme, **({"hidden_size": 384, "intermediate_size": 384, "head_dim": 128}
                                                             if name == "smollm" else {}))
    x = torch.randn(48, floats.input_norm.weight.shape[0], generator=torch.Generator().manual_seed(5))
    config = read_config(open_checkpoint(tmp_path).config)
    step, kv = window_step(torch.arange(48)[None]), scratch_kv(config, "fp32", 1, "cpu")
    wanted = layer.run(x, kv[0], step)
    error = (TrainedLayer(layer, 48, torch.float32)(x) - wanted).square().mean() / wanted.square().mean()
    assert error < 1e-5  # a code of an activation that falls the other way


@pytest.mark.parametrize("scheme", ["w4a8", "w4a8_g32", "w4a8_qqq_g128", "fp8"])
def test_learning_undoes_wrong_scales_and_norms_but_no_code(tmp_path: Path, scheme: str):
    floats, layer = rounded_layer(tmp_path, "llama", scheme)
    random = torch.Generator().manual_seed(6)
    xs = [torch.randn(64, 128, generator=random) for _ in range(12)]
    config = read_config(open_checkpoint(tmp_path).config)
    step, kv = window_step(torch.arange(64)[None]), scratch_kv(config, "fp32", 1, "cpu")
    wanted = [floats.run(x, kv[0], step) for x in xs]

    def lost(layer: Layer) -> float:
        return float((layer.run(xs[-1], kv[0], step) - wanted[-1]).square().sum() / wanted[-1].square().sum())

    right, codes = lost(layer), {}
    for projection in layer.projections:
        for part in projection.parts:
            which = "scale" if part.weight.over is None else "over"
            scale = getattr(part.weight, which)
            off = (scale * (1 + 0.2 * torch.rand(scale.shape, generator=random))).half().float()
            codes[part.name] = part.weight.codes
            projection.replace(part.name, replace(part.weight, **{which: off}), part.act)
    wrong = lost(layer)
    learned = learn_scales(layer, xs[:-1], wanted[:-1], 20, 0, torch.float16, 1e-2)
    assert right < 0.5 * wrong
    assert lost(learned.layer) < right + 0.3 * (wrong - right)
    assert learned.weights.keys() == codes.keys()
    for name, q in learned.weights.items():
        assert torch.equal(q.codes.float(), codes[name].float())
        assert torch.equal(q.scale, q.scale.half().float())
    assert not torch.equal(learned.norms[0], layer.input_norm.weight)


def test_nothing_is_learned_where_nothing_can_be(tmp_path: Path):
    floats, layer = rounded_layer(tmp_path, "llama", "w4a8")
    xs = [torch.randn(64, 128, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    learned = learn_scales(layer, xs, [torch.randn_like(x) * torch.nan for x in xs], 1, 0, torch.float16)
    assert learned.layer is layer
    assert not learned.weights


def test_learning_says_what_it_left_out_and_wants_something_to_judge_by(checkpoint: Path, tmp_path: Path, monkeypatch):
    recipe = Recipe(method="rtn", group=0, samples=4, sequence_length=64, learn_scales=1)
    with pytest.raises(ValueError, match="learn_scales = 1: wants 2 calibration sequences or more.* gives 1"):
        quantize_checkpoint(checkpoint, tmp_path / "out", replace(recipe, samples=1), "int8", checkpoint / "text.txt", "cpu")
    monkeypatch.setattr("nybble.quantize.learn.WORSE", 0.0)
    report = quantize_checkpoint(checkpoint, tmp_path / "out", recipe, "int8", checkpoint / "text.txt", "cpu")
    assert "the scales of layers 0, 1 was worse on the sequence held out" in str(report)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]  # nothing stays that would be in the next run's way


def test_an_online_hadamard_changes_no_logit_and_is_the_one_that_others_mean():
    from compressed_tensors.transform import TransformConfig
    from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

    theirs = deterministic_hadamard_matrix(64, torch.float64) / 8
    x = torch.randn(3, 192, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(hadamard_blocks(x, 64), (x.unflatten(-1, (3, 64)) @ theirs).flatten(-2))
    assert TransformConfig.model_validate(transform_config(512)).config_groups["R4"].head_dim == 512
    source = tiny("LlamaForCausalLM", True)
    config = read_config(source.config)
    turned = OnlineHadamard(source, 32)
    before, after, forgotten = (
        forward_window(build(c, s, torch.device("cpu"), torch.float32), torch.arange(40)[None])
        for c, s in ((config, source), (replace(config, hadamard=32), turned), (config, turned)))
    assert (before - after).abs().max() < 1e-5 * before.abs().max()
    assert (before - forgotten).abs().max() > 0.01 * before.abs().max()


def test_an_online_hadamard_is_honoured_or_refused(checkpoint: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    quantize = lambda source, out: quantize_checkpoint(  # noqa: E731
        source, tmp_path / out, Recipe(method="rtn", group=32, online_hadamard=True, transform="none"), device="cpu")
    quantize(checkpoint, "out")
    assert open_checkpoint(tmp_path / "out").hadamard == 32
    assert "Hadamard" in open_checkpoint(tmp_path / "out").precision[1]
    with pytest.raises(ValueError, match=r"llama\+hadamard"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(ValueError, match="quantize the model it was made from"):
        quantize(tmp_path / "out", "again")
    for name in ("qqq", "gptq", "awq", "tgi"):
        with pytest.raises(ValueError, match=r"turned at run time|KV scales"):
            convert_checkpoint(tmp_path / "out", tmp_path / name, name)
    convert_checkpoint(tmp_path / "out", tmp_path / "same", "compressed-tensors")
    ids = torch.arange(40)[None] % 10
    logits = [forward_window(load_model(open_checkpoint(tmp_path / name), "cpu"), ids) for name in ("out", "same")]
    assert torch.equal(*logits)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    spoiled = {"quantization_config": None, "transform_config": None, "size": 64, "type": "random-hadamard",
               "targets": ["re:.*o_proj$"]}
    for key, value in spoiled.items():
        block = json.loads(json.dumps(config))
        group = block["quantization_config"]["transform_config"]["config_groups"]["R4"]
        if key == "quantization_config":
            del block[key]
        elif key == "transform_config":
            del block["quantization_config"][key]
        elif key == "targets":
            group["apply"][0][key] = value
        else:
            group["head_dim" if key == "size" else key] = value
        (tmp_path / "out" / "config.json").write_text(json.dumps(block))
        with pytest.raises(ValueError, match="transform"):
            open_checkpoint(tmp_path / "out")


def test_a_head_in_8_bits_is_what_transformers_reads(checkpoint: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    recipe = Recipe(method="rtn", group=32, transform="rotate", head="w8a8")
    quantize_checkpoint(checkpoint, tmp_path / "out", recipe, device="cpu")
    assert open_checkpoint(tmp_path / "out").get("lm_head.weight").spec == SCHEMES["w8a8"].weight
    ids = torch.arange(40)[None] % 10
    ours = forward_window(load_model(open_checkpoint(tmp_path / "out"), "cpu"), ids)[0]
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits[0]
    assert (ours - theirs).square().mean() < 1e-3 * theirs.square().mean()
    embedding = open_checkpoint(checkpoint).get("model.embed_tokens.weight")
    for source in (checkpoint, changed(checkpoint, tmp_path / "tied", {"lm_head.weight": embedding})):
        with pytest.raises(ValueError, match="head is its embedding"):  # as it is without rotation
            quantize_checkpoint(source, tmp_path / "no", replace(recipe, transform="none"), device="cpu")


def test_static_fp8_is_what_transformers_reads(checkpoint: Path, tmp_path: Path):
    """Layout as RedHatAI's FP8 checkpoints: float-quantized, a scale per tensor for inputs, in the model's dtype."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    recipe = Recipe(scheme="fp8", samples=4, sequence_length=64, static_activations=True)
    quantize_checkpoint(checkpoint, tmp_path / "out", recipe, calibration=checkpoint / "text.txt", device="cpu")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "float-quantized"
    (group,) = config["config_groups"].values()
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("tensor", False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: value for name, value in stored.items() if name.endswith("input_scale")}
    assert len(scales) == 14
    assert all(value.shape == (1,) and value.dtype == torch.float16 for value in scales.values())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    found: dict[str, float] = {}
    original = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, module in original.named_modules():
        if name.endswith("q_proj"):
            module.register_forward_pre_hook(lambda m, x, name=name: found.update({name: float(x[0].abs().max())}))
    tokens = take_windows(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(TEXT).ids, 4, 64, 384)
    with torch.no_grad():
        original(tokens)
        ids = torch.arange(48)[None] % original.config.vocab_size
        wanted = theirs(ids).logits[0]
    first = "model.layers.0.self_attn.q_proj"
    assert float(scales[f"{first}.input_scale"]) == pytest.approx(found[first] / 448, rel=2**-11)
    got = forward_window(load_model(open_checkpoint(tmp_path / "out"), "cpu"), ids)[0]
    assert (got - wanted).square().mean() < 1e-3 * wanted.square().mean()
    with pytest.raises(ValueError, match="static_activations"):
        Recipe(static_activations=True)


def changed(checkpoint: Path, out: Path, tensors: dict[str, Tensor] | None = None, config: dict | None = None) -> Path:
    """A copy with other tensors and settings in it."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, out)
    save_file(load_file(out / "model.safetensors") | (tensors or {}), str(out / "model.safetensors"), metadata={"format": "pt"})
    settings = json.loads((out / "config.json").read_text()) | (config or {})
    (out / "config.json").write_text(json.dumps(settings))
    return out


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(("name", "says"), [
    ("model.layers.9.mlp.up_proj.weight", "no place for .*layers.9.mlp.up_proj"), ("lm_head.weight", "lm_head.weight differs"),
    ("model.layers.1.self_attn.k_norm.weight", "no place for .*layers.1.self_attn.k_norm"), ("model.norm.bias", "no place for"),
])
def test_what_loading_would_refuse_is_refused_first(checkpoint: Path, tmp_path: Path, name: str, says: str, method: str):
    recipe = Recipe(method=method, samples=2, sequence_length=64)  # rotates, which gives the model a head of its own
    source = changed(checkpoint, tmp_path / "in", {name: torch.ones(80, 48)}, {"tie_word_embeddings": True})
    with pytest.raises(ValueError, match=says):
        load_model(open_checkpoint(source), "cpu")
    with pytest.raises(ValueError, match=says):
        quantize_checkpoint(source, tmp_path / "out", recipe, calibration=checkpoint / "text.txt", device="cpu")
    assert not (tmp_path / "out").exists()


def test_the_key_value_cache_of_a_source_is_kept_where_it_needs_no_scales(checkpoint: Path, tmp_path: Path):
    scales = {f"model.layers.{i}.self_attn.{side}_scale": torch.tensor(0.5) for i in range(2) for side in "kv"}
    source = changed(checkpoint, tmp_path / "fp8", scales, {"kv_cache_torch_dtype": "float8_e4m3fn"})
    assert open_checkpoint(source).kv == "fp8"
    report = quantize_checkpoint(source, tmp_path / "out", Recipe(method="rtn", transform="none"), device="cpu")
    assert (report.kv, open_checkpoint(tmp_path / "out").kv) == ("int8", "int8")
    assert "scales are of its own weights, so KV becomes int8" in str(report)
    source = changed(checkpoint, tmp_path / "int4", None, {"nybble": {"kv_cache": "int4"}})
    assert quantize_checkpoint(source, tmp_path / "out", Recipe(method="rtn", transform="none"), device="cpu").kv == "int4"


def test_a_tokenizer_of_another_model_is_noticed(checkpoint: Path, tmp_path: Path):
    source = changed(checkpoint, tmp_path / "in", {"model.embed_tokens.weight": torch.ones(4, 48)}, {"vocab_size": 4})
    with pytest.raises(ValueError, match=r"makes token \d+ of the calibration text, its model has 4: the two do not belong"):
        quantize_checkpoint(source, tmp_path / "out", Recipe(samples=2, sequence_length=64),
                            calibration=checkpoint / "text.txt", device="cpu")


def test_the_recipes_keys_are_documented():
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert key_table() in page
    assert from_toml(page.split("```toml")[1].split("```")[0]).layers == {"0.down": "w8a8", "0.qkv": "w4a8_g64"}
    assert all(f"| `{key}` |" in key_table() for key in Recipe().to_dict())


@pytest.mark.parametrize("name", ["16bit", "w4a16_zero_g128"])
def test_layers_get_only_schemes_that_are_written(name: str):
    with pytest.raises(ValueError, match=r"layers = .*; wants schemes out of w4a8, w4a8_g128"):
        Recipe(layers={"0.down": name})


@pytest.mark.parametrize("place", ["99.down", "0.dwon"])
def test_a_recipe_that_names_no_layer_of_the_model_is_refused(checkpoint: Path, tmp_path: Path, place: str):
    config = read_config(open_checkpoint(checkpoint).config)
    assert linear_schemes(config, Recipe(layers={"0.down": "w8a8"}))["model.layers.0.mlp.down_proj"] == SCHEMES["w8a8"]
    with pytest.raises(ValueError, match=rf"{place}; this model has 0 to 1"):
        quantize_checkpoint(checkpoint, tmp_path / "out", Recipe(method="rtn", layers={place: "w8a8"}), device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_the_same_recipe_gives_the_same_bytes(checkpoint: Path, tmp_path: Path):
    for out in ("a", "b"):
        recipe = Recipe(samples=2, sequence_length=64)
        quantize_checkpoint(checkpoint, tmp_path / out, recipe, "int8", checkpoint / "text.txt", "cpu")
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()


def test_calibration_is_no_longer_than_the_context_and_a_second_rounding_is_said(checkpoint: Path, tmp_path: Path):
    recipe = Recipe(samples=1, transform="none", sweeps=0, drift=0.0)
    assert recipe.sequence_length > 256  # what the model was made for
    report = quantize_checkpoint(checkpoint, tmp_path / "once", recipe, calibration=checkpoint / "text.txt", device="cpu")
    assert report.recipe.sequence_length == 256
    assert f"sequence_length = {recipe.sequence_length}: the model was made for 256 positions" in str(report)
    assert all(error < 0.05 for error in report.errors.values())
    assert "quantized already" not in str(report)
    again = quantize_checkpoint(tmp_path / "once", tmp_path / "twice", Recipe(method="rtn", transform="none"), device="cpu")
    assert "the source was quantized already (w4a8" in str(again)
    real = Path(__file__).parents[2] / "shared" / "checkpoints" / "gguf_llama_q4_0"
    if real.exists():
        again = quantize_checkpoint(real, tmp_path / "gguf", Recipe(method="rtn", transform="none"), device="cpu")
        assert "quantized already (Q4_0, Q8_0): what that lost is not undone, and errors are against its dec" in str(again)


def test_bad_input_is_refused_before_anything_is_written(checkpoint: Path, tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError):
        quantize_checkpoint(tmp_path / "nothing", out)
    with pytest.raises(ValueError, match="kv"):
        quantize_checkpoint(checkpoint, out, kv="int3")
    short = tmp_path / "short.txt"
    short.write_text("the cat")
    with pytest.raises(ValueError, match="2 tokens"):
        quantize_checkpoint(checkpoint, out, calibration=short)
    short.write_bytes("the café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"short\.txt is not UTF-8 text \(byte 7 is 0xe9\)"):
        quantize_checkpoint(checkpoint, out, calibration=short)
    assert not out.exists()


def test_bits_go_where_they_buy_most():
    def option(place: str, name: str, bits: float, error: float) -> Candidate:
        return Candidate(place, name, 100, 100 * bits, error)

    measured = [option("0.o", "w4a8", 4, 0.5), option("0.o", "w4a8_g64", 4.25, 0.45), option("0.o", "w8a8", 8, 0.1),
                option("0.down", "w4a8", 4, 3.0), option("0.down", "w4a8_g64", 4.25, 2.9), option("0.down", "w8a8", 8, 0.0),
                option("1.o", "w4a8", 4, 0.2), option("1.o", "w4a8_g64", 4.25, 0.25), option("1.o", "w8a8", 8, 0.19)]
    names = lambda bits: [c.scheme for c in allocate(measured, bits).values()]  # noqa: E731
    assert names(4.0) == ["w4a8", "w4a8", "w4a8"]
    assert names(4.1) == ["w4a8_g64", "w4a8", "w4a8"]  # the down projection's hull skips its groups
    assert names(5.34) == ["w4a8", "w8a8", "w4a8"]
    assert names(5.42) == ["w4a8_g64", "w8a8", "w4a8"]
    assert names(9.0) == ["w8a8", "w8a8", "w8a8"]
    with pytest.raises(ValueError, match=r"bits = 3: the cheapest schemes take 4\.000"):
        allocate(measured, 3)


def test_auto_measures_how_far_predictions_move(checkpoint: Path):
    """Against the whole model, one site rounded by hand."""
    source = open_checkpoint(checkpoint)
    config = read_config(source.config)
    recipe = Recipe(bits=5.0, transform="none", sweeps=0, drift=0.0, true_activations=False, group=0)
    tokens = torch.arange(96).view(2, 48) * 7 % config.vocab_size
    job = run._Run(source, source, config, recipe, tokens, torch.device("cpu"), None, lambda what, done: None)
    stream = job.embed(tokens, 2048)
    model = load_model(open_checkpoint(checkpoint), "cpu", editable=True)

    def logits(hidden: Tensor) -> Tensor:
        return model.logits(model.final(hidden, None))

    measured = auto.measure((job.layer(i) for i in range(2)), stream, logits, recipe, torch.float16)
    found = {(c.place, c.scheme): c for c in measured}
    before = forward_window(model, tokens).double().log_softmax(-1)
    part, seen = model.layers[0].part("down_proj"), []
    with torch.no_grad():
        start = job.embed(tokens, 2048)
        [(step, kv)] = start.steps
        model.layers[0].run(start.hidden[0], kv, step,
                            lambda name, x: seen.append(x) if "down" in name else None)
    h = seen[0].double().t() @ seen[0].double() / 96
    scheme = SCHEMES["w4a8"].weight
    q = quantize_gptq(part.weight.float(), h, scheme)
    model.layers[0].replace("down_proj", dequantize(q), None)
    after = forward_window(model, tokens).double().log_softmax(-1)
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    assert found["0.down", "w4a8"].error == pytest.approx(divergence, rel=0.2)  # fp32 sums of 4e-8
    assert found["0.down", "w4a8"].error > found["0.down", "w4a8_g32"].error > 50 * found["0.down", "w8a8"].error > 0
    assert found["0.down", "w4a8_g32"].bits == 96 * 48 * 4.5
    assert [c.scheme for c in measured if c.place == "1.qkv"] == ["w4a8", "w8a8"]  # 48 inputs: no group of 32


@pytest.mark.parametrize("transform", ["none", "rotate+smooth"])
def test_auto_stays_within_its_bits_and_its_record_makes_the_same_bytes(checkpoint: Path, tmp_path: Path, transform: str):
    recipe = Recipe(bits=5.0, samples=4, sequence_length=64, transform=transform)
    report = quantize_checkpoint(checkpoint, tmp_path / "a", recipe, "int8", checkpoint / "text.txt", "cpu")
    written = open_checkpoint(tmp_path / "a")
    assert report.bits_per_weight <= 5.0
    assert written.scheme_name == "mixed"
    assert set(report.schemes.values()) >= {"w4a8", "w8a8"}
    assert "chosen per layer at" in str(report)
    recorded = Recipe.load(tmp_path / "a")
    assert recorded.layers["1.down"] == report.schemes["model.layers.1.mlp.down_proj"]
    assert recorded.measured["1.down"].startswith("w4a8 ")
    convert_checkpoint(tmp_path / "a", tmp_path / "again", "compressed-tensors")
    assert Recipe.load(tmp_path / "again") == recorded
    assert recorded.with_options(samples=2).layers == recorded.layers
    assert recorded.with_options(bits=6.0) == replace(recorded, bits=6.0, layers={}, measured={})
    quantize_checkpoint(checkpoint, tmp_path / "b", recorded, "int8", checkpoint / "text.txt", "cpu")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert (tmp_path / "a" / "config.json").read_bytes() == (tmp_path / "b" / "config.json").read_bytes()
    model, original = load_model(written, "cpu"), load_model(open_checkpoint(checkpoint), "cpu")
    ids = torch.arange(48)[None] % original.config.vocab_size
    before, after = forward_window(original, ids), forward_window(model, ids)
    assert (after - before).square().mean() < 0.1 * before.square().mean()
    with pytest.raises(ValueError, match="with a scheme of 4-bit weights"):
        Recipe(scheme="w8a8", bits=8.0)


@pytest.mark.parametrize("options", [
    {}, {"bits": 5.0}, {"scheme": "fp8", "static_activations": True, "online_hadamard": True},
    {"learn_scales": 2, "drift": 0.0},
], ids=str)
def test_a_killed_run_goes_on_and_writes_the_same_bytes(checkpoint: Path, tmp_path: Path, options: dict,
                                                        monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe(samples=3, sequence_length=64, transform="smooth", group=32, **options)
    arguments = (recipe, "int8", checkpoint / "text.txt", "cpu")
    quantize_checkpoint(checkpoint, tmp_path / "whole", *arguments)
    layers: list[int] = []
    walk = run._Run.quantized

    def dies(self: run._Run, index: int, *rest: object) -> object:
        layers.append(index)
        if layers == [0, 1]:
            raise KeyboardInterrupt
        return walk(self, index, *rest)

    monkeypatch.setattr(run._Run, "quantized", dies)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "killed", *arguments)
    assert not (tmp_path / "killed").exists()
    report = quantize_checkpoint(checkpoint, tmp_path / "killed", *arguments)
    assert layers == [0, 1, 1]
    assert "went on after layer 0" in str(report)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert not (tmp_path / "killed.resume").exists()
    layers.clear()
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "killed", *arguments)
    quantize_checkpoint(checkpoint, tmp_path / "killed", recipe.with_options(samples=2), *arguments[1:])
    assert layers == [0, 1, 0, 1]  # another recipe starts over


def test_unfinished_work_without_its_lock_file_is_gone_on_with(tmp_path: Path):
    """As when a folder was copied without empty files."""
    first = Saved(tmp_path / "out.resume", '["recipe"]')
    first.save(0, [("a.weight", torch.ones(2))], {"a": 0.5}, [[torch.ones(1)]])
    first.close()
    (tmp_path / "out.resume" / "lock").unlink()
    with pytest.raises(ValueError, match="not written by Nybble.* a file called lock"):
        Saved(tmp_path / "out.resume", '["another"]')
    again = Saved(tmp_path / "out.resume", '["recipe"]')
    assert again.finished == 1
    with pytest.raises(ValueError, match="another run"):
        Saved(tmp_path / "out.resume", '["recipe"]')


def test_runs_that_end_and_start_at_the_same_time_work_or_say_who_does(tmp_path: Path):
    def work(_: int) -> str:
        try:
            saved = Saved(tmp_path / "out.resume", '["recipe"]')
        except ValueError as error:
            return str(error)
        with closing(saved):
            saved.remove()
        return "worked"

    with ThreadPoolExecutor(4) as pool:
        said = set(pool.map(work, range(800)))
    refused = f"another run is writing to {tmp_path / 'out'}: wait for it, or choose another output directory"
    assert {"worked"} <= said <= {"worked", refused}
    assert list(tmp_path.iterdir()) == []


def test_unfinished_work_of_a_source_that_has_changed_is_not_gone_on_with(checkpoint: Path, tmp_path: Path):
    key = lambda path: run._key(Recipe(), "int8", open_checkpoint(path), None)  # noqa: E731
    source = changed(checkpoint, tmp_path / "in")
    before = key(source)
    assert key(source) == before
    changed(checkpoint, tmp_path / "other", None, {"rms_norm_eps": 1e-2})
    shutil.copyfile(tmp_path / "other" / "config.json", source / "config.json")
    assert key(source) != before
    real = Path(__file__).parents[2] / "shared" / "checkpoints" / "gguf_llama_q4_0"
    if real.exists():
        folder = tmp_path / "gguf"
        folder.mkdir()
        shutil.copyfile(next(real.glob("*.gguf")), folder / "model.gguf")
        before = key(folder)
        os.utime(folder / "model.gguf", (1, 1))
        assert key(folder) != before


def test_a_resume_folder_of_somebody_else_is_refused_and_kept(checkpoint: Path, tmp_path: Path):
    for name, content in (("thesis.txt", "x"), ("key.json", "{}"), ("key.json", "not json")):
        folder = tmp_path / "out.resume"
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(ValueError, match=r"out\.resume exists and was not written by Nybble.* move it away"):
            quantize_checkpoint(checkpoint, tmp_path / "out", Recipe(scheme="w4a16", method="rtn"), device="cpu")
        assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(name, content)]
        shutil.rmtree(folder)


def _half(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "harm"),
    [("layer0", _half), ("layer0", Path.unlink), ("stream", _half), ("stream", lambda file: file.write_bytes(b"")),
     ("key.json", lambda file: file.write_bytes(b"\xff\x00\xfe")), ("key.json", _half),
     ("measured.json", lambda file: file.write_text("["))],
)
def test_damaged_resume_folders_are_started_over(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                                 harm: Callable[[Path], object]):
    arguments = (Recipe(samples=2, sequence_length=64, transform="none", group=32), "int8", checkpoint / "text.txt", "cpu")
    walk, layers = run._Run.quantized, []

    def dies(self: run._Run, index: int, *rest: object) -> object:
        layers.append(index)
        if layers == [0, 1]:
            raise KeyboardInterrupt
        return walk(self, index, *rest)

    monkeypatch.setattr(run._Run, "quantized", dies)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(checkpoint, tmp_path / "out", *arguments)
    harm(tmp_path / "out.resume" / name)
    with pytest.warns(UserWarning, match=r"out\.resume.* is damaged \(.*\): starting over$"):
        quantize_checkpoint(checkpoint, tmp_path / "out", *arguments)
    assert layers == [0, 1, 0, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_second_run_into_the_same_output_is_refused_until_the_first_dies(tmp_path: Path):
    key = json.dumps([{}, "int8", "", [], None])
    script = f"import time; from pathlib import Path; from nybble.quantize.resume import Saved; " \
             f"saved = Saved(Path({str(tmp_path / 'out.resume')!r}), {key!r}); print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=r"another run is writing to .*out: wait for it"):
                Saved(tmp_path / "out.resume", key)
        finally:
            first.kill()
    (tmp_path / "out.resume" / "notes.txt").write_text("mine")
    saved = Saved(tmp_path / "out.resume", key)
    saved.remove()
    saved.close()
    assert [p.name for p in (tmp_path / "out.resume").iterdir()] == ["notes.txt"]


def test_a_terminated_run_leaves_only_what_the_next_goes_on_with(checkpoint: Path, tmp_path: Path):
    slow = ("import sys, time; from nybble import cli; from nybble.quantize import run; "
            "run._Run.quantized = lambda *_: (print('here', flush=True), time.sleep(600)); cli.app(sys.argv[1:])")
    command = [sys.executable, "-c", slow, "quantize", str(checkpoint), "-o", str(tmp_path / "out"), "--method", "rtn"]
    process = subprocess.Popen([*command, "--transform", "none", "--device", "cpu"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.terminate()
    assert process.wait(60) == 143
    assert [file.name for file in tmp_path.iterdir()] == ["out.resume"]


def test_chunks_change_nothing_but_the_order_of_sums(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recipe = Recipe(samples=5, sequence_length=64, transform="none", group=32)
    one = quantize_checkpoint(checkpoint, tmp_path / "one", recipe, "int8", checkpoint / "text.txt", "cpu")
    monkeypatch.setattr(run, "CHUNK", 128)  # 2 + 2 + 1 sequences
    some = quantize_checkpoint(checkpoint, tmp_path / "some", recipe, "int8", checkpoint / "text.txt", "cpu")
    assert some.errors == pytest.approx(one.errors, rel=0.05)
    monkeypatch.setattr(calibrate, "KEPT", 0)  # inputs of down projections made again at every use
    quantize_checkpoint(checkpoint, tmp_path / "again", recipe, "int8", checkpoint / "text.txt", "cpu")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "some" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("options", [{"scheme": "w8a8"}, {}, {"scheme": "fp8", "method": "rtn", "static_activations": True}],
                         ids=str)
def test_not_finite_is_refused_naming_the_layer(checkpoint: Path, tmp_path: Path, options: dict):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"][3] = torch.inf
    save_file(tensors, str(broken / "model.safetensors"), metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.q_proj.*NaN or infinity"):
        quantize_checkpoint(broken, tmp_path / "out", Recipe(samples=2, sequence_length=64, transform="none", **options),
                            calibration=checkpoint / "text.txt", device="cpu")
    assert not (tmp_path / "out").exists()


def test_rounding_does_not_depend_on_the_size_of_the_inputs_where_some_are_dead():
    x, w = correlated(400, 64), weight_of(16, 64)
    x[:, 5:12] = 0
    codes = [quantize_gptq(w, moment_of(x.double() * size), CHANNEL).codes for size in (1.0, 2.0**-10)]
    assert torch.equal(*codes)


def test_inputs_are_imitated_as_the_kernel_rounds_them():
    """FP8 in groups of 128, the last of which is a part: against numpy."""
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-2, 2, 320)
    got = calibrate.as_seen(x, Spec(FP8, (1, 128), dynamic=True)).double().numpy()
    for start, stop in ((0, 128), (128, 256), (256, 320)):
        part = x[:, start:stop].double().numpy()
        scale = np.abs(part).max(1, keepdims=True) / 448
        step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(part / scale), 2.0**-6))) - 3)
        assert np.allclose(got[:, start:stop], np.rint(part / scale / step) * step * scale, rtol=1e-6, atol=step.max() * 1e-9)


def test_dead_channels_and_rows_stay_finite(checkpoint: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    dead = tmp_path / "dead"
    shutil.copytree(checkpoint, dead)
    tensors = load_file(dead / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][5:40] = 0  # inputs that are always 0: a whole group of 32
    tensors["model.layers.0.mlp.down_proj.weight"][7] = 0  # an output that is
    save_file(tensors, str(dead / "model.safetensors"), metadata={"format": "pt"})
    for recipe in (Recipe(group=32, samples=2, sequence_length=64, transform=t) for t in ("none", "smooth", "rotate")):
        report = quantize_checkpoint(dead, tmp_path / "out", recipe, calibration=checkpoint / "text.txt", device="cpu")
        assert all(0 <= error < 0.1 for error in report.errors.values())
        model = load_model(open_checkpoint(tmp_path / "out"), "cpu")
        assert torch.isfinite(forward_window(model, torch.arange(16)[None] % model.config.vocab_size)).all()


@pytest.mark.parametrize(
    ("hidden", "scheme", "expected"),
    [(48, "w4a8", "rotate"), (52, "w4a8", "smooth"), (48, "w4a16", "none"), (48, "w8a8", "rotate+smooth"),
     (52, "w8a8", "smooth"), (48, "fp8", "none")],
)
def test_auto_transform(hidden: int, scheme: str, expected: str):
    config = read_config(tiny("LlamaForCausalLM", True, hidden).config)
    assert resolve_transform(Recipe(scheme=scheme), config) == expected
    assert resolve_transform(Recipe(transform="none"), config) == "none"


def test_groups_that_give_way_are_said_once():
    config = read_config(tiny("LlamaForCausalLM", True, hidden=96).config)
    recipe = Recipe(group=64)
    schemes = linear_schemes(config, recipe)
    assert schemes["model.layers.1.mlp.down_proj"] == SCHEMES["w4a8_g64"]
    assert schemes["model.layers.1.mlp.up_proj"] == SCHEMES["w4a8_g32"]
    notes = group_notes(schemes, recipe)
    assert len(notes) == 1
    assert "gate_proj, k_proj, q_proj, up_proj, v_proj" in notes[0]


def test_a_recipe_made_with_another_calibration_text_is_said(tmp_path: Path):
    make_tiny(tmp_path / "model")
    (tmp_path / "mine.txt").write_text("Something else entirely. " * 40)
    few = Recipe(samples=1, sequence_length=32)

    def said(recipe: Recipe, text: Path | None) -> bool:
        config = read_config(json.loads((tmp_path / "model" / "config.json").read_text()))
        notes: list[str] = []
        run.calibration_tokens(tmp_path / "model", text, recipe, config, notes)
        return any("--calibration" in note for note in notes)

    mine = tmp_path / "mine.txt"
    made = replace(few, calibration="mine.txt")
    assert (said(few, None), said(few, mine), said(made, mine), said(made, None)) == (False, False, False, True)
    assert (said(replace(few, text_hash="0"), None), said(replace(few, text_hash="0"), mine)) == (True, True)

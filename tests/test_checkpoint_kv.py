"""FP8 KV scales from a checkpoint reach attention: against transformers with a cache that quantizes as the scales say."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import make_tiny, token_ids

from nybble.checkpoint import convert_checkpoint, open_checkpoint
from nybble.engine.messages import SamplingParams
from nybble.kernels.types import scaled
from nybble.llm import LLM
from nybble.models import load_model
from nybble.models.window import forward_window, scratch_kv
from nybble.quantize import calibrate_kv
from nybble.quantize.calibrate import take_windows
from nybble.text import load_tokenizer

PER_TENSOR = [(0.03, 0.004), (0.011, 0.02)]
PER_HEAD = [(torch.tensor([0.03, 0.007]), torch.tensor([0.004, 0.0013])),
            (torch.tensor([0.011, 0.05]), torch.tensor([0.02, 0.003]))]
MIXED = [(torch.tensor([0.03, 0.007]), 0.004), (0.011, torch.tensor([0.02, 0.003]))]
KINDS = {"per tensor": PER_TENSOR, "per head": PER_HEAD, "mixed": MIXED}


class Float8Cache(transformers.DynamicCache):
    """What is stored is code * scale with code = e4m3(clamp(x / scale)), K after rotation, K and V apart."""

    def __init__(self, scales, dtype=torch.float8_e4m3fn, largest=448.0) -> None:
        super().__init__()
        self.scales, self.kind, self.largest = scales, dtype, largest

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        stored = []
        for states, scale in zip((key_states, value_states), self.scales[layer_idx]):
            scale = torch.as_tensor(scale).reshape(-1, 1, 1)
            stored.append((states / scale).clamp(-self.largest, self.largest).to(self.kind).to(states.dtype) * scale)
        return super().update(*stored, layer_idx, *args, **kwargs)


def write_scales(path: Path, scales, form: str = "new") -> None:
    tensors = load_file(path / "model.safetensors")
    for layer, pair in enumerate(scales):
        for side, scale in zip("kv", pair):
            name = f"model.layers.{layer}.self_attn.{side}_scale" if form == "new" else \
                f"model.layers.{layer}.self_attn.{side}_proj.output_scale"
            value = torch.as_tensor(scale, dtype=torch.float32)
            tensors[name] = value.reshape(-1, 1, 1) if value.numel() > 1 else value.reshape(1)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"kv_cache_torch_dtype": "float8_e4m3fn"}))


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_quantizing_cache(tmp_path, family, kind):
    model = make_tiny(tmp_path / "m", family)
    scales, ids = KINDS[kind], token_ids(2, 12)
    write_scales(tmp_path / "m", scales)
    checkpoint = open_checkpoint(tmp_path / "m")
    found = checkpoint.scales_for(checkpoint.kv)
    ours = forward_window(load_model(checkpoint, "cpu"), ids, "fp8", found)
    with torch.no_grad():
        theirs, plain = model(ids, past_key_values=Float8Cache(scales)).logits, model(ids).logits
        swapped = model(ids, past_key_values=Float8Cache([pair[::-1] for pair in scales])).logits
        ones = model(ids, past_key_values=Float8Cache([(1.0, 1.0)] * 2)).logits
    spread = float(theirs.std())
    assert float((ours - theirs).abs().max()) <= 2e-4 * spread
    for other in (plain, swapped, ones):  # and it would show if scales were dropped, exchanged or 1
        assert float((other - theirs).abs().max()) >= 5e-3 * spread


@pytest.mark.parametrize("kind", ["per tensor", "per head"])
def test_prefill_decode_and_prefix_reuse_use_the_scales(tmp_path, kind):
    """The engine, greedy: a cold prompt, the same prompt over cached blocks, and one in chunks, against transformers token by
    token with the quantizing cache."""
    model = make_tiny(tmp_path / "m", "llama")
    scales = KINDS[kind]
    write_scales(tmp_path / "m", scales)
    prompt = token_ids(1, 40)[0].tolist()
    with LLM(tmp_path / "m", device="cpu", block_size=16, max_batched_tokens=512) as llm:
        assert llm.info().kv == "fp8"
        params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=0, ignore_eos=True)
        cold, warm = llm.generate(prompt, params), llm.generate(prompt, params)
    with LLM(tmp_path / "m", device="cpu", block_size=16, max_batched_tokens=24, prefix_caching=False) as llm:
        chunked = llm.generate(prompt, params)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= 32
    with torch.no_grad():
        logits = model(torch.tensor([prompt + cold.token_ids]), past_key_values=Float8Cache(scales)).logits[0].log_softmax(-1)
    expected = [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(cold.token_ids)]
    for answer in (cold, warm, chunked):
        assert answer.token_ids == cold.token_ids
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected, abs=1e-3)


def test_missing_scales_are_one_and_said(tmp_path):
    make_tiny(tmp_path / "m", "llama")
    write_scales(tmp_path / "m", PER_TENSOR[:1])
    with pytest.warns(UserWarning, match="no KV scales for layers 1: 1.0 is used there"):
        llm = LLM(tmp_path / "m", device="cpu")
    llm.close()
    with pytest.warns(UserWarning, match="fp8_e5m2 does not use them"):
        LLM(tmp_path / "m", kv="fp8_e5m2", device="cpu").close()


def test_uncalibrated_scales_are_said(tmp_path):
    make_tiny(tmp_path / "m", "llama")
    write_scales(tmp_path / "m", [(1.0, 1.0)] * 2)
    with pytest.warns(UserWarning, match="every KV scale is 1.0"):
        open_checkpoint(tmp_path / "m").scales_for("fp8")


@pytest.mark.parametrize("bad", [0.0, -0.5, float("nan"), torch.tensor([0.5, 0.0])])
def test_nonsense_stops_the_engine(tmp_path, bad):
    make_tiny(tmp_path / "m", "llama")
    write_scales(tmp_path / "m", [(0.5, 0.5), (0.5, bad)])
    with pytest.raises(ValueError, match="layer 1 has V scale"):
        LLM(tmp_path / "m", device="cpu")
    LLM(tmp_path / "m", kv="int8", device="cpu").close()  # another cache does not need them


def test_scales_of_another_model_do_not_fit():
    config = type("C", (), {"num_kv_heads": 2, "head_dim": 32, "num_layers": 1})()
    [kv] = scratch_kv(config, "fp8", 1, "cpu")
    with pytest.raises(ValueError, match="4 heads do not fit a cache of 2"):
        scaled(kv, (torch.ones(4), 1.0))
    assert scaled(kv, None) is kv


def test_scales_do_nothing_to_other_caches(tmp_path):
    """A 16-bit cache with scales in the checkpoint gives exactly what it gives without them."""
    make_tiny(tmp_path / "m", "llama")
    ids = token_ids(1, 12)
    before = forward_window(load_model(open_checkpoint(tmp_path / "m"), "cpu"), ids, "fp32")
    write_scales(tmp_path / "m", PER_HEAD, "old")
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.scales_for("fp32") is None
    assert torch.equal(forward_window(load_model(checkpoint, "cpu"), ids, "fp32"), before)
    assert checkpoint.unread() == []


# ---- calibration ----------------------------------------------------------------------------------------------------

TEXT = " ".join(f"word{i % 97} {i * i % 89}" for i in range(600))


class Largest(transformers.DynamicCache):
    """Remembers the largest K and V per layer and head."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, list[torch.Tensor]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        now = [t.abs().amax((0, 2, 3)) for t in (key_states, value_states)]
        before = self.seen.get(layer_idx, now)
        self.seen[layer_idx] = [torch.maximum(a, b) for a, b in zip(before, now)]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("per_head", [False, True])
def test_calibrated_scales_are_the_largest_k_and_v(tmp_path, family, per_head):
    model = make_tiny(tmp_path / "m", family)
    (tmp_path / "text.txt").write_text(TEXT)
    found = calibrate_kv(tmp_path / "m", tmp_path / "text.txt", per_head, samples=6, sequence_length=200, device="cpu")
    ids = load_tokenizer(tmp_path / "m").encode(TEXT, add_special=False)
    cache = Largest()
    for window in take_windows(ids, 6, 200, 384):
        fresh = Largest()
        fresh.seen = cache.seen
        with torch.no_grad():
            model(window[None], past_key_values=fresh)
        cache = fresh
    assert found.tokens == 1200
    for layer, pair in found.scales.items():
        for scale, seen in zip(pair, cache.seen[layer]):
            expected = (seen if per_head else seen.max()) / 448
            assert torch.allclose(torch.as_tensor(scale), expected, rtol=1e-5)
    assert 0 < found.divergence < 0.02
    convert_checkpoint(tmp_path / "m", tmp_path / "out", "compressed-tensors", scales=found.scales)
    again = open_checkpoint(tmp_path / "out")
    for (k, v), (k2, v2) in zip(again.scales_for("fp8"), found.scales.values()):
        assert torch.equal(torch.as_tensor(k), torch.as_tensor(k2, dtype=torch.float32))
        assert torch.equal(torch.as_tensor(v), torch.as_tensor(v2, dtype=torch.float32))


def test_too_little_text_is_refused(tmp_path):
    make_tiny(tmp_path / "m", "llama")
    (tmp_path / "text.txt").write_text(TEXT[:800])
    with pytest.raises(ValueError, match="800 tokens are too few"):
        calibrate_kv(tmp_path / "m", tmp_path / "text.txt", samples=4, sequence_length=200, device="cpu")


def test_a_tokenizer_of_another_model_is_noticed(tmp_path):
    make_tiny(tmp_path / "m", "llama", vocab_size=100)
    with pytest.raises(ValueError, match=r"makes token \d+ of the calibration text, its model has 100: the two do not belong"):
        calibrate_kv(tmp_path / "m", samples=4, sequence_length=256, device="cpu")


def test_damage_is_measured_and_said(tmp_path, monkeypatch):
    """A constant channel in K, as Qwen2's biases make, eats FP8's precision."""
    model = make_tiny(tmp_path / "m", "qwen2", use_sliding_window=False)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    for layer in (0, 1):
        tensors[f"model.layers.{layer}.self_attn.k_proj.bias"][::4] += 300.0
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    assert model is not None
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.warns(UserWarning, match=r"probabilities by .* nats a token .*Its K projections have biases"):
        calibrate_kv(tmp_path / "m", tmp_path / "text.txt", samples=6, sequence_length=200, device="cpu")


@pytest.mark.parametrize("form", ["compressed-tensors", "tgi"])
def test_quantize_with_an_fp8_cache(tmp_path, form, capsys):
    from nybble.cli import app

    make_tiny(tmp_path / "m", "llama")
    (tmp_path / "text.txt").write_text(TEXT)
    app(["quantize", str(tmp_path / "m"), "-o", str(tmp_path / "out"), "--kv", "fp8", "--format", form, "--method", "rtn",
         "--transform", "none", "--calibration", str(tmp_path / "text.txt"), "--device", "cpu"], result_action="return_value")
    assert "FP8 KV scales of 2 layers" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    written = load_file(tmp_path / "out" / "model.safetensors")
    names = {name for name in written if "self_attn" in name and name.endswith("v_scale")}
    if form == "tgi":
        assert config["kv_cache_torch_dtype"] == "float8_e4m3fn"
        assert names == {"model.layers.0.self_attn.kv_scale", "model.layers.1.self_attn.kv_scale"}
    else:
        assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == "tensor"
        assert names == {"model.layers.0.self_attn.v_scale", "model.layers.1.self_attn.v_scale"}
    assert config["nybble"]["recipe"]["method"] == "rtn"
    assert open_checkpoint(tmp_path / "out").kv == "fp8"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "out", "text.txt"]


def test_scales_of_which_some_are_per_head_are_written_alike(tmp_path):
    make_tiny(tmp_path / "m", "llama")
    write_scales(tmp_path / "m", MIXED)
    convert_checkpoint(tmp_path / "m", tmp_path / "out", "compressed-tensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.shape for name, t in written.items() if name.endswith(("k_scale", "v_scale"))} == {(2, 1, 1)}
    again = open_checkpoint(tmp_path / "out")
    for found, (k, v) in zip(again.scales_for("fp8"), MIXED):
        assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(k, dtype=torch.float32))
        assert torch.equal(torch.as_tensor(found[1]), torch.as_tensor(v, dtype=torch.float32))

"""What a newcomer adds stays small: a weight scheme, a KV type, a family, a kernel, a foreign format, each as a toy that runs
a tiny model end to end. Expected logits are transformers' for the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_tiny, token_ids
from torch import Tensor

from nybble.checkpoint import checkpoint as checkpoints
from nybble.checkpoint import open_checkpoint
from nybble.checkpoint.reading import LinearSource, Part, Reading, modules_with
from nybble.engine.config import EngineConfig
from nybble.engine.load import open_engine
from nybble.engine.messages import Delta, SamplingParams, Submit
from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import FP8_FNUZ, KV, SCHEMES, Num, Scheme, Spec, scheme_of
from nybble.kernels import registry
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.models import forward_window, load_model, read_config
from nybble.models.families import FAMILIES, Family

INT5 = Num("int5", 5, "int", -16, 15)
TOY = Scheme("w5a16", Spec(INT5, (1, 64)), None)


def logits_of(path: Path, tokens: Tensor, kv: str = "fp32") -> Tensor:
    return forward_window(load_model(open_checkpoint(path), "cpu"), tokens, kv)[0]


def theirs(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens).logits[0]


def same(found: Tensor, wanted: Tensor, share: float = 1e-4) -> None:
    assert (found - wanted).abs().max() <= share * (wanted.max() - wanted.min())


def rounded_by_hand(weight: Tensor, group: int = 64) -> tuple[Tensor, Tensor]:
    """[N, K] -> codes int8 [N, K] in -15 .. 15, scales [N, K / group]."""
    blocks = weight.view(weight.shape[0], -1, group)
    scale = blocks.abs().amax(-1) / 15
    return (blocks / scale[..., None]).round().to(torch.int8).view(weight.shape), scale


def quantized_toy(path: Path) -> Any:
    """A tiny Llama whose linears are stored in a format nobody knows: `grid` codes and `step` scales. Returns transformers'
    model with the values these mean."""
    model = make_tiny(path)
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scale = rounded_by_hand(tensors.pop(name))
        tensors[name.replace("weight", "grid")], tensors[name.replace("weight", "step")] = codes, scale
        model.get_parameter(name).data = (codes.view(*scale.shape, 64) * scale[..., None]).view(codes.shape)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "toy"}}))
    return model


def read_toy(store: Any, quantization: dict[str, Any]) -> Reading:
    """All that a foreign format takes."""

    def source(part: Part) -> LinearSource:
        n, k = part.sides("grid")
        return LinearSource(
            (n, k),
            scheme_of(TOY.weight, None),
            part.names("grid", "step"),
            lambda: QTensor(TOY.weight, part.tensor("grid"), part.scale("step")),
        )

    return Reading({module: source(Part(store, module)) for module in modules_with(store, "grid")})


def test_a_foreign_format_is_one_function_and_a_number_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = quantized_toy(tmp_path), token_ids(1, 40)
    with pytest.raises(ValueError, match="toy"):
        open_checkpoint(tmp_path)
    monkeypatch.setitem(checkpoints.READERS, "toy", read_toy)
    monkeypatch.setitem(SCHEMES, TOY.name, TOY)
    assert open_checkpoint(tmp_path).scheme_name == "w5a16"
    same(logits_of(tmp_path, tokens), theirs(model, tokens))


def test_a_kernel_is_three_functions_in_a_tuple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, calls = make_tiny(tmp_path), token_ids(1, 40), []

    def accepts(shape: LinearShape) -> str | None:
        return None if shape.scheme.name == "16bit" and shape.out_features != shape.in_features else "wants a 16-bit oblong"

    def run(packed: Tensor, x: Tensor) -> Tensor:
        calls.append(x.shape)
        return (x.double() @ packed).to(x.dtype)

    toy = LinearKernel("toy float64", accepts, lambda weight, shape: weight.double().t().contiguous(), run, None)
    ordinary = registry.linear_kernels
    monkeypatch.setattr(registry, "linear_kernels", lambda device: (toy, *ordinary(device)))
    same(logits_of(tmp_path, tokens), theirs(model, tokens))
    layer = load_model(open_checkpoint(tmp_path), "cpu").layers[0]
    assert [p.explain()[0]["kernel"] == toy.name for p in layer.projections] == [True, False, True, True]
    assert ("toy float64", "wants a 16-bit oblong") in layer.attention.o.explain()[0]["refusals"]
    assert len(calls) == 2 * 3


def test_a_family_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make_tiny(tmp_path, "qwen3"), token_ids(1, 40)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["ToyForCausalLM"], "model_type": "toy"}))
    with pytest.raises(ValueError, match="ToyForCausalLM is not supported; there are Llama"):
        load_model(open_checkpoint(tmp_path), "cpu")
    toy = Family("ToyForCausalLM", "toy", qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True, window="layers")
    monkeypatch.setattr(read_config, "__defaults__", ((*FAMILIES, toy),))
    same(logits_of(tmp_path, tokens), theirs(model, tokens))


def test_a_kv_type_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's FP8 holds half of what the other does: for K and V of ordinary size both cost the same."""
    model, tokens = make_tiny(tmp_path), token_ids(1, 100)
    monkeypatch.setitem(KV, "fp8_fnuz", Spec(FP8_FNUZ, (None, None, None)))
    wanted = theirs(model, tokens)
    error = {kv: (logits_of(tmp_path, tokens, kv) - wanted).square().mean().sqrt() for kv in ("fp8", "fp8_fnuz")}
    assert error["fp8"] / 1.3 < error["fp8_fnuz"] < 1.3 * error["fp8"]
    engine = open_engine(tmp_path, "cpu", EngineConfig(kv="fp8_fnuz", num_blocks=8))
    engine.submit(Submit("a", tokens[0].tolist(), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    events = [event for _ in range(4) for event in engine.step() if isinstance(event, Delta)]
    assert events[0].token_ids == [int(logits_of(tmp_path, tokens, "fp8_fnuz")[-1].argmax())]


def test_a_weight_scheme_is_one_line() -> None:
    """Its codes stay in the range that the line names, and no value moves by more than half a step."""
    weight = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    scale = rounded_by_hand(weight)[1]
    found = quantize_weight(weight, TOY.weight, scale)
    assert (int(found.codes.min()), int(found.codes.max())) in [(-15, 15), (-15, 14), (-14, 15)]
    assert found.bits_per_weight == pytest.approx(5 + 16 / 64)
    assert torch.equal(found.codes, rounded_by_hand(weight)[0])
    assert ((dequantize(found) - weight).view(8, 2, 64).abs() <= scale[..., None] * 0.5001).all()

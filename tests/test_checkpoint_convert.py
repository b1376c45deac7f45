"""Writing other tools' formats: what is written is unpacked element by element from the formats' facts, not by our reader."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_checkpoint import KINDS, quantize_model, tiny_llama
from test_checkpoint_foreign import (
    LOGITS,
    SHARED,
    directory,
    error_of,
    gptq,
    gptq_config,
    needs_shared,
    qqq_pack,
    swap_scales,
    values,
)
from tiny import make_tiny

from nybble.checkpoint import convert_checkpoint, open_checkpoint, write_checkpoint
from nybble.checkpoint.compressed import on_integer_grid
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import INT4, INT8_CHANNEL, PER_TOKEN_INT8, UINT4, Scheme, Spec
from nybble.kernels.registry import ops_for
from nybble.models import load_model
from nybble.models.window import forward_window
from nybble.nn.linear import Linear

# format -> what real checkpoint it is made of, or why not; "+": with int8 activations, "!": weights only
REAL = [
    ("qqq_llama_perchannel", "qqq", ""), ("qqq_qwen2_g128", "qqq", ""), ("qqq_llama_perchannel", "compressed-tensors", ""),
    ("qqq_qwen2_g128", "compressed-tensors", ""), ("awq_llama_gemm_g128", "gptq", ""), ("awq_llama_gemm_g128", "awq", ""),
    ("awq_llama_gemm_g128", "compressed-tensors", ""), ("awq_llama_gemm_g128", "compressed-tensors", "+"),
    ("gptq_llama_v1_sym_g128", "gptq", ""), ("gptq_llama_v1_sym_g128", "awq", ""),
    ("gptq_llama_v1_sym_g128", "compressed-tensors", "+"), ("ct_llama_w4a16_sym_g128", "gptq", ""),
    ("ct_llama_w4a16_sym_g128", "awq", ""), ("ct_llama_w8a8_int8", "compressed-tensors", ""),
    ("ct_llama_w8a8_int8", "gptq", "!"), ("ct_llama_fp8_static_kv", "compressed-tensors", ""),
    ("fp8_autofp8_llama_static_kv", "compressed-tensors", ""), ("modelopt_llama_fp8_kv", "compressed-tensors", ""),
    ("fp8_block_llama", "compressed-tensors", ""), ("ct_llama_fp8_dynamic", "compressed-tensors", ""),
    ("tgi_llama_kv_scale", "compressed-tensors", ""), ("tgi_llama_kv_scale", "tgi", ""), ("modelopt_llama_fp8_kv", "tgi", ""),
]
REFUSED = [
    ("gptq_llama_v1_sym_g128", "qqq", "", "int8 grid per row.*--scheme w4a8"),
    ("gptq_llama_v1_sym_g128", "qqq", "+", "int8 grid"),
    ("ct_llama_w8a8_int8", "gptq", "", "--weights-only"), ("ct_llama_w8a8_int8", "awq", "!", "4-bit"),
    ("qqq_llama_perchannel", "gptq", "", "16-bit scales and these need more.*compressed-tensors keeps.*--scheme w4a16"),
    ("qqq_qwen2_g128", "gptq", "", r"int4\[1x128\] over int8\[1x\*\] rounds.*--scheme w4a16"),
    ("qqq_qwen2_g128", "awq", "", "no int8 grid.*--scheme w4a16"),
    ("ct_llama_fp8_dynamic", "gptq", "!", r"not fp8_e4m3\[1x\*\]: quantize the original"),
    ("ct_llama_fp8_dynamic", "qqq", "", r"not fp8_e4m3\[1x\*\].*quantize the original"),
    ("awq_llama_gemm_g128", "tgi", "!", "for gptq and awq.*tgi can: leave it out"),
    ("awq_llama_gemm_g128", "compressed-tensors", "!", "leave it out"),
    ("gguf_llama_q4_0", "awq", "", "nothing was quantized"),
    ("modelopt_llama_fp8_kv", "gptq", "", "no place for this checkpoint's KV"),
    ("awq_llama_gemm_g128", "tgi", "", "nybble quantize --kv fp8"),
    ("awq_llama_gemm_g128", "qqq", "!", "qqq can: leave it out"),
    ("fp8_block_llama", "compressed-tensors", "+", "int8 activations fit"), ("gguf_llama_q4_0", "awq", "+", "have 16 bits"),
]


def real(name: str) -> Path:
    if not (SHARED / "checkpoints" / name).is_dir():
        pytest.skip(f"{name} is not here")
    return SHARED / "checkpoints" / name


@pytest.mark.filterwarnings("ignore:activations = int8")
@needs_shared
@pytest.mark.parametrize(("name", "form", "how"), REAL)
def test_real_checkpoints_keep_every_value(tmp_path, name, form, how):
    path, act = real(name), "int8" if how == "+" else None
    convert_checkpoint(path, tmp_path / "out", form, act, how == "!")
    before, after = open_checkpoint(path, act), open_checkpoint(tmp_path / "out")
    assert sorted(before.names()) == sorted(after.names())
    for parameter in before.names():
        assert torch.equal(values(before.get(parameter)), values(after.get(parameter))), parameter
        if how != "!":
            assert (before.act(parameter), before.act_scale(parameter)) == (after.act(parameter), after.act_scale(parameter))
    assert after.unread() == []
    assert after.kv == before.kv
    for layer in range(2):
        pair = before.kv_scales(layer)
        assert after.kv_scales(layer) == (pair if form != "tgi" else (max(pair), max(pair)))
    if how == "" and form in ("gptq", "awq"):  # and the whole model gives the tool's own logits
        key, measure, bound = LOGITS[name]
        reference = load_file(path / "reference.safetensors")
        assert error_of(load_model(after, "cpu"), reference, key, measure) <= bound


@pytest.mark.filterwarnings("ignore:activations = int8")
@needs_shared
@pytest.mark.parametrize(("name", "form", "how", "says"), REFUSED)
def test_what_a_format_cannot_say_is_refused(tmp_path, name, form, how, says):
    with pytest.raises(ValueError, match=says):
        convert_checkpoint(real(name), tmp_path / "out", form, "int8" if how == "+" else None, how == "!")
    assert list(tmp_path.iterdir()) == []


def field(words: torch.Tensor, row: int, i: int, bits: int) -> int:
    """Element i of a row's little-endian stream of int32 words."""
    stream = sum((int(w) & 0xFFFFFFFF) << (32 * j) for j, w in enumerate(words[row].tolist()))
    return stream >> (bits * i) & ((1 << bits) - 1)


MODULE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("kind", ["w4a16", "w4a16 zero", "w8a16"])
def test_gptq_files_hold_the_same_integers(tmp_path, kind):
    tiny_llama(torch.float16).save_pretrained(tmp_path / "in")
    made = quantize_model(tmp_path / "in", tmp_path / "ct", kind)
    convert_checkpoint(tmp_path / "ct", tmp_path / "out", "gptq")
    q, t = made[f"{MODULE}.weight"], load_file(tmp_path / "out" / "model.safetensors")
    bits, zero = (8 if kind == "w8a16" else 4), kind == "w4a16 zero"
    n, k = q.shape
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    group = k if kind == "w8a16" else 32
    assert block | {"dynamic": 0, "true_sequential": 0} == {
        "quant_method": "gptq", "bits": bits, "group_size": -1 if group == k else 32, "sym": not zero, "desc_act": False,
        "checkpoint_format": "gptq_v2" if zero else "gptq", "lm_head": False, "dynamic": 0, "true_sequential": 0}
    assert t[f"{MODULE}.qweight"].shape == (k * bits // 32, n)
    assert t[f"{MODULE}.g_idx"].tolist() == [i // group for i in range(k)]
    columns = t[f"{MODULE}.qweight"].t()
    offset = 0 if zero else 1 << (bits - 1)
    for row in (0, 7, n - 1):
        assert [field(columns, row, i, bits) - offset for i in range(k)] == q.codes[row].tolist()
        for g in range(k // group):
            stored = field(t[f"{MODULE}.qzeros"], g, row, bits)
            assert stored == (int(q.zero[row, g]) if zero else offset - 1)
            assert float(t[f"{MODULE}.scales"][g, row]) == float(q.scale[row, g])


@pytest.mark.parametrize("kind", ["w4a16", "w4a16 zero"])
def test_awq_files_hold_the_same_integers(tmp_path, kind):
    tiny_llama(torch.float16).save_pretrained(tmp_path / "in")
    made = quantize_model(tmp_path / "in", tmp_path / "ct", kind)
    convert_checkpoint(tmp_path / "ct", tmp_path / "out", "awq")
    q, t = made[f"{MODULE}.weight"], load_file(tmp_path / "out" / "model.safetensors")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert block == {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
                     "modules_to_not_convert": ["lm_head"]}
    nibble_of_column = (0, 4, 1, 5, 2, 6, 3, 7)
    at = lambda name, row, n: field(t[f"{MODULE}.{name}"], row, n // 8 * 8 + nibble_of_column[n % 8], 4)  # noqa: E731
    offset = 8 if kind == "w4a16" else 0
    for n in (0, 5, 127):
        assert [at("qweight", k, n) - offset for k in range(64)] == q.codes[n].tolist()
        assert [at("qzeros", g, n) for g in range(2)] == ([8, 8] if offset else q.zero[n].tolist())
    assert torch.equal(t[f"{MODULE}.scales"], q.scale.t().half())


@pytest.mark.parametrize("grouped", [False, True])
def test_qqq_files_are_what_its_authors_pack(tmp_path, grouped):
    """Against the published closed form, element by element. Groups: whole multiples of a step, written as compressed-tensors
    first, found again, and then written as QQQ."""
    source = open_checkpoint(_saved(tmp_path / "in", hidden_size=256, intermediate_size=512, head_dim=64))
    g = torch.Generator().manual_seed(0)
    made, schemes = {}, {}

    def tensors():
        for name in source.names():
            value, module = source.get(name), name.removesuffix(".weight")
            if "layers" in name and value.dim() == 2:
                n, k = value.shape
                codes = torch.randint(-8 if grouped else -7, 8, (n, k), generator=g).to(torch.int8)
                over = torch.randint(1, 64, (n, 1), generator=g) / 4096.0
                whole = torch.randint(1, 17, (n, k // 128), generator=g).float()
                whole[3], over[3] = 0, 0
                spec = Spec(INT4, (1, 128), over=INT8_CHANNEL) if grouped else Spec(INT4, (1, None))
                value = QTensor(spec, codes, whole, over=over) if grouped else QTensor(spec, codes, over)
                made[module], schemes[module] = value, Scheme("", replace(spec, over=None), PER_TOKEN_INT8)
            yield name, value

    write_checkpoint(tmp_path / "ct", source.config, tensors(), schemes, None, source, {})
    args = open_checkpoint(tmp_path / "ct").config["quantization_config"]["config_groups"]["group_0"]["weights"]
    says = (args["num_bits"], args["strategy"], args.get("group_size"))
    assert says == ((4, "group", 128) if grouped else (4, "channel", None))
    convert_checkpoint(tmp_path / "ct", tmp_path / "out", "qqq")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "qqq", "wbits": 4, "group_size": 128 if grouped else -1}
    t, again = load_file(tmp_path / "out" / "model.safetensors"), open_checkpoint(tmp_path / "ct")
    for module in (MODULE, "model.layers.0.self_attn.k_proj"):
        q, found = made[module], again.get(f"{module}.weight")
        assert torch.equal(values(found), values(q))
        assert (found.over is not None) == grouped  # kernels get the cheaper form back
        assert torch.equal(t[f"{module}.B"], qqq_pack((q.codes.int() + 8 if grouped else q.codes.int() & 15).numpy(), grouped))
        channel = swap_scales(t[f"{module}.s_channel"], (4, 4, 2))
        if grouped:
            steps = swap_scales(t[f"{module}.s_group"].float(), (8, 8))
            assert t[f"{module}.s_group"].dtype == torch.float16
            assert torch.equal((steps * channel).t(), q.scale * q.over)
        else:
            assert torch.equal(channel.t() * 16, q.scale)
            assert f"{module}.s_group" not in t


def _saved(path: Path, **changes) -> Path:
    tiny_llama(torch.float16, **changes).save_pretrained(path)
    return path


def test_a_grid_is_only_found_where_it_is_exact():
    codes = torch.zeros(2, 384, dtype=torch.int8)
    fits = QTensor(Spec(INT4, (1, 128)), codes, torch.tensor([[0.5, 1.5, 2.0], [0.0, 0.0, 0.0]]))
    found = on_integer_grid(fits)
    assert found.over.tolist() == [[0.5], [0.0]]
    assert found.scale.tolist() == [[1.0, 3.0, 4.0], [0.0, 0.0, 0.0]]
    for scales in ([[0.5, 1.5, 2.01], [1, 1, 1]], [[0.5, 1.5, 9.0], [1, 1, 1]], [[-0.5, 1.5, 2.0], [1, 1, 1]]):
        other = replace(fits, scale=torch.tensor(scales))
        assert on_integer_grid(other) is other


def test_mixed_gptq_uses_rules_and_comes_back(tmp_path):
    """Bits and groups that differ by module, a module left alone, groups in GPTQ's order."""
    source = open_checkpoint(_saved(tmp_path / "in"))
    made = {}
    specs = {"up_proj": Spec(INT4, (1, 32)), "down_proj": Spec(INT4, (1, 64)), "q_proj": INT8_CHANNEL}
    g = torch.Generator().manual_seed(0)
    order = torch.arange(64)[torch.randperm(64, generator=g)] // 32

    def tensors():
        for name in source.names():
            value, spec = source.get(name), specs.get(name.split(".")[-2])
            if spec is not None:
                n, k = value.shape
                codes = torch.randint(-8, 8, (n, k), generator=g).to(torch.int8)
                scale = torch.rand(n, k // (spec.group or k), generator=g).half().float()
                value = made[name] = QTensor(spec, codes, scale, order=order if spec.group == 32 else None)
            yield name, value

    write_checkpoint(tmp_path / "out", source.config, tensors(), {}, None, source, {}, format="gptq")
    ours = open_checkpoint(tmp_path / "out")
    rules = ours.config["quantization_config"]["dynamic"]
    assert rules[r"+:^model\.layers\.0\.self_attn\.(q_proj|qkv_proj)$"] == {"bits": 8, "group_size": -1}
    assert rules[r"-:^model\.layers\.1\.self_attn\.o_proj$"] == {}
    for name, q in made.items():
        assert torch.equal(values(ours.get(name)), values(q)), name
    with pytest.raises(ValueError, match="GPTQ-ordered groups"):
        convert_checkpoint(tmp_path / "out", tmp_path / "awq", "awq")
    notes = convert_checkpoint(tmp_path / "out", tmp_path / "ct", "compressed-tensors")
    assert any("GPTQ's channel order" in note for note in notes)
    for name, q in made.items():
        assert torch.equal(values(open_checkpoint(tmp_path / "ct").get(name)), values(q)), name


def test_refused_sizes_and_mixtures(tmp_path):
    source = open_checkpoint(_saved(tmp_path / "in"))
    up, down = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight"
    codes = lambda n, k: torch.zeros(n, k, dtype=torch.int8)  # noqa: E731
    channel = lambda n, k: QTensor(Spec(INT4, (1, None)), codes(n, k), torch.ones(n, 1))  # noqa: E731
    zero = QTensor(Spec(UINT4, (1, 32), zero=True), codes(128, 64), torch.ones(128, 2), torch.full((128, 2), 0.5))
    w4a8 = {name.removesuffix(".weight"): Scheme("", Spec(INT4, (1, None)), PER_TOKEN_INT8) for name in (up, down)}
    grouped = QTensor(Spec(INT4, (1, 128), over=INT8_CHANNEL), codes(64, 128), torch.ones(64, 1), over=torch.ones(64, 1))
    for form, tensors, schemes, says in (
        ("qqq", [(up, channel(96, 64))], w4a8, "64 rows"), ("gptq", [(up, channel(12, 64))], {}, "multiple of 8"),
        ("awq", [(up, channel(12, 64))], {}, "eight rows"), ("gptq", [(up, zero)], {}, "not whole numbers"),
        ("awq", [(up, zero)], {}, "not whole numbers"), ("qqq", [(up, channel(128, 64)), (down, grouped)], w4a8, "mixes them"),
        ("qqq", [(up, channel(128, 64)), (down, torch.zeros(64, 128))], w4a8, "has 16 bits"),
        ("gptq", [(up, replace(zero, zero=torch.ones(128, 2))), (down, channel(64, 128))], {}, "mixes them"),
        ("awq", [(up, replace(zero, zero=torch.ones(128, 2))), (down, channel(64, 128))], {}, "one group size"),
        ("awq", [(up, channel(128, 64)), ("model.layers.0.mlp.weight", torch.zeros(2, 2))], {}, "part of a quantized"),
        ("gptq", [(up, QTensor(Spec(INT4), codes(128, 64), torch.full((128, 1), 1 / 3)))], {}, "these need more"),
        ("marlin", [], {}, "is not written"),
    ):
        with pytest.raises(ValueError, match=says):
            write_checkpoint(tmp_path / "out", source.config, tensors, schemes, None, source, {}, format=form)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


# ---- the other side reads it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "w4a16 zero"])  # transformers 5.24 cannot load its zeros
def test_logits_are_those_of_transformers(tmp_path, kind):
    """compressed-tensors loads what we write and computes the same: to rounding where activations are 16-bit or FP8; int8
    activations are divided by 127.5 there and by 127 here, which moves logits by up to half a percent, and as much again where
    the head has them too."""
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "in")
    quantize_model(tmp_path / "in", tmp_path / "out", kind)
    ids = torch.randint(0, 80, (2, 24), generator=torch.Generator().manual_seed(0))
    ours = forward_window(load_model(open_checkpoint(tmp_path / "out"), "cpu"), ids, "fp32")
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(ids).logits
    error = float((ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
    assert error <= (0.012 if "head" in kind else 0.008 if "a8" in kind or kind == "mixed" else 1e-5)


# The linears of vLLM 0.33.0's LlamaForCausalLM by class, and those of a checkpoint that each is made of.
VLLM_LINEARS = {"qkv_proj": ("QKVParallelLinear", ("q_proj", "k_proj", "v_proj")),
                "gate_up_proj": ("MergedColumnParallelLinear", ("gate_proj", "up_proj")),
                "o_proj": ("RowParallelLinear", ("o_proj",)), "down_proj": ("RowParallelLinear", ("down_proj",)),
                "lm_head": ("ParallelLMHead", ("lm_head",))}
I32, I8, F8 = torch.int32, torch.int8, torch.float8_e4m3fn


def vllm_group(block, path: str, cls: str, parts: list[str]):
    """`find_matched_target` and `should_ignore_layer` of its compressed_tensors/utils.py: the path, the paths of the parts
    (of which all must have a target, and the first one's is taken), then any target that the class's name contains."""
    ignored = {part in block["ignore"] for part in parts}
    assert len(ignored) == 1  # "Found different quantization schemes for the shards"
    targets = {target: group for group in block["config_groups"].values() for target in group["targets"]}
    hit = lambda name: next((t for t in targets if (re.match(t[3:], name) if t[:3] == "re:" else t == name)), None)  # noqa: E731
    found = [hit(part) for part in parts]
    assert all(found) or not any(found)
    assert len({id(targets[t]) for t in found if t}) <= 1
    target = hit(path) or found[0] or next((t for t in targets if t.lower() in cls.lower()), None)
    return None if ignored.pop() or target is None else targets[target]


def vllm_tensors(group, n: int, k: int, scales: torch.dtype):
    """{name: (shape, dtype or None for any float)} of create_weights in compressed_tensors/schemes. int8 and FP8 scales are
    float32 there, those of packed weights have the model's dtype and would be rounded to it."""
    weights, act, form = group["weights"], group["input_activations"], group["format"]
    assert weights.get("actorder") not in ("group", "dynamic")  # "no longer supported"
    assert group["output_activations"] is None
    groups = k // (weights.get("group_size") or k)
    if form == "pack-quantized":  # CompressedTensorsWNA16, or CompressedTensorsWNA8Int with int8 activations
        assert weights["type"] == "int"
        assert weights["strategy"] in ("channel", "group")
        assert act is None or (act["type"], act["num_bits"], act["strategy"], act["dynamic"], act["symmetric"]) == \
            ("int", 8, "token", True, True)
        bits = weights["num_bits"]
        zero = {} if weights["symmetric"] else {"weight_zero_point": ((n * bits // 32, groups), I32)}
        return {"weight_packed": ((n, k * bits // 32), I32), "weight_scale": ((n, groups), scales),
                "weight_shape": ((2,), torch.int64)} | zero
    kind = {"int-quantized": "int", "float-quantized": "float"}[form]  # CompressedTensorsW8A8Int8, CompressedTensorsW8A8Fp8
    assert (weights["type"], weights["num_bits"], weights["symmetric"]) == (kind, 8, True)
    assert (act["type"], act["num_bits"]) == (kind, 8)
    scale = {"channel": (n, 1), "tensor": (1,), "block": (-(-n // 32), -(-k // 32))}[weights["strategy"]]
    static = {} if act["dynamic"] else {"input_scale": ((1,), None)}
    return {"weight": ((n, k), I8 if kind == "int" else F8), "weight_scale": (scale, None)} | static


def vllm_packed(block, path: str, n: int, k: int):
    """The same of auto_gptq.py and auto_awq.py, or None for a linear that they leave alone."""
    if path == "lm_head" and not block.get("lm_head"):
        return None
    if block["quant_method"] == "awq":
        bits, size, packed = block["bits"], block["group_size"], (k, n * 4 // 32)
        assert bits == 4
    else:
        rule = next((rule for rule in block.get("dynamic", {}) if re.match(rule[2:], path)), None)  # get_dynamic_override
        says = block | (block["dynamic"][rule] if rule else {})
        bits, size = says["bits"], says["group_size"]
        assert says["sym"] is True
        assert bits in (4, 8)
        assert not says["desc_act"] or size == -1
        if rule and rule[0] == "-":
            return None
        packed = (k * bits // 32, n)
    groups = 1 if size == -1 else k // size
    order = {"g_idx": ((k,), I32)} if block["quant_method"] == "gptq" else {}  # which it skips
    return {"qweight": (packed, I32), "qzeros": ((groups, n * bits // 32), I32), "scales": ((groups, n), torch.float16)} | order


def vllm_accepts(folder: Path) -> None:
    """Every linear finds a scheme in vLLM 0.33.0, and the tensors are just those that it makes parameters for."""
    config, t = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    block, dtype, quantized = config["quantization_config"], getattr(torch, config["torch_dtype"]), 0
    hidden, inner, kv = 64, 128, 32
    sizes = {"k_proj": (kv, hidden), "v_proj": (kv, hidden), "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
             "down_proj": (hidden, inner), "lm_head": (80, hidden)}
    for layer in (*range(2), None):
        for name, (cls, parts) in VLLM_LINEARS.items():
            if (name == "lm_head") != (layer is None):
                continue
            stem = "" if layer is None else f"model.layers.{layer}.{'self_attn' if name in ('qkv_proj', 'o_proj') else 'mlp'}."
            for part in parts:
                n, k = sizes.get(part, (hidden, hidden))
                if block["quant_method"] == "compressed-tensors":
                    group = vllm_group(block, stem + name, cls, [stem + part for part in parts])
                    expected = None if group is None else vllm_tensors(group, n, k, dtype)
                else:
                    expected = vllm_packed(block, stem + name, n, k)
                expected = {"weight": ((n, k), dtype)} if expected is None else expected
                quantized += len(expected) > 1
                found = {key.removeprefix(f"{stem}{part}."): value for key, value in t.items()
                         if key.startswith(f"{stem}{part}.")}
                assert {key: tuple(value.shape) for key, value in found.items()} == {k: s for k, (s, _) in expected.items()}
                assert all(found[key].dtype == kind if kind else found[key].is_floating_point()
                           for key, (_, kind) in expected.items())
    assert quantized == sum(name.endswith(("weight_scale", "scales")) for name in t)


@pytest.mark.parametrize(("kind", "form"), [(kind, "compressed-tensors") for kind in (*KINDS, "sites") if kind != "mixed"] +
                         [("w4a16", "gptq"), ("w8a16", "gptq"), ("w4a16", "awq"), ("w4a16 zero", "awq")])
def test_what_is_written_is_what_vllm_makes_parameters_for(tmp_path, kind, form):
    tiny_llama(torch.float16).save_pretrained(tmp_path / "in")
    quantize_model(tmp_path / "in", tmp_path / "out", kind)
    if form != "compressed-tensors":
        convert_checkpoint(tmp_path / "out", tmp_path / "other", form)
    vllm_accepts(tmp_path / ("out" if form == "compressed-tensors" else "other"))


def test_gptq_rules_and_quantized_heads_reach_vllm(tmp_path):
    """Rules are looked up under the names of fused linears; a quantized head wants its own word in AWQ and GPTQ."""
    source = open_checkpoint(_saved(tmp_path / "in"))
    specs = {"q_proj": INT8_CHANNEL, "k_proj": INT8_CHANNEL, "v_proj": INT8_CHANNEL, "o_proj": None}

    def tensors(specs):
        for name in source.names():
            value, spec = source.get(name), specs.get(name.split(".")[-2], Spec(INT4, (1, 32)))
            if spec is not None and value.dim() == 2 and "embed" not in name:
                n, k = value.shape
                value = QTensor(spec, torch.randint(-8, 8, (n, k)).to(torch.int8), torch.ones(n, k // (spec.group or k)))
            yield name, value

    for form, mixed in (("gptq", specs), ("awq", {})):
        write_checkpoint(tmp_path / form, source.config, tensors(mixed), {}, None, source, {}, format=form)
        vllm_accepts(tmp_path / form)


def test_what_vllm_refuses_is_said(tmp_path):
    tiny_llama(torch.float16).save_pretrained(tmp_path / "in")
    quantize_model(tmp_path / "in", tmp_path / "out", "w4a16 zero")
    assert any("vLLM reads asymmetric" in note for note in convert_checkpoint(tmp_path / "out", tmp_path / "gptq", "gptq"))
    assert not any("vLLM" in note for note in convert_checkpoint(tmp_path / "out", tmp_path / "awq", "awq"))


# ---- KV scales ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True])
def test_kv_scales_alone_and_in_tgis_way(tmp_path, per_head):
    """16-bit weights with an FP8 cache: kv_cache_scheme beside k_scale and v_scale, or kv_scale and kv_cache_torch_dtype."""
    _saved(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    scales = [torch.tensor(0.5), torch.tensor([2.0])]
    if per_head:
        scales = [torch.tensor([0.5, 0.25]).view(2, 1, 1), torch.tensor([2.0, 4.0])]
    for layer in (0, 1):
        for side, scale in zip("kv", scales):
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"] = scale.clone()
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    source = directory(tmp_path / "scaled", tensors, None, **config, kv_cache_dtype="float8_e4m3fn")
    assert convert_checkpoint(source, tmp_path / "ct", "compressed-tensors") == ()
    block = json.loads((tmp_path / "ct" / "config.json").read_text())["quantization_config"]
    assert block["kv_cache_scheme"]["strategy"] == ("attn_head" if per_head else "tensor")
    written = load_file(tmp_path / "ct" / "model.safetensors")
    assert written["model.layers.1.self_attn.k_scale"].shape == ((2, 1, 1) if per_head else (1,))
    ours = open_checkpoint(tmp_path / "ct")
    assert ours.kv == "fp8"
    assert torch.equal(torch.as_tensor(ours.kv_scales(1)[0]), scales[0].flatten() if per_head else torch.tensor(0.5))
    notes = convert_checkpoint(source, tmp_path / "tgi", "tgi")
    assert "the larger is written" in notes[0]
    assert "tokens may change" in notes[0]
    written = load_file(tmp_path / "tgi" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in written.items() if "scale" in name} == {
        f"model.layers.{layer}.self_attn.kv_scale": () for layer in (0, 1)}
    assert written["model.layers.0.self_attn.kv_scale"].dtype == torch.float32
    assert float(written["model.layers.0.self_attn.kv_scale"]) == (4.0 if per_head else 2.0)
    config = json.loads((tmp_path / "tgi" / "config.json").read_text())
    assert config["kv_cache_torch_dtype"] == "float8_e4m3fn"
    assert "quantization_config" not in config


# ---- int8 activations for weight-only checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False), (3, False)])
def test_int8_activations_for_gptq(tmp_path, bits, symmetric):
    tensors, expected = gptq(bits, symmetric, 32, 2)
    path = directory(tmp_path / "g", tensors, gptq_config(bits, symmetric, 32, 2))
    name = "model.layers.0.mlp.down_proj.weight"
    with pytest.warns(UserWarning, match=r"rounded to 127 steps.*nybble eval"):
        checkpoint = open_checkpoint(path, activations="int8")
    assert checkpoint.act(name) == PER_TOKEN_INT8
    weight = checkpoint.get(name)
    assert torch.equal(values(weight), expected)
    kind = ("int8" if bits == 8 else "int4" if symmetric else "uint4") + "[1x32]" + ("" if symmetric else "+zero")
    assert checkpoint.precision == (kind, "int8[1x*]")
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    run = Linear(weight, PER_TOKEN_INT8, None, torch.device("cpu"), torch.float32, ops_for(torch.device("cpu")))
    absmax = x.double().abs().amax(-1, keepdim=True)
    rounded = torch.round(x.double() * 127 / absmax) * absmax / 127
    assert ("zero points" in run.choice.kernel.name) != symmetric
    assert float((run(x) - rounded @ expected.t()).abs().max()) <= 1e-5 * float((rounded @ expected.t()).abs().max())
    with pytest.raises(ValueError, match="wants int8"):
        open_checkpoint(path, activations="int4")


def test_zero_points_in_gptqs_order(tmp_path):
    tensors, expected = gptq(4, False, 32, 2, ordered=True)
    path = directory(tmp_path / "g", tensors, gptq_config(4, False, 32, 2, desc_act=True))
    with pytest.warns(UserWarning, match="activations = int8"):
        weight = open_checkpoint(path, activations="int8").get("model.layers.0.mlp.down_proj.weight")
    run = Linear(weight, PER_TOKEN_INT8, None, torch.device("cpu"), torch.float32, ops_for(torch.device("cpu")))
    x = torch.randint(-127, 128, (3, 128), generator=torch.Generator().manual_seed(1)).float()
    x[:, 0] = 127
    assert float((run(x) - x.double() @ expected.t()).abs().max()) <= 1e-5 * float((x.double() @ expected.t()).abs().max())


@needs_shared
@pytest.mark.parametrize("name", ["awq_llama_gemm_g128", "gptq_llama_v1_sym_g128"])
def test_int8_activations_in_the_engine(name):
    """What runs is what is reported, and rounding inputs moves logits by percents, not by more."""
    from nybble.engine.config import EngineConfig
    from nybble.engine.load import open_engine

    path = real(name)
    with pytest.warns(UserWarning, match="activations = int8"):
        engine = open_engine(path, "cpu", EngineConfig(activations="int8", kv="fp32", max_context=64, kv_memory=1 << 24))
    info = engine.info()
    assert (info.weights, info.activations) == ("uint4[1x128]+zero" if "awq" in name else "int4[1x128]", "int8[1x*]")
    with pytest.warns(UserWarning, match="activations = int8"):
        model = load_model(open_checkpoint(path, "int8"), "cpu")
    reference = load_file(path / "reference.safetensors")
    assert 1e-3 < error_of(model, reference, "logits", "rms") < 0.15  # of logits whose spread is 2


def test_dequantized_values_survive_qqq_saturation(tmp_path):
    """(u - 8) * s_group beyond a byte saturates, as QQQ's own torch path does; written back, it still does."""
    codes = np.full((64, 256), 15)
    tensors = {f"{MODULE}.B": qqq_pack(codes, True), f"{MODULE}.s_channel": torch.ones(1, 64),
               f"{MODULE}.s_group": torch.full((2, 64), 20.0).half()}
    path = directory(tmp_path / "q", tensors, {"quant_method": "qqq", "bits": 4, "group_size": 128}, torch_dtype="float16")
    weight = open_checkpoint(path).get(f"{MODULE}.weight")
    assert dequantize(weight).unique().tolist() == [127.0]


# ---- the command line -----------------------------------------------------------------------------------------------


def test_convert_and_explain_say_what_they_did(tmp_path, capsys):
    from nybble.cli import app

    make_tiny(tmp_path / "in", dtype=torch.float16)
    quantize_model(tmp_path / "in", tmp_path / "ct", "w4a16")
    run = lambda *words: app([str(word) for word in words], result_action="return_value")  # noqa: E731
    run("convert", tmp_path / "ct", "-o", tmp_path / "gptq", "--format", "gptq")
    assert "written as gptq" in capsys.readouterr().out
    assert json.loads((tmp_path / "gptq" / "quantize_config.json").read_text())["bits"] == 4
    assert (tmp_path / "gptq" / "tokenizer.json").exists()
    run("explain", tmp_path / "gptq", "--device", "cpu")
    assert "weights int4[1x32], activations 16bit, KV cache int8" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="activations = int8"):
        run("explain", tmp_path / "gptq", "--device", "cpu", "--activations", "int8", "--kv", "fp8")
    assert "weights int4[1x32], activations int8[1x*], KV cache fp8 (0 of 2 layers" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"int4\[1x32\] do not: quantize the original model with --scheme w4a8"):
        run("convert", tmp_path / "gptq", "-o", tmp_path / "qqq", "--format", "qqq")


def test_w4a8_as_quantize_makes_it_becomes_gptq_and_awq(tmp_path):
    """Groups of 128 whose scales are whole multiples of a row's step: plain fp16 group scales, once activations are left out.
    The values are computed here from the file of the other format."""
    tiny_llama(torch.float16, hidden_size=256, intermediate_size=512).save_pretrained(tmp_path / "in")
    source = open_checkpoint(tmp_path / "in")
    act, spec = PER_TOKEN_INT8, Spec(INT4, (1, 128), over=INT8_CHANNEL)
    linear = [name for name in source.names() if name.endswith("_proj.weight")]
    torch.manual_seed(3)
    weights = {}
    for name in linear:
        n, k = source.shape(name)
        step = torch.randint(64, 128, (n, 1)) / 2.0**16  # 7 bits, times the 4 of a whole number: fp16 holds 11
        weights[name] = QTensor(spec, torch.randint(-8, 8, (n, k), dtype=torch.int8),
                                torch.randint(1, 17, (n, k // 128)).float(), over=step)
    write_checkpoint(tmp_path / "ct", source.config, ((n, weights.get(n, source.get(n))) for n in source.names()),
                     {n.removesuffix(".weight"): Scheme("", spec, act) for n in linear}, None, source, {})
    for form in ("gptq", "awq"):
        with pytest.raises(ValueError, match="activations have 8 bits: --weights-only writes"):
            convert_checkpoint(tmp_path / "ct", tmp_path / form, form)
        notes = convert_checkpoint(tmp_path / "ct", tmp_path / form, form, weights_only=True)
        assert "16-bit activations" in notes[0]
        after, stored = open_checkpoint(tmp_path / form), load_file(tmp_path / form / "model.safetensors")
        for name, q in weights.items():
            exact = q.scale.double() * q.over.double()
            assert torch.equal(stored[f"{name.removesuffix('.weight')}.scales"].double(), exact.t())
            expected = q.codes.double() * exact.repeat_interleave(128, 1)
            assert torch.equal(dequantize(after.get(name), torch.float64), expected)
            assert after.act(name) is None

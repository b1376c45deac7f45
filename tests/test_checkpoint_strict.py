"""What loading refuses, before it reads a weight, and what memory it takes."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import tiny_llama
from test_checkpoint_foreign import SHARED, directory, fp8, gptq, gptq_config, needs_shared
from tiny import make_tiny

from nybble.checkpoint import open_checkpoint
from nybble.checkpoint.store import Store, open_safetensors
from nybble.formats.qtensor import dequantize
from nybble.models import load_model
from nybble.models.config import read_config
from nybble.text import load_tokenizer

M = "model.layers.0.mlp.down_proj"
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def with_header(path, entries: list[tuple[str, dict]], data: bytes) -> None:
    text = "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries) + "}"
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
    (path / "config.json").write_text("{}")


def entry(start: int, stop: int, shape=(2,), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(("entries", "size"), [
    ([("a", entry(0, 8)), ("a", entry(8, 16))], 16), ([("a", entry(0, 8)), ("a", entry(0, 8, dtype="I32"))], 8),  # named twice
    ([("a", entry(0, 8)), ("b", entry(4, 12))], 12), ([("a", entry(0, 8)), ("b", entry(12, 20))], 20),  # overlap, hole
    ([("a", entry(0, 8, (3,)))], 8), ([("a", entry(0, 8, (-2,)))], 8), ([("a", entry(8, 0))], 8),
    ([("a", entry(0, 8))], 9), ([("a", entry(0, 8))], 7), ([("a", {"dtype": "F32", "shape": [2]})], 8), ([("a", [])], 0),
])
def test_headers_that_do_not_describe_the_file(tmp_path, entries, size):
    with_header(tmp_path / "x", entries, bytes(size))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: .*header"):
        open_checkpoint(tmp_path / "x")


def test_every_flipped_bit_of_a_header_is_noticed(tmp_path):
    """It is an error at once, or the tensors have other names than the model asks for: never other values, dtypes or shapes."""
    tensors = {"model.norm.weight": torch.arange(6).view(2, 3).half(), "codes": torch.arange(5, dtype=torch.int8)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    whole = (tmp_path / "model.safetensors").read_bytes()
    refused = renamed = same = 0
    for bit in range(8 * (8 + struct.unpack("<Q", whole[:8])[0])):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            opened = open_checkpoint(tmp_path)
            found = {name: opened.get(name) for name in opened.names()}
        except ValueError:
            refused += 1
            continue
        kept = found.keys() & tensors.keys()
        renamed, same = renamed + (len(kept) < 2), same + (len(kept) == 2)
        assert all(torch.equal(found[n], tensors[n]) and found[n].dtype == tensors[n].dtype for n in kept)
    assert refused > renamed > 0
    assert same < 8 * 40  # flips in whitespace and metadata


def test_a_file_cut_after_it_was_opened_is_noticed(tmp_path):
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    store = open_safetensors(tmp_path)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match="has changed while it was being read"):
        store.tensor("a")


def test_wrong_shapes_missing_and_extra_tensors(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    up = "model.layers.1.mlp.up_proj.weight"
    for change, says in (({up: torch.zeros(64, 128)}, r"up_proj.weight has shape \[64, 128\]"), ({up: None}, "has no tensor"),
                         ({"model.layers.2.mlp.up_proj.weight": torch.zeros(2, 2)}, "no place for tensors"),
                         ({"model.layers.0.self_attn.rotary.scale": torch.ones(1)}, "no place for tensors")):
        save_file({n: t for n, t in (tensors | change).items() if t is not None}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=says):
            load_model(open_checkpoint(tmp_path), "cpu")


@pytest.mark.parametrize(("quantization", "says"), [
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}},
     "nvfp4"),
    ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}}}}, "mxfp4"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"g": {
        "targets": ["Linear"], "weights": W4}}}, "marlin-24"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {
        "a": {"targets": ["Linear"], "weights": W4, "format": "pack-quantized"},
        "b": {"targets": ["re:.*up"], "weights": W4, "format": "mxfp8-quantized"}}}, "mxfp8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, "MXFP8"),
    ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "W4A16_AWQ"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION"),
    ({"quant_method": "mxfp4"}, "mxfp4"), ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}, "auto-round"), ({"quant_method": "hqq"}, "hqq"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}}, "Quark"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
      "layer_quant_config": {"*down_proj": {"weight": {"dtype": "int4"}}}}, "differs from the rest"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                                                       "output_tensors": {"dtype": "fp8_e4m3"}}}, "quantized outputs"),
    ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "ue8m0"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, "bitblas"),
    ({"quant_method": "awq", "bits": 3}, "3 bits"), ({"quant_method": "qoq", "wbits": 4}, "qoq"),
])
def test_what_cannot_be_served_is_refused_before_weights_are_read(tmp_path, monkeypatch, quantization, says):
    monkeypatch.setattr(Store, "tensor", lambda self, name: pytest.fail(f"{name} was read"))
    with_header(tmp_path / "x", [(f"{M}.weight_packed", entry(0, 8, (8,), "U8")), (f"{M}.weight", entry(8, 16)),
                                 (f"{M}.weight_scale", entry(16, 24, (8,), "F8_E8M0"))], bytes(24))
    (tmp_path / "x" / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(ValueError, match=says):
        open_checkpoint(tmp_path / "x")


CT = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


@pytest.mark.parametrize(("config", "says"), [
    ({"nybble": "x"}, "nybble = 'x'; wants an object"),
    ({"nybble": {"kv_cache": ["a"]}}, r"kv_cache = \['a'\]; wants a string"),
    ({"quantization_config": "x"}, "quantization_config = 'x'; wants an object"),
    *(({"quantization_config": CT | changes}, says) for changes, says in (
        ({"config_groups": "x"}, "config_groups = 'x'; wants an object"),
        ({"config_groups": {"group_0": 3}}, "group_0 = 3; wants an object"),
        ({"config_groups": {"group_0": {"targets": ["re:("], "weights": W4}}}, r"group_0: targets holds '\('.*regular exp"),
        ({"config_groups": {"group_0": {"targets": [3], "weights": W4}}}, r"targets = \[3\]; wants a list of strings"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": 4}}}, "group_0: weights = 4; wants an object"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": W4 | {"group_size": "x"}}}}, "size = 'x'; wants"),
        ({"ignore": 5}, "ignore = 5; wants a list of strings"),
        ({"config_groups": {"g": {"targets": ["Linear"], "weights": W4 | {"block_structure": "x"}}}}, "wants rows and columns"),
        ({"kv_cache_scheme": "x"}, "kv_cache_scheme = 'x'; wants an object"))),
    *(({"quantization_config": block}, says) for block, says in (
        ({"quant_method": "awq", "modules_to_not_convert": 5}, "modules_to_not_convert = 5; wants a list"),
        ({"quant_method": "gptq", "dynamic": {"+:(": {}}}, r"dynamic holds '\('.*regular expression"),
        ({"quant_method": "gptq", "group_size": 32, "meta": "x"}, "meta = 'x'; wants an object"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size = 128; wants a list of whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "wants two numbers"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": "lm_head"}, "ignore = 'lm_head'; wants a list"),
        ({"quant_method": "quark", "global_quant_config": "x"}, "global_quant_config = 'x'; wants an object"))),
])
def test_config_values_of_the_wrong_type_are_named(tmp_path, config, says):
    tensors = {f"{M}.qweight": torch.zeros(8, 32, dtype=torch.int32), f"{M}.scales": torch.ones(2, 32).half()}
    path = directory(tmp_path / "x", tensors, None, **config)
    with pytest.raises(ValueError, match=says) as raised:
        _ = open_checkpoint(path).kv
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("key", "value", "says"), [
    ("rope_parameters", "x", "rope_parameters = 'x'; wants an object"),
    ("rope_scaling", "x", "rope_scaling = 'x'; wants an object"),
    ("rope_scaling", {"rope_type": ["x"]}, r"rope_type = \['x'\]; wants a string"),
    ("rope_scaling", {"type": "linear", "factor": [2]}, r"factor = \[2\]; wants a number"),
    ("architectures", "LlamaForCausalLM", "architectures = 'LlamaForCausalLM'; wants a list of strings"),
    ("layer_types", 5, "layer_types = 5; wants a list of strings"),
])
def test_model_settings_of_the_wrong_type_are_named(key, value, says):
    config = tiny_llama().config.to_dict()
    del config["rope_parameters"]
    family = {"architectures": ["Qwen2ForCausalLM"]} if key == "layer_types" else {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(ValueError, match=says):
        read_config(config | family | {key: value})


@pytest.mark.parametrize(("key", "value", "says"), [
    ("chat_template", 5, "chat_template = 5; wants a string or a list of objects"),
    ("chat_template", [{"name": "default"}], "wants a name and a template"),
    ("eos_token", 5, "eos_token = 5; wants a string or an object")])
def test_tokenizer_settings_of_the_wrong_type_are_named(tmp_path, key, value, says):
    make_tiny(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=says):
        load_tokenizer(tmp_path)


def test_mla_is_refused_by_its_config():
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM is not supported"):
        read_config({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512})


def test_unsupported_dtypes_are_named_when_asked_for(tmp_path):
    with_header(tmp_path / "x", [("a.weight", entry(0, 2, (2,), "F8_E8M0"))], bytes(2))
    checkpoint = open_checkpoint(tmp_path / "x")
    with pytest.raises(ValueError, match="dtype F8_E8M0"):
        checkpoint.get("a.weight")


def test_16_bit_linears_that_nothing_excludes_are_said(tmp_path):
    other = "model.layers.1.mlp.down_proj"
    tensors = {f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(1), f"{other}.weight": torch.ones(4, 4)}
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.warns(UserWarning, match=r"1 linears have 16 bits .*layers\.1"):
        open_checkpoint(directory(tmp_path / "a", tensors, config))
    for skip in ({"ignored_layers": [other]}, {"modules_to_not_convert": ["layers.1"]}):
        open_checkpoint(directory(tmp_path / "b", tensors, config | skip)).names()


@needs_shared
@pytest.mark.parametrize(("name", "scheme", "kv"), [
    ("Qwen--Qwen3-32B-AWQ", "w4a16_zero_g128", None),
    ("Qwen--Qwen3-32B-FP8", "fp8_e4m3[128x128]/fp8_e4m3[1x128]", None),
    ("Qwen--Qwen3-32B-FP8-Static-PerTensor", "fp8_e4m3[*x*]/fp8_e4m3[*x*]", "fp8"),
    ("nvidia--Llama-3.1-70B-Instruct-FP8", "fp8_e4m3[*x*]/fp8_e4m3[*x*]", "fp8"),
    ("TheBloke--Genz-70b-GPTQ-3bit", "w4a16", None),
    ("meta-llama--Meta-Llama-3.1-8B", "16bit", None),
])
def test_published_configs_with_tensors(tmp_path, name, scheme, kv):
    """A real config.json beside one linear in the layout that its tool writes."""
    source = SHARED / "data" / "quant_configs" / name
    if not source.is_dir():
        pytest.skip(f"{name} is not here")
    config = json.loads((source / "config.json").read_text())
    per_tensor = {f"{M}.weight": fp8(), f"{M}.weight_scale": torch.tensor(0.5), f"{M}.input_scale": torch.tensor(0.5)}
    tensors = {
        "awq": {f"{M}.qweight": torch.zeros(256, 4, dtype=torch.int32), f"{M}.qzeros": torch.zeros(2, 4, dtype=torch.int32),
                f"{M}.scales": torch.ones(2, 32).half()},
        "gptq": gptq(3, True, -1, 1)[0], "modelopt": per_tensor,
        "fp8": {f"{M}.weight": fp8(), f"{M}.weight_scale_inv": torch.ones(2, 2)},
        "16bit": {f"{M}.weight": torch.zeros(4, 4)},
    }[{"w4a16": "gptq", "w4a16_zero_g128": "awq", "16bit": "16bit"}.get(scheme, "fp8" if "128" in scheme else "modelopt")]
    path = directory(tmp_path / "x", tensors, None)
    for file in source.glob("*quant*_config.json"):
        (path / file.name).write_bytes(file.read_bytes())
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(path)
    assert (checkpoint.scheme_name, checkpoint.kv) == (scheme, kv)
    assert checkpoint.get(f"{M}.weight") is not None
    assert checkpoint.unread() == []


def test_exclusions_are_of_whole_names(tmp_path):
    """Layer 1's exclusion is not layer 11's; path* is path and what is below it."""
    for pattern, hit in (("model.layers.1", False), ("model.layers.1*", False), ("model.layers.11*", True),
                         ("*down_proj", True), ("model.layers.11", True), ("down_proj", True), ("re:.*11.*", True),
                         ("layers.11.mlp", True)):
        module = "model.layers.11.mlp.down_proj"
        tensors = {f"{module}.weight": fp8(), f"{module}.weight_scale": torch.ones(1), f"{module}.input_scale": torch.ones(1)}
        config = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": [pattern]}
        path = directory(tmp_path / "m", tensors, config)
        if hit:
            with pytest.raises(ValueError, match="excludes it"):
                open_checkpoint(path)
        else:
            assert open_checkpoint(path).scheme_name.startswith("fp8")


def test_gptqmodels_fp8_is_weights_only(tmp_path):
    tensors = {f"{M}.weight": fp8(), f"{M}.weight_scale_inv": torch.full((192,), 4.0)}
    config = {"quant_method": "fp8", "method": "fp8", "format": "float8_e4m3fn", "checkpoint_format": "float8_e4m3fn",
              "bits": 8, "weight_scale_method": "row", "weight_block_size": None, "weight_scale_semantics": "inverse"}
    checkpoint = open_checkpoint(directory(tmp_path / "d", tensors, config))
    assert checkpoint.act(f"{M}.weight") is None
    assert torch.equal(dequantize(checkpoint.get(f"{M}.weight")), fp8().float() / 4)


@pytest.mark.parametrize("config", [
    {"quant_method": "qqq", "wbits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}},
    {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "dynamic": {".*down": {"group_size": 64}}},
])
def test_rules_for_single_modules_are_not_skipped(tmp_path, config):
    tensors = {f"{M}.B": torch.zeros(1, 128, dtype=torch.int32), f"{M}.qweight": torch.zeros(64, 2, dtype=torch.int32)}
    with pytest.raises(ValueError, match="for GPTQ only"):
        open_checkpoint(directory(tmp_path / "d", tensors, config))


A = "model.layers.0.self_attn"
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize(("group", "names"), [
    ({"targets": ["re:.*k_proj", "re:.*v_proj"], "output_activations": FLOAT8}, ("k_proj.output_scale", "v_proj.output_scale")),
    ({"targets": ["re:.*k_proj$", "re:.*v_proj$"], "output_activations": FLOAT8, "weights": W4},
     ("k_proj.output_scale", "v_proj.output_scale")),
    ({"targets": ["LlamaAttention"], "input_activations": FLOAT8}, ("k_scale", "v_scale")),
])
@pytest.mark.filterwarnings("ignore:config group 'kv' quantizes attention")
def test_older_and_newer_ways_to_ask_for_an_fp8_cache(tmp_path, group, names):
    """Outputs of k_proj and v_proj (compressed-tensors until August 2024), the attention module (since 2025)."""
    codes = torch.zeros(8, 8, dtype=torch.int32)
    tensors = {f"{M}.weight_packed": codes, f"{M}.weight_scale": torch.ones(8, 2), f"{M}.weight_shape": torch.tensor([8, 64]),
               f"{A}.{names[0]}": torch.tensor([0.5]), f"{A}.{names[1]}": torch.tensor([0.25])}
    block = {"quant_method": "sparseml", "format": "pack-quantized", "config_groups": {
        "kv": group, "g": {"targets": ["Linear"], "weights": W4}}}
    checkpoint = open_checkpoint(directory(tmp_path / "d", tensors, block, num_hidden_layers=1))
    assert (checkpoint.kv, checkpoint.scales_for("fp8")) == ("fp8", [(0.5, 0.25)])
    assert checkpoint.scheme_name == "w4a16_g32"


def test_symmetric_weights_with_zero_points_are_a_contradiction(tmp_path):
    tensors = {f"{M}.weight": torch.zeros(8, 64, dtype=torch.int8), f"{M}.weight_scale": torch.ones(8, 1),
               f"{M}.weight_zero_point": torch.zeros(8, 1, dtype=torch.int8)}
    block = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}}
    open_checkpoint(directory(tmp_path / "d", tensors, block)).get(f"{M}.weight")
    tensors[f"{M}.weight_zero_point"][3] = 1
    with pytest.raises(ValueError, match="says symmetric"):
        open_checkpoint(directory(tmp_path / "d", tensors, block)).get(f"{M}.weight")


@needs_shared
def test_config_fragments_of_public_checkpoints(tmp_path):
    file = SHARED / "data" / "quant_configs" / "fragments.json"
    if not file.is_file():
        pytest.skip("the fragments are not here")
    tencent, amd, _, _ = json.loads(file.read_text())
    tensors = {f"{M}.weight": fp8(), f"{M}.weight_scale": torch.tensor(0.5), f"{M}.input_scale": torch.tensor(0.5),
               "model.layers.0.self_attn.k_cache.scale": torch.tensor(0.5), "lm_head.weight": torch.zeros(4, 4)}
    for block in (tencent["quantization_config"], {"quant_method": "fp8"} | amd["quantization_config"]):
        checkpoint = open_checkpoint(directory(tmp_path / "x", tensors, block))
        assert (checkpoint.kv, checkpoint.kv_scales(0)) == ("fp8", (0.5, 0.5))
    config = {"kv_cache_torch_dtype": "float8_e4m3fn", "num_hidden_layers": 1}
    scale = {"model.layers.0.self_attn.kv_scale": torch.tensor(0.25)}
    assert open_checkpoint(directory(tmp_path / "tgi", scale, None, **config)).scales_for("fp8") == [(0.25, 0.25)]


MEASURE = """
import resource, sys, torch
from pathlib import Path
from nybble.checkpoint import open_checkpoint
from nybble.models import load_model
def now(): return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
load_model(open_checkpoint(sys.argv[1]), "cpu")  # what is loaded once and stays: kernels, their tables
Path("/proc/self/clear_refs").write_text("5")    # the peak starts again from here
before = now()
model = load_model(open_checkpoint(sys.argv[2]), "cpu")
peak = next(int(l.split()[1]) * 1024 for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
print(before, now(), peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["16bit", "gptq"])
def test_loading_takes_what_stays_and_little_more(tmp_path, kind):
    """Peak memory of the process while it loads several shards, beyond what is resident afterwards: at most 1.15 of a shard."""
    torch.manual_seed(0)
    tiny_llama(torch.bfloat16).save_pretrained(tmp_path / "small")
    big = tiny_llama(torch.bfloat16, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, vocab_size=4096)
    big.save_pretrained(tmp_path / "big", max_shard_size="20MB")
    if kind == "gptq":
        tensors = big.state_dict()
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            n, k = tensors.pop(name).shape
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.qweight": torch.zeros(k // 8, n, dtype=torch.int32),
                        f"{stem}.scales": torch.ones(k // 32, n).half(),
                        f"{stem}.qzeros": torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32)}
        for file in (tmp_path / "big").glob("*.safetensors*"):
            file.unlink()
        names = sorted(tensors)
        shards = [names[i::4] for i in range(4)]
        for i, part in enumerate(shards):
            save_file({n: tensors[n].contiguous() for n in part}, tmp_path / "big" / f"model-{i + 1:05}-of-00004.safetensors")
        config = json.loads((tmp_path / "big" / "config.json").read_text())
        config["quantization_config"] = gptq_config(4, True, 32)
        (tmp_path / "big" / "config.json").write_text(json.dumps(config))
    largest = max(file.stat().st_size for file in (tmp_path / "big").glob("*.safetensors"))
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "big"], capture_output=True, text=True)
    if "clear_refs" in done.stderr:
        pytest.skip("the peak cannot be reset here")
    before, after, peak = map(int, done.stdout.split())
    print(f"{kind}: resident {(after - before) / 1e6:.1f} MB, peak {(peak - before) / 1e6:.1f}, shard {largest / 1e6:.1f}")
    assert after - before > 50e6
    assert peak - after <= 1.15 * largest


@pytest.mark.parametrize(("change", "says"), [
    ({"weight_shape": torch.tensor([], dtype=torch.int64)}, "are not what compressed-tensors writes"),
    ({"weight_shape": torch.tensor(8)}, "are not what compressed-tensors writes"),
    ({"weight_zero_point": torch.zeros(1, 1, dtype=torch.int32)}, r"cannot be made of .*weight_zero_point \[1, 1\]"),
    ({"weight_zero_point": torch.zeros(0, dtype=torch.int32)}, "cannot be made of"),
    ({"weight_zero_point": None}, "no tensor .*weight_zero_point"),
    ({"weight_packed": torch.zeros(8, 8, dtype=torch.int64)}, "int64 .* is no matrix of int32 words"),
    ({"weight_packed": torch.zeros(64, dtype=torch.int32)}, r"weight_packed \[64\] is no matrix"),
    ({"weight_g_idx": torch.full((64,), 2, dtype=torch.int32)}, "does not name one of 2 groups for each of 64"),
    ({"weight_g_idx": torch.zeros(63, dtype=torch.int32)}, "cannot be made of"),
])
def test_tensors_that_do_not_fit_together_are_named(tmp_path, change, says):
    parts = {"weight_packed": torch.zeros(8, 8, dtype=torch.int32), "weight_scale": torch.ones(8, 2),
             "weight_shape": torch.tensor([8, 64]), "weight_zero_point": torch.zeros(1, 2, dtype=torch.int32)} | change
    directory(tmp_path / "x", {f"{M}.{last}": tensor for last, tensor in parts.items() if tensor is not None}, {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4 | {"symmetric": False}}}})
    with pytest.raises(ValueError, match=says):
        open_checkpoint(tmp_path / "x").get(f"{M}.weight")


@pytest.mark.parametrize("scale", [[], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_static_activation_scales_are_scales(tmp_path, scale):
    tensors = {f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(192), f"{M}.input_scale": torch.tensor(scale)}
    directory(tmp_path / "x", tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    with pytest.raises(ValueError, match="input_scale is .*no scale of activations"):
        open_checkpoint(tmp_path / "x").act_scale(f"{M}.weight")
    directory(tmp_path / "y", tensors, {"quant_method": "fbgemm_fp8"})
    assert open_checkpoint(tmp_path / "y").unread() == [f"{M}.weight", f"{M}.input_scale"]  # fbgemm has none: not passed over

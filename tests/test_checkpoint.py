"""Reading and writing checkpoints, against transformers, the gguf package and the compressed-tensors package."""

import fcntl
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nybble.checkpoint import open_checkpoint, write_checkpoint
from nybble.checkpoint.compressed import activation_spec, best_match, read_compressed
from nybble.checkpoint.gguf import ROPE_FACTORS, decode
from nybble.checkpoint.pack import pack_rows
from nybble.checkpoint.store import open_safetensors
from nybble.checkpoint.write import staged
from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import FP8, INT4, INT8, PER_TOKEN_FP8, PER_TOKEN_INT8, UINT4, Scheme, Spec
from nybble.text.gguf import TensorInfo

transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
ct = pytest.importorskip("compressed_tensors")
PackedQuantizationCompressor = ct.compressors.PackedQuantizationCompressor

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64}


def tiny_llama(dtype=torch.float32, tie=False, seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**SHAPE | changes, tie_word_embeddings=tie, dtype=dtype)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    return model


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    tiny_llama().save_pretrained(path)
    return path


# ---- 16- and 32-bit safetensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_plain_directory(tmp_path, dtype, shards):
    model = tiny_llama(dtype)
    model.save_pretrained(tmp_path, max_shard_size=shards)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards == "40KB")
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert sorted(checkpoint.names()) == sorted(expected)
    assert (checkpoint.scheme_name, checkpoint.kv, checkpoint.dtype) == ("16bit", None, dtype)
    assert sorted(checkpoint.unread()) == sorted(expected)
    for name, tensor in expected.items():
        assert checkpoint.has(name)
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.get(name), tensor)
        assert checkpoint.get(name).dtype == dtype
        assert checkpoint.act(name) is None
    assert checkpoint.unread() == []
    assert checkpoint.kv_scales(0) is None
    with pytest.raises(KeyError, match=r"self_attn\.z_proj"):
        checkpoint.get("model.layers.0.self_attn.z_proj.weight")


def damage(path: Path, what: str) -> None:
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes()) if file.exists() else bytearray()
    shard = next(iter(sorted(path.glob("model-*.safetensors"))), None)
    match what:
        case "cut":
            file.write_bytes(data[:-100])
        case "cut in the header":
            file.write_bytes(data[:50])
        case "empty":
            file.write_bytes(b"")
        case "header bit":
            data[3] ^= 0x40
            file.write_bytes(data)
        case "header text":
            data[9] ^= 0x7F
            file.write_bytes(data)
        case "no weights":
            file.unlink()
        case "pickle":
            file.unlink()
            torch.save({"x": torch.zeros(1)}, path / "pytorch_model.bin")
        case "no config":
            (path / "config.json").unlink()
        case "config":
            (path / "config.json").write_text("{'x': 1")
        case "two candidates":
            file.rename(path / "a.safetensors")
            shutil.copy(path / "a.safetensors", path / "b.safetensors")
        case "missing shard":
            shard.unlink()
        case "missing shard without index":
            (path / "model.safetensors.index.json").unlink()
            shard.unlink()
        case "index":
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"ghost": shard.name}}))
        case "index escapes":
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
        case "duplicate":
            tensors = load_file(shard)
            other = sorted(path.glob("model-*.safetensors"))[1]
            save_file(load_file(other) | {next(iter(tensors)): torch.zeros(1)}, other)
        case "unknown method":
            config = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "marlin"}}))


@pytest.mark.parametrize(("what", "error", "says"), [
    ("cut", ValueError, "model.safetensors is damaged"), ("cut in the header", ValueError, "damaged"),
    ("empty", ValueError, "damaged"), ("header bit", ValueError, "damaged"), ("header text", ValueError, "damaged"),
    ("no weights", FileNotFoundError, "no safetensors"), ("pickle", FileNotFoundError, "never loaded"),
    ("no config", FileNotFoundError, "config.json"), ("config", ValueError, "config.json is damaged"),
    ("two candidates", ValueError, "cannot be told"), ("unknown method", ValueError, "'marlin' is not supported"),
])
def test_damaged_directories(plain, tmp_path, what, error, says):
    path = tmp_path / "c"
    shutil.copytree(plain, path)
    damage(path, what)
    with pytest.raises(error, match=says):
        open_checkpoint(path)


@pytest.mark.parametrize(("what", "error", "says"), [
    ("missing shard", FileNotFoundError, "shard model-00001"),
    ("missing shard without index", FileNotFoundError, "model-00001"),
    ("index", ValueError, "ghost"), ("index escapes", ValueError, "beside it"), ("duplicate", ValueError, "another shard"),
])
def test_damaged_shards(tmp_path, what, error, says):
    tiny_llama().save_pretrained(tmp_path, max_shard_size="40KB")
    damage(tmp_path, what)
    with pytest.raises(error, match=says):
        open_checkpoint(tmp_path)


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_noticed(tmp_path, monkeypatch):
    """The old config.json says nothing about the new tensors."""
    for name, value in (("out", 1.0), ("new", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"made_with": value}))
        save_file({"a": torch.full((4,), value)}, tmp_path / name / "model.safetensors")

    def between(path):
        os.replace(tmp_path / "out", tmp_path / "old")
        if (tmp_path / "new").exists():
            os.replace(tmp_path / "new", tmp_path / "out")
        return open_safetensors(path)

    monkeypatch.setattr("nybble.checkpoint.checkpoint.open_safetensors", between)
    for _ in ("replaced", "half way there: nothing under the name"):
        with pytest.raises(ValueError, match="has changed while it was being read: start again"):
            open_checkpoint(tmp_path / "out")
        shutil.rmtree(tmp_path / "old")


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path):
    """Its tensors lie elsewhere: what is read at the old places would be anything."""
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(4), "b": torch.ones(400)}, tmp_path / "model.safetensors")
    opened = open_checkpoint(tmp_path)
    assert torch.equal(opened.get("a"), torch.ones(4))
    save_file({"a": torch.zeros(4), "c": torch.zeros(500)}, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has changed while it was being read: start again"):
        opened.get("b")


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither a \.gguf"):
        open_checkpoint(tmp_path)


def test_tied_head_in_the_file(tmp_path):
    model = tiny_llama(tie=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight" not in checkpoint.unread()
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, tmp_path / "model.safetensors")
    assert "lm_head.weight" in open_checkpoint(tmp_path).unread()
    quantize_model(tmp_path, tmp_path / "out", "w4a16")  # a head in int32 words beside the embedding that it is tied to
    head = {name.replace("model.layers.0.mlp.up_proj", "lm_head"): tensor
            for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items() if name != "lm_head.weight"}
    save_file(head, tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert "lm_head.weight" in open_checkpoint(tmp_path / "out").unread()


# ---- GGUF -----------------------------------------------------------------------------------------------------------

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K: row i of a head's first half goes to 2 i, of its second to 2 i + 1."""
    out, dim = np.empty_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(dim):
            out[head * dim + 2 * (i % (dim // 2)) + i // (dim // 2)] = rows[head * dim + i]
    return out


def write_gguf(path: Path, model, arch: str = "llama", kind: str = "F32", extra=None, **metadata) -> Path:
    """A model as llama.cpp's converter would write it, with the gguf package."""
    c = model.config
    w = gguf.GGUFWriter(str(path), arch)
    w.add_vocab_size(c.vocab_size)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    w.add_block_count(c.num_hidden_layers)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    if c.head_dim * c.num_attention_heads != c.hidden_size:
        w.add_key_length(c.head_dim)
        w.add_value_length(c.head_dim)
    for key, value in metadata.items():
        getattr(w, key)(*value)
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    quantized = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if stem == "lm_head" and c.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if stem not in top:
            _, _, layer, module = stem.split(".", 3)
            if arch == "llama" and module.endswith(("q_proj", "k_proj")):
                values = interleave(values, c.num_attention_heads if "q_proj" in module else c.num_key_value_heads)
            ggml = f"blk.{layer}.{NAMES[module]}.{last}"
        else:
            ggml = f"{top[stem]}.{last}"
        if values.ndim == 2:
            w.add_tensor(ggml, gguf.quants.quantize(values, quantized), raw_dtype=quantized)
        else:
            w.add_tensor(ggml, values)
    for name, values in (extra or {}).items():
        w.add_tensor(name, values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_gguf_weights_are_transformers(tmp_path, kind):
    model = tiny_llama()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, kind=kind))
    assert checkpoint.config["torch_dtype"] == {"F32": "float32", "BF16": "bfloat16"}.get(kind, "float16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).state_dict()
    assert sorted(checkpoint.names()) == sorted(theirs)
    for name, expected in theirs.items():
        value = checkpoint.get(name)
        if expected.dim() == 1 or kind.startswith("Q"):
            assert value.dtype == torch.float32
        assert torch.equal(value.float(), expected.float()), name
    assert checkpoint.unread() == []


@pytest.mark.parametrize(("arch", "config_class", "model_class"), [
    ("qwen2", "Qwen2Config", "Qwen2ForCausalLM"), ("qwen3", "Qwen3Config", "Qwen3ForCausalLM"),
])
@pytest.mark.parametrize("tie", [True, False])
def test_gguf_families(tmp_path, arch, config_class, model_class, tie):
    changes = {"head_dim": 32} if arch == "qwen3" else {}
    config = getattr(transformers, config_class)(**SHAPE | changes, tie_word_embeddings=tie)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    if not hasattr(config, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, arch))
    expected = {n: t for n, t in model.state_dict().items() if not (tie and n == "lm_head.weight")}
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.get(name), tensor), name
    assert checkpoint.config["architectures"] == [model_class]
    assert checkpoint.config["tie_word_embeddings"] == tie
    same = getattr(transformers, config_class)(**checkpoint.config)
    for key in ("hidden_size", "intermediate_size", "num_key_value_heads", "rms_norm_eps", "vocab_size", "rope_parameters"):
        assert getattr(same, key) == getattr(config, key), key


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_K", "Q3_K", "Q2_K"])
def test_gguf_k_quants_are_the_packages(kind):
    quantized = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[quantized]
    rows = np.random.default_rng(0).integers(0, 255, (8, 256 // values * size), dtype=np.uint8)
    data = gguf.quants.dequantize(rows, quantized)
    blob = np.concatenate([np.zeros(64, np.uint8), rows.reshape(-1)])
    value = decode(blob, TensorInfo("x", (8, 256), int(quantized), 64))
    assert value.dtype == torch.float32
    assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(torch.from_numpy(data)))


def test_gguf_rope_scalings(tmp_path):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    config = transformers.LlamaConfig(**SHAPE, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    base = 500000.0 ** (-torch.arange(0, 16, 2) / 16)
    model = transformers.LlamaForCausalLM(config)
    path = write_gguf(tmp_path / "m.gguf", model, extra={ROPE_FACTORS: (base / scaled).numpy().astype(np.float32)})
    assert open_checkpoint(path).config["rope_scaling"] == {k: v for k, v in scaling.items() if k != "rope_theta"}
    bad = write_gguf(tmp_path / "b.gguf", model, extra={ROPE_FACTORS: np.linspace(1, 8, 8, dtype=np.float32)})
    with pytest.raises(ValueError, match="not Llama 3's"):
        open_checkpoint(bad)
    kind = gguf.RopeScalingType
    path = write_gguf(tmp_path / "l.gguf", model, add_rope_scaling_type=[kind.LINEAR], add_rope_scaling_factor=[2.0])
    assert open_checkpoint(path).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    path = write_gguf(tmp_path / "y.gguf", model, add_rope_scaling_type=[kind.YARN], add_rope_scaling_factor=[4.0],
                      add_rope_scaling_orig_ctx_len=[16], add_rope_scaling_yarn_beta_fast=[24.0])
    assert open_checkpoint(path).config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "beta_fast": 24.0,
                                                            "original_max_position_embeddings": 16}
    for kind_without_factor in (kind.LINEAR, kind.YARN):
        path = write_gguf(tmp_path / "n.gguf", model, add_rope_scaling_type=[kind_without_factor])
        with pytest.raises(ValueError, match=r"lacks rope\.scaling\.factor"):
            open_checkpoint(path)
    path = write_gguf(tmp_path / "r.gguf", model, add_rope_scaling_type=[kind.LONGROPE])
    with pytest.raises(ValueError, match="longrope"):
        open_checkpoint(path)


def test_gguf_refusals(tmp_path):
    model = tiny_llama()
    path = write_gguf(tmp_path / "m.gguf", model)
    data = path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-500])
    with pytest.raises(ValueError, match="ends before tensor"):
        open_checkpoint(tmp_path / "cut.gguf")
    with pytest.raises(ValueError, match="architecture 'gptneox'"):
        open_checkpoint(write_gguf(tmp_path / "n.gguf", model, "gptneox"))
    with pytest.raises(ValueError, match="mixture of experts"):
        open_checkpoint(write_gguf(tmp_path / "e.gguf", model, add_expert_count=[8]))
    with pytest.raises(ValueError, match="blk.0.ssm"):
        open_checkpoint(write_gguf(tmp_path / "s.gguf", model, extra={"blk.0.ssm.weight": np.zeros(4, np.float32)}))
    with pytest.raises(ValueError, match=r"llama.attn_logit_softcapping = 50.0 may change the numbers"):
        open_checkpoint(write_gguf(tmp_path / "c.gguf", model, add_attn_logit_softcapping=[50.0]))
    with pytest.raises(ValueError, match=r"is not what llama\.cpp writes"):
        open_checkpoint(write_gguf(tmp_path / "h.gguf", model, add_head_count=[[4, 4]]))
    with pytest.raises(ValueError, match="RoPE narrower"):
        open_checkpoint(write_gguf(tmp_path / "p.gguf", model, add_rope_dimension_count=[8]))
    with pytest.raises(FileNotFoundError):
        open_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match=r"holds \d+ \.gguf files"):
        open_checkpoint(tmp_path)


# ---- compressed-tensors ---------------------------------------------------------------------------------------------


def quantized(weight: torch.Tensor, spec: Spec, dtype: torch.dtype) -> QTensor:
    """Round to nearest with scales that `dtype` holds, zeros where the spec has them."""
    n, k = weight.shape
    rows, width = spec.tile[0] or n, spec.tile[1] or k
    blocks = weight.reshape(n // rows, rows, k // width, width).transpose(1, 2).flatten(2)
    if spec.zero:
        low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).to(dtype).float()
        return quantize_weight(weight, spec, scale, torch.round(-low / scale).clamp(0, 15))
    return quantize_weight(weight, spec, (blocks.abs().amax(-1) / spec.num.qmax).to(dtype).float())


def schemes_for(kind: str) -> dict[str, Scheme]:
    """Last name of a module -> its scheme."""
    tail = {"default": Scheme("", Spec(INT4, (1, 32)), PER_TOKEN_INT8)}
    match kind:
        case "w4a8 groups":
            tail |= {"down_proj": Scheme("", Spec(INT4, (1, 64)), PER_TOKEN_INT8)}
        case "w4a8 channel":
            tail = {"default": Scheme("", Spec(INT4, (1, None)), PER_TOKEN_INT8)}
        case "w4a16":
            tail = {"default": Scheme("", Spec(INT4, (1, 32)), None)}
        case "w4a16 zero":
            tail = {"default": Scheme("", Spec(UINT4, (1, 32), zero=True), None)}
        case "w8a8":
            tail = {"default": Scheme("", Spec(INT8, (1, None)), PER_TOKEN_INT8)}
        case "w8a16":
            tail = {"default": Scheme("", Spec(INT8, (1, None)), None)}
        case "fp8":
            tail = {"default": Scheme("", Spec(FP8, (1, None)), PER_TOKEN_FP8)}
        case "fp8 tensor":
            tail = {"default": Scheme("", Spec(FP8, (None, None)), PER_TOKEN_FP8)}
        case "fp8 block":
            tail = {"default": Scheme("", Spec(FP8, (32, 32)), Spec(FP8, (1, 32), dynamic=True))}
        case "mixed":
            tail |= {"down_proj": Scheme("", Spec(INT8, (1, None)), PER_TOKEN_INT8), "o_proj": None,
                     "v_proj": Scheme("", Spec(FP8, (1, None)), PER_TOKEN_FP8)}
        case "w8a8 head":
            tail = dict.fromkeys(("default", "lm_head"), Scheme("", Spec(INT8, (1, None)), PER_TOKEN_INT8))
        case "sites":  # as quantize mixes: what shares an input is alike
            tail |= {"down_proj": Scheme("", Spec(UINT4, (1, 32), zero=True), None), "o_proj": None,
                     "lm_head": Scheme("", Spec(INT8, (1, None)), PER_TOKEN_INT8)}
            tail |= dict.fromkeys(("gate_proj", "up_proj"), Scheme("", Spec(FP8, (1, None)), PER_TOKEN_FP8))
    return tail


KINDS = ("w4a8 groups", "w4a8 channel", "w4a16", "w4a16 zero", "w8a8", "w8a16", "fp8", "fp8 tensor", "fp8 block", "mixed",
         "w8a8 head")


def quantize_model(path: Path, out: Path, kind: str, **options) -> dict[str, QTensor]:
    """Quantize all linears of the layers of `path`, and the head if the kind says how. Returns what was written."""
    source, tails = open_checkpoint(path), schemes_for(kind)
    schemes, made = {}, {}

    def tensors():
        for name in source.names():
            value, module = source.get(name), name.removesuffix(".weight")
            last = module.rpartition(".")[2]
            meant = value.dim() == 2 and ("layers" in name or last in tails)
            scheme = tails.get(last, tails["default"]) if meant else None
            if scheme is not None:
                schemes[module] = scheme
                value = made[name] = quantized(value.float(), scheme.weight, source.dtype)
            yield name, value

    write_checkpoint(out, source.config, tensors(), schemes, options.pop("kv", "int8"), source, {"algorithm": "rtn"}, **options)
    return made


def same(a: QTensor, b: QTensor) -> bool:
    equal = lambda x, y: (x is None and y is None) or torch.equal(x, y)  # noqa: E731
    return (a.spec == b.spec and torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8)) and equal(a.scale, b.scale)
            and equal(a.zero, b.zero) and equal(a.order, b.order))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_written_checkpoints_read_back_and_load_in_transformers(tmp_path, kind, dtype):
    model = tiny_llama(dtype)
    model.save_pretrained(tmp_path / "in")
    made = quantize_model(tmp_path / "in", tmp_path / "out", kind)
    ours = open_checkpoint(tmp_path / "out")
    assert len({file.stat().st_mode for file in (tmp_path / "out").iterdir()}) == 1  # whoever reads one reads all
    assert ours.kv == "int8"
    assert sorted(ours.names()) == sorted(model.state_dict())
    tails = schemes_for(kind)
    for name in ours.names():
        value = ours.get(name)
        if name in made:
            assert same(value, made[name]), name
            assert ours.act(name) == tails.get(name.split(".")[-2], tails["default"]).act
        else:
            assert torch.equal(value, model.state_dict()[name])
    assert ours.unread() == []
    config = ct.quantization.QuantizationConfig.model_validate(ours.config["quantization_config"])
    assert all(group.format for group in config.config_groups.values())
    if kind == "w4a16 zero":  # transformers 5.24 cannot load packed zero points at all; the package itself can
        written = load_file(tmp_path / "out" / "model.safetensors")
        for name, value in made.items():
            stem = name.removesuffix("weight")
            state = {k.removeprefix(stem): v for k, v in written.items() if k.startswith(stem)}
            theirs = PackedQuantizationCompressor.decompress(state, config.config_groups["group_0"])["weight"]
            assert torch.equal(theirs, dequantize(value).to(dtype))
        return
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    loaded(torch.tensor([[1, 2, 3]]))  # weights are decompressed by the first forward
    for name, parameter in loaded.named_parameters():
        if name.endswith("_proj.weight") or name in made:
            expected = dequantize(made[name], torch.float64) if name in made else model.state_dict()[name].double()
            bound = expected.abs() * 2.0 ** (-10 if dtype == torch.float16 else -7) + 1e-7
            assert ((parameter.double() - expected).abs() <= bound).all(), name


@pytest.mark.parametrize(("bits", "symmetric", "strategy", "group"), [
    (4, True, "group", 32), (4, True, "channel", None), (4, False, "group", 32), (4, False, "channel", None),
    (8, True, "channel", None),
    (3, True, "group", 32), (2, True, "group", 32), (8, False, "group", 32), (6, True, "channel", None),
])
def test_reads_what_the_package_packs(tmp_path, bits, symmetric, strategy, group):
    """The package's own compressor writes, we read: same values as its own decompressor gives."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy=strategy, group_size=group, type="int")
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    g = torch.Generator().manual_seed(bits)
    weight = torch.randn(24, 96, generator=g)
    groups = weight.view(24, -1, group or 96)
    low, high = groups.amin(-1), groups.amax(-1)
    scale = torch.maximum(high, -low) / (2 ** (bits - 1) - 0.5) if symmetric else (high - low) / (2**bits - 1)
    zero = torch.zeros_like(scale) if symmetric else torch.round(-(2 ** (bits - 1)) - low / scale)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    expected = PackedQuantizationCompressor.decompress(packed, scheme)["weight"]
    module = "model.layers.0.mlp.down_proj"
    save_file({f"{module}.{k}": v.contiguous() for k, v in packed.items()}, tmp_path / "model.safetensors")
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": [],
             "config_groups": {"g": {"targets": ["Linear"], "weights": args.model_dump(exclude_none=True)}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": block}))
    checkpoint = open_checkpoint(tmp_path)
    value = checkpoint.get(f"{module}.weight")
    assert torch.equal(dequantize(value), expected)
    assert (value.zero is None) == symmetric
    assert checkpoint.unread() == []


def test_pack_rows_is_the_packages():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    for bits in (2, 3, 4, 5, 6, 7, 8):
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (5, 70), generator=torch.Generator().manual_seed(bits))
        assert torch.equal(pack_rows(codes + (1 << (bits - 1)), bits), pack_to_int32(codes.to(torch.int8), bits))


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_older_compressed_tensors_kept_values_whole(bits):
    """Until 2026 a word held 32 // bits values and the rest of its bits stayed empty."""
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    per_word = 32 // bits
    rows = [[sum(int(v) << (bits * i) for i, v in enumerate(row[j:j + per_word])) for j in range(0, 64, per_word)]
            for row in codes.tolist()]
    words = torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32)
    store = Fake(**{"a.weight_packed": words, "a.weight_scale": torch.ones(3, 1), "a.weight_shape": torch.tensor([3, 64])})
    block = {"format": "pack-quantized", "config_groups": {"g": group(["Linear"], num_bits=bits)}}
    found = dequantize(read_compressed(store, block).linears["a"].read())
    assert torch.equal(found, codes.float() - (1 << (bits - 1)))


class Fake:
    """A store of given tensors."""

    def __init__(self, **tensors):
        self.tensors = {name.replace("__", "."): value for name, value in tensors.items()}
        self.path = Path("fake")

    def names(self):
        return list(self.tensors)

    def has(self, name):
        return name in self.tensors

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        return self.tensors[name].dtype

    def tensor(self, name):
        return self.tensors[name]


W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}


def group(targets, **weights):
    return {"targets": targets, "weights": W4 | weights}


def test_target_precedence_and_ignore():
    groups = [([t], (t, None, "")) for t in ("Linear", r"re:.*\.0\..*", "model.layers.0.mlp.up_proj")]
    found = lambda module: (best_match(module, groups) or (None,))[0]  # noqa: E731
    assert found("model.layers.0.mlp.up_proj") == "model.layers.0.mlp.up_proj"
    assert found("model.layers.0.mlp.gate_proj") == r"re:.*\.0\..*"
    assert found("model.layers.1.mlp.gate_proj") == "Linear"
    assert found("model.embed_tokens") is None


def int8_linear(name: str, n: int = 8, k: int = 32) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.ones(n, k, dtype=torch.int8), f"{name}.weight_scale": torch.ones(n, 1)}


def test_ignored_modules_keep_their_tensors():
    store = Fake(**int8_linear("a.q_proj"), **{"a.o_proj.weight": torch.zeros(4, 4)})
    block = {"format": "int-quantized", "config_groups": {"g": group(["Linear"], num_bits=8)}, "ignore": ["re:.*o_proj"]}
    assert list(read_compressed(store, block).linears) == ["a.q_proj"]
    with pytest.raises(ValueError, match=r"a\.o_proj should be quantized"):
        read_compressed(store, block | {"ignore": []})


@pytest.mark.parametrize(("change", "says"), [
    ({"format": "nvfp4-pack-quantized"}, "nvfp4"), ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    ({"config_groups": {"g": group(["Linear"], wavelet=3)}}, "wavelet"),
    ({"config_groups": {"g": group(["Linear"], num_bits=4, type="float")}}, "4-bit float"),
    ({"config_groups": {"g": group(["Linear"], num_bits=16)}}, "16 bits"),
    ({"config_groups": {"g": group(["Linear"]) | {"output_activations": {"num_bits": 8}}}}, "output activations"),
    ({"config_groups": {"g": group(["Linear"], strategy="group", group_size=16)}}, "want"),
    ({"config_groups": {"g": group(["Linear"]) | {"input_activations": {"num_bits": 4, "strategy": "token"}}}}, "activations"),
    ({"config_groups": {"g": group(["Linear"]) | {"input_activations": {"num_bits": 8, "strategy": "tensor"}}}}, "static int8"),
    ({"config_groups": {"g": group(["Linear"]) | {"input_activations": {
        "num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False}}}}, "asymmetric int8"),
    ({"config_groups": {"g": group(["Linear"], num_bits=8, type="float") | {"input_activations": {
        "num_bits": 8, "strategy": "token", "dynamic": True}}}}, "float weights"),
    ({"config_groups": {"g": group(["Linear"]) | {"input_activations": {
        "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": True}}}}, "dynamic, tensor, float8"),
    ({"config_groups": {"g": group(["Linear"], num_bits=8, type="float") | {"input_activations": {
        "num_bits": 8, "type": "float", "strategy": "tensor"}}}, "format": "float-quantized"}, "no a.input"),
    ({"config_groups": {"g": {"targets": ["Linear"], "input_activations": {"num_bits": 8, "type": "float"}}}}, "weights None"),
    ({"config_groups": {"g": group(["Linear"], num_bits=3)}}, "beyond 3 bits"),
    ({"config_groups": {"g": group(["Linear"], type="fp")}}, "4-bit fp weights are not supported"),
    ({"config_groups": {"g": group(["Linear"], strategy="group")}}, "group_size = None; wants how many"),
])
def test_compressed_refusals(change, says):
    block = {"format": "int-quantized", "config_groups": {"g": group(["Linear"])}} | change
    store = Fake(**int8_linear("a") | {"a.weight": torch.full((8, 32), 4, dtype=torch.int8)})
    if "float-quantized" in block["format"]:
        store.tensors["a.weight"] = store.tensors["a.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=says):
        read_compressed(store, block).linears["a"].read()


def test_unpacked_int4():
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(8, 2)
    store = Fake(**int8_linear("a") | {"a.weight": codes})
    block = {"format": "int-quantized", "config_groups": {
        "g": group(["Linear"]) | {"input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True}}}}
    source = read_compressed(store, block).linears["a"]
    assert torch.equal(source.read().codes, store.tensor("a.weight"))
    assert source.scheme.weight == Spec(INT4, (1, None))
    assert source.scheme.act == PER_TOKEN_INT8


def test_activation_specs():
    assert activation_spec({"num_bits": 8, "strategy": "token", "dynamic": True}) == PER_TOKEN_INT8
    assert activation_spec({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}) == PER_TOKEN_FP8
    assert activation_spec({"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}) == \
        Spec(FP8, (1, 128), dynamic=True)
    assert activation_spec({"num_bits": 8, "type": "float", "strategy": "tensor"}) == Spec(FP8, (None, None))
    assert activation_spec(None) is None


def test_group_order_is_kept():
    order = torch.tensor([1, 0, 1, 0] * 16)
    codes = torch.randint(0, 16, (8, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    store = Fake(**{"a.weight_packed": pack_rows(codes, 4), "a.weight_scale": torch.tensor([[1.0, 10.0]]).repeat(8, 1),
                    "a.weight_shape": torch.tensor([8, 64]), "a.weight_g_idx": order.to(torch.int32)})
    grouped = group(["Linear"], strategy="group", group_size=32, actorder="group")
    block = {"format": "pack-quantized", "config_groups": {"g": grouped}}
    value = read_compressed(store, block).linears["a"].read()
    expected = (codes.double() - 8) * torch.where(order == 1, 10.0, 1.0).double()
    assert torch.equal(dequantize(value, torch.float64), expected)


# ---- writing --------------------------------------------------------------------------------------------------------


def test_one_group_when_all_agree(plain, tmp_path):
    quantize_model(plain, tmp_path / "out", "w8a8")
    block = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [g["targets"] for g in block["config_groups"].values()] == [["Linear"]]
    assert block["ignore"] == ["lm_head"]
    assert block["format"] == "int-quantized"


def test_exact_paths_when_a_name_is_quantized_in_two_ways(tmp_path):
    source = open_checkpoint(_saved(tmp_path / "in"))
    specs = {0: Spec(INT4, (1, 32)), 1: Spec(INT8, (1, None))}
    schemes = {f"model.layers.{i}.mlp.{m}": Scheme("", specs[i if m == "up_proj" else 0], None) for i in (0, 1)
               for m in ("up_proj", "gate_proj")}
    tensors = [(n, quantized(source.get(n), schemes[n[:-7]].weight, torch.float32) if n[:-7] in schemes else source.get(n))
               for n in source.names()]
    write_checkpoint(tmp_path / "out", source.config, tensors, schemes, None, source, {})
    ours = open_checkpoint(tmp_path / "out")
    for name, value in tensors:
        read = ours.get(name)
        assert same(read, value) if isinstance(value, QTensor) else torch.equal(read, value)
    targets = [g["targets"] for g in ours.config["quantization_config"]["config_groups"].values()]
    assert [r"re:.*\.gate_proj$", "model.layers.0.mlp.up_proj"] in targets
    assert ["model.layers.1.mlp.up_proj"] in targets
    assert ours.scheme_name == "mixed"


def _saved(path: Path, **options) -> Path:
    tiny_llama(**options).save_pretrained(path)
    return path


def test_sharded_output(plain, tmp_path):
    made = quantize_model(plain, tmp_path / "out", "w4a8 groups", shard_bytes=30_000)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert len(files) > 2
    assert all(f.name.endswith(f"-of-{len(files):05}.safetensors") for f in files)
    ours = open_checkpoint(tmp_path / "out")
    assert all(same(ours.get(name), value) for name, value in made.items())
    shutil.copyfile(tmp_path / "out" / "model.safetensors.index.json", tmp_path / "i.json")
    listed = json.loads((tmp_path / "i.json").read_text())
    assert listed["metadata"]["total_size"] == sum(t.numel() * t.element_size() for f in files for t in load_file(f).values())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(torch.tensor([[1]])).logits.shape == (1, 1, 80)


def test_scales_that_the_dtype_cannot_hold_are_written_in_float32(tmp_path):
    source = open_checkpoint(_saved(tmp_path / "in", dtype=torch.bfloat16))
    name = "model.layers.0.mlp.up_proj.weight"
    value = quantized(source.get(name).float(), Spec(INT4, (1, 32)), torch.float32)
    write_checkpoint(tmp_path / "out", source.config, [(name, value)], {}, None, source, {})
    assert not torch.equal(value.scale.bfloat16().float(), value.scale)
    assert same(open_checkpoint(tmp_path / "out").get(name), value)


def test_what_cannot_be_written(plain, tmp_path):
    source = open_checkpoint(plain)
    name = "model.layers.0.mlp.up_proj.weight"
    qqq = QTensor(Spec(INT4, (1, 32), over=Spec(INT8, (1, None))), torch.zeros(128, 64, dtype=torch.int8),
                  torch.ones(128, 2), over=torch.ones(128, 1))
    fractions = replace(qqq, scale=torch.full((128, 2), 0.3))
    for tensors, says in (([(name, fractions)], "QQQ"), ([(name, source.get(name))], "nothing was quantized"),
                          ([(name, source.get(name))] * 2, "twice")):
        with pytest.raises(ValueError, match=says):
            write_checkpoint(tmp_path / "out", source.config, tensors, {}, None, source, {})
    with pytest.raises(ValueError, match="int5"):
        write_checkpoint(tmp_path / "out", source.config, [], {}, "int5", source, {})
    assert list(tmp_path.iterdir()) == []


def test_targets_are_only_replaced_when_ours(plain, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.txt").write_text("x")
    with pytest.raises(FileExistsError, match="not written by Nybble"):
        quantize_model(plain, tmp_path / "precious", "w8a8")
    copied = tmp_path / "copy"
    shutil.copytree(plain, copied)
    with pytest.raises(FileExistsError, match="being read"):
        quantize_model(copied, copied, "w8a8")
    assert (tmp_path / "precious" / "thesis.txt").exists()
    (tmp_path / "out").mkdir()
    quantize_model(plain, tmp_path / "out", "w8a8")
    quantize_model(plain, tmp_path / "out", "w4a16")
    assert open_checkpoint(tmp_path / "out").config["quantization_config"]["format"] == "pack-quantized"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "out", "precious"]


def test_fp8_kv_scales_round_trip(plain, tmp_path):
    source = open_checkpoint(plain)
    linear = "model.layers.0.mlp.up_proj.weight"
    spec = Spec(INT4, (1, 32))
    tensors = [(n, quantized(source.get(n), spec, torch.float32) if n == linear else source.get(n)) for n in source.names()]
    scales = [(f"model.layers.{i}.self_attn.{s}_scale", torch.tensor(0.5 + i + (s == "v") / 4)) for i in (0, 1) for s in "kv"]
    with pytest.raises(ValueError, match="for every layer"):
        write_checkpoint(tmp_path / "out", source.config, tensors + scales[:3], {}, "fp8", source, {})
    write_checkpoint(tmp_path / "out", source.config, tensors + scales, {}, "fp8", source, {})
    ours = open_checkpoint(tmp_path / "out")
    assert (ours.kv, ours.kv_scales(0), ours.kv_scales(1), ours.kv_scales(2)) == ("fp8", (0.5, 0.75), (1.5, 1.75), None)
    scheme = ct.quantization.QuantizationConfig.model_validate(ours.config["quantization_config"]).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.symmetric, scheme.dynamic) == (8, "float", True, False)
    assert load_file(tmp_path / "out" / "model.safetensors")[scales[0][0]].shape == (1,)
    assert set(ours.names()) == set(source.names())


def test_into_the_directory_one_is_in(plain, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    quantize_model(plain, Path("."), "w8a8")
    assert open_checkpoint(tmp_path / "out").scheme_name == "w8a8"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_text_is_carried_along(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "in")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE.txt"):
        (tmp_path / "in" / name).write_text(name)
    quantize_model(tmp_path / "in", tmp_path / "out", "w8a8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE.txt"):
        assert (tmp_path / "out" / name).read_text() == name
    assert (tmp_path / "out" / "generation_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["nybble"] == {"kv_cache": "int8", "recipe": {"algorithm": "rtn"}}


def test_replacing_keeps_what_nybble_did_not_write(plain, tmp_path):
    for aside in ("out.old", "out.partial"):
        (tmp_path / aside).mkdir()
        (tmp_path / aside / "thesis.txt").write_text("x")
    out = tmp_path / "out"
    quantize_model(plain, out, "w8a8")
    (out / "sub").mkdir()
    for name in ("notes.txt", "report.html", "sub/deep.txt", "LICENSE-mine", "adapter.safetensors"):
        (out / name).write_text(name)
    for stale in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "quantize_config.json", "vocab.json"):
        (out / stale).write_text("stale")
    quantize_model(plain, out, "w4a16")
    for name in ("notes.txt", "report.html", "sub/deep.txt", "LICENSE-mine", "adapter.safetensors"):
        assert (out / name).read_text() == name
    assert sorted(p.name for p in out.iterdir()) == [
        "LICENSE-mine", "adapter.safetensors", "config.json", "generation_config.json", "model.safetensors", "notes.txt",
        "report.html", "sub"]
    assert open_checkpoint(out).config["quantization_config"]["format"] == "pack-quantized"
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.glob("*/thesis.txt")) == [
        "out.old/thesis.txt", "out.partial/thesis.txt"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.old", "out.partial"]


def test_writers_of_one_directory_at_the_same_time_all_succeed_and_one_stays_whole(tmp_path):
    def write(which: int) -> None:
        with staged(tmp_path / "out") as partial:
            for name in ("config.json", "a.txt", "b.txt"):
                (partial / name).write_text(f'{{"nybble": {which}}}')

    for i in range(40):
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write, range(4 * i, 4 * i + 4)))
        assert len({file.read_text() for file in (tmp_path / "out").iterdir()}) == 1
        assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["a.txt", "b.txt", "config.json"]
        assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_another_program_keeps_locked_is_written_to(tmp_path, monkeypatch):
    """As `flock FOLDER nybble quantize ... -o FOLDER/out` does."""
    monkeypatch.setattr("nybble.checkpoint.write.PATIENCE_SECONDS", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with staged(tmp_path / "out") as partial:
        (partial / "config.json").write_text("{}")
    os.close(held)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_directory_that_somebody_made_meanwhile_is_kept(tmp_path):
    def write() -> None:
        with staged(tmp_path / "out") as partial:
            (partial / "config.json").write_text('{"nybble": {}}')
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "thesis.txt").write_text("x")

    with pytest.raises(FileExistsError, match="not written by Nybble"):
        write()
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out", "out/thesis.txt"]


def test_a_failed_replacement_puts_the_old_one_back_and_the_dead_are_swept(plain, tmp_path, monkeypatch):
    out = tmp_path / "out"
    quantize_model(plain, out, "w8a8")
    (out / "notes.txt").write_text("x")
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    move = os.replace

    def fails(source, target):
        if Path(source).name == "new":
            raise OSError("disk")
        move(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="disk"):
        quantize_model(plain, out, "w4a16")
    monkeypatch.undo()
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    dead = tmp_path / ".out.abcdefgh.nybble"
    (dead / "new").mkdir(parents=True)
    (dead / "lock").touch()
    quantize_model(plain, out, "w4a16")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]

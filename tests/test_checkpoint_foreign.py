"""Other tools' formats: real checkpoints where they are at hand, golden words and element-by-element packers everywhere."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nybble.checkpoint import open_checkpoint
from nybble.checkpoint.checkpoint import find_quantization
from nybble.checkpoint.kv import FNUZ_FACTORS, role_of
from nybble.formats.qtensor import QTensor, dequantize
from nybble.formats.spec import FP8, INT4, INT8_CHANNEL, PER_TOKEN_FP8, PER_TOKEN_INT8, UINT4, Spec
from nybble.kernels.registry import ops_for
from nybble.models import load_model
from nybble.models.window import forward_window
from nybble.nn.linear import Linear

SHARED = Path(__file__).parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is not here")
M = "model.layers.0.mlp.down_proj"
CPU = torch.device("cpu")

STATIC_FP8 = "fp8_e4m3[*x*]/fp8_e4m3[*x*]"
REAL = {  # checkpoint: (scheme, KV)
    "awq_llama_gemm_g128": ("w4a16_zero_g128", None), "ct_llama_fp8_dynamic": ("fp8", None),
    "ct_llama_fp8_static_kv": (STATIC_FP8, "fp8"), "ct_llama_w4a16_sym_g128": ("w4a16_g128", None),
    "ct_llama_w8a8_int8": ("w8a8", None), "fp8_autofp8_llama_static_kv": (STATIC_FP8, "fp8"),
    "fp8_block_llama": ("fp8_e4m3[128x128]/fp8_e4m3[1x128]", None), "gguf_llama_q4_0": ("16bit", None),
    "gptq_llama_v1_sym_g128": ("w4a16_g128", None), "modelopt_llama_fp8_kv": (STATIC_FP8, "fp8"),
    "qqq_llama_perchannel": ("w4a8", None), "qqq_qwen2_g128": ("w4a8_qqq_g128", None), "tgi_llama_kv_scale": ("16bit", "fp8"),
}


def values(weight) -> torch.Tensor:
    return dequantize(weight, torch.float64) if isinstance(weight, QTensor) else weight.double()


@needs_shared
@pytest.mark.parametrize("name", REAL)
def test_real_checkpoints(name):
    """Rows, position-weighted row and column sums of every quantized linear, as the tool that made the file means them."""
    path = SHARED / "checkpoints" / name
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    checkpoint, reference = open_checkpoint(path), load_file(path / "reference.safetensors")
    assert (checkpoint.scheme_name, checkpoint.kv) == REAL[name]
    tolerance = 2.0**-11 if name.startswith("gguf") else 1e-6  # GGUF weights come out as float16
    compared = 0
    for key, expected in reference.items():
        kind, _, parameter = key.partition(".")
        if kind not in ("deq", "deq16", "deq_rowsum", "deq_colsum"):
            continue
        weight = values(checkpoint.get(parameter.removesuffix(".weight") + ".weight"))
        n, k = weight.shape
        if kind == "deq_rowsum":
            found = weight @ torch.arange(1, k + 1, dtype=torch.float64)
        elif kind == "deq_colsum":
            found = torch.arange(1, n + 1, dtype=torch.float64) @ weight
        else:
            found = weight[:expected.shape[0]]
        assert (found - expected).abs().max() <= tolerance * expected.abs().max(), key
        compared += 1
    assert compared == 30
    for parameter in checkpoint.names():
        checkpoint.get(parameter)
    assert checkpoint.unread() == []
    if "kv.k_scale" in reference:
        for layer in range(2):
            assert checkpoint.kv_scales(layer) == (float(reference["kv.k_scale"][layer]), float(reference["kv.v_scale"][layer]))
        assert all(why for why in checkpoint.ignored().values())
    if name == "ct_llama_fp8_static_kv":
        stored = load_file(path / "model.safetensors")[f"{M}.input_scale"]
        assert checkpoint.act_scale(f"{M}.weight") == float(stored)


LINEARS = ("model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj")


@needs_shared
@pytest.mark.parametrize("name", [name for name in REAL if "fp8" in name])
def test_linears_with_fp8_activations(name):
    """One linear at a time, inputs away from rounding ties: activations quantized as the tool that made the file does."""
    path = SHARED / "checkpoints" / name
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    checkpoint, reference = open_checkpoint(path), load_file(path / "reference.safetensors")
    for linear in LINEARS:
        parameter = f"{linear}.weight"
        weight, x, y = checkpoint.get(parameter), reference[f"lin.{linear}.x"], reference[f"lin.{linear}.y"]
        run = Linear(weight, checkpoint.act(parameter), None, CPU, torch.float32, ops_for(CPU), checkpoint.act_scale(parameter))
        assert (run(x) - y).abs().max() <= 1e-5 * y.abs().max(), linear
        assert (reference[f"lin.{linear}.y_weight_only"] - y).abs().max() >= 1e-3 * y.abs().max(), linear


# reference logits to compare with, and a bound: "max" of the difference, or "rms" where 8-bit activations make rounding
# cascade (then the bound is what rounding to the model's dtype alone does, from the checkpoint's note; for FP8 less than that,
# 0.092 to 0.11, because activations left alone are off by only 0.087 to 0.103).
LOGITS = {
    "awq_llama_gemm_g128": ("logits", "max", 1e-4), "ct_llama_fp8_dynamic": ("logits", "rms", 0.07),
    "ct_llama_fp8_static_kv": ("logits", "rms", 0.05), "ct_llama_w4a16_sym_g128": ("logits", "max", 1e-4),
    "ct_llama_w8a8_int8": ("logits_act127", "rms", 0.054), "fp8_autofp8_llama_static_kv": ("logits", "rms", 0.05),
    "fp8_block_llama": ("logits", "rms", 0.07), "gguf_llama_q4_0": ("logits", "max", 0.0163),
    "gptq_llama_v1_sym_g128": ("logits", "max", 1e-4), "modelopt_llama_fp8_kv": ("logits", "rms", 0.05),
    "qqq_llama_perchannel": ("logits", "rms", 0.0413), "qqq_qwen2_g128": ("logits", "rms", 0.0281),
    "tgi_llama_kv_scale": ("logits", "max", 1e-4),
}


@needs_shared
@pytest.mark.parametrize("name", LOGITS)
def test_logits_of_real_checkpoints(name):
    """The whole model on a CPU in float32, with a float KV cache; with an FP8 cache too if the checkpoint has scales."""
    path = SHARED / "checkpoints" / name
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    key, measure, bound = LOGITS[name]
    model, reference = load_model(open_checkpoint(path), "cpu"), load_file(path / "reference.safetensors")
    assert error_of(model, reference, key, measure) <= bound
    if f"prompt_0.{key}_kvfp8" in reference and measure == "rms":
        scales = [open_checkpoint(path).kv_scales(layer) for layer in range(model.config.num_layers)]
        assert error_of(model, reference, f"{key}_kvfp8", measure, "fp8", scales) <= bound


def error_of(model, reference, key, measure, kv="fp32", scales=None) -> float:
    prompts = [reference[f"prompt_{i}.input_ids"].reshape(1, -1) for i in range(4)]
    found = [forward_window(model, ids, kv, scales)[0] - reference[f"prompt_{i}.{key}"] for i, ids in enumerate(prompts)]
    error = torch.cat(found).double()
    return float(error.abs().max() if measure == "max" else error.square().mean().sqrt())


def directory(path: Path, tensors: dict[str, torch.Tensor], quantization: dict | None, **config) -> Path:
    path.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config | ({"quantization_config": quantization} if quantization else {})))
    return path


def words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """Integers [rows, count] -> int32 words, element by element: element i at bit bits * i of the row."""
    out = np.zeros((len(fields), fields.shape[1] * bits // 32), np.uint32)
    for r, row in enumerate(fields.tolist()):
        stream = sum(int(v) << (bits * i) for i, v in enumerate(row))
        for w in range(out.shape[1]):
            out[r, w] = stream >> (32 * w) & 0xFFFFFFFF
    return torch.from_numpy(out.view(np.int32).copy())


# ---- QQQ ------------------------------------------------------------------------------------------------------------


def qqq_pack(codes: np.ndarray, grouped: bool) -> torch.Tensor:
    """u4 codes [N, K] -> B, one element at a time by the published closed form."""
    n_all, k_all = codes.shape
    out = np.zeros((k_all // 16, 2 * n_all), np.uint32)
    for n in range(n_all):
        for k in range(k_all):
            word = 128 * (n // 64) + 16 * (n % 8) + 4 * ((k % 16) // 4) + (n // 16) % 4
            t, b = k % 4, (n % 16) // 8
            e = 4 * b + t
            nibble = e // 2 + 4 * (e % 2) if grouped else 2 * t + (1 - b)
            out[k // 16, word] |= np.uint32(int(codes[n, k]) << (4 * nibble))
    return torch.from_numpy(out.view(np.int32))


def swap_scales(flat: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Swap the two axes before the last of each block of columns (both of QQQ's scale permutations)."""
    return flat.reshape(flat.shape[0], -1, *shape).transpose(2, 3).reshape(flat.shape)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("keys", [("wbits", "group_size"), ("bits", "group_size"), ("w_bit", "q_group_size")])
def test_qqq(tmp_path, grouped, keys):
    n, k = 128, 256
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(-7 if not grouped else -8, 8, (n, k), generator=g)
    unsigned = (codes + 8 if grouped else codes & 15).numpy()
    over = torch.rand(1, n, generator=g) + 0.5
    tensors = {f"{M}.B": qqq_pack(unsigned, grouped), f"{M}.s_channel": swap_scales(over if grouped else over / 16, (4, 4, 2))}
    if grouped:
        group = (torch.rand(2, n, generator=g) * 18).half()
        tensors[f"{M}.s_group"] = swap_scales(group, (8, 8))
        inner = torch.round(codes.view(n, 2, 128) * group.t().float()[..., None]).clamp(-128, 127).view(n, k)
        expected = inner.double() * over.t().double()
    else:
        expected = codes.double() * over.t().double()
    path = directory(tmp_path / "q", tensors, {"quant_method": "qqq", keys[0]: 4, keys[1]: 128 if grouped else -1})
    checkpoint = open_checkpoint(path)
    weight = checkpoint.get(f"{M}.weight")
    assert weight.spec == (Spec(INT4, (1, 128), over=INT8_CHANNEL) if grouped else Spec(INT4, (1, None)))
    assert checkpoint.act(f"{M}.weight") == PER_TOKEN_INT8
    assert torch.equal(values(weight), expected)
    assert checkpoint.unread() == []


def test_qqq_empty_s_group_and_refusals(tmp_path):
    tensors = {f"{M}.B": torch.zeros(4, 128, dtype=torch.int32), f"{M}.s_channel": torch.ones(1, 64),
               f"{M}.s_group": torch.empty(0, dtype=torch.float16)}
    config = {"quant_method": "qqq", "wbits": 4, "group_size": -1}
    assert open_checkpoint(directory(tmp_path / "a", tensors, config)).scheme_name == "w4a8"
    for change, says in (({"wbits": 8}, "8 bits"), ({"group_size": 64}, "group size 64"), ({"sym": False}, "sym False")):
        with pytest.raises(ValueError, match=says):
            open_checkpoint(directory(tmp_path / "b", tensors, config | change))
    for have, size in (({}, 128), ({f"{M}.s_group": torch.ones(2, 64).half(), f"{M}.B": torch.zeros(16, 128).int()}, -1)):
        with pytest.raises(ValueError, match="one of them is wrong"):  # a group size that s_group contradicts
            open_checkpoint(directory(tmp_path / "d", tensors | have, config | {"group_size": size}))
    del tensors[f"{M}.s_group"]
    assert open_checkpoint(directory(tmp_path / "e", tensors, config)).scheme_name == "w4a8"
    with pytest.raises(ValueError, match="not a QQQ weight"):
        open_checkpoint(directory(tmp_path / "c", tensors | {f"{M}.s_channel": torch.ones(1, 32)}, config))


# ---- AWQ ------------------------------------------------------------------------------------------------------------

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column 8 c + order[i]


def awq_columns(fields: torch.Tensor) -> torch.Tensor:
    rows, n = fields.shape
    return words(fields.view(rows, n // 8, 8)[..., list(AWQ_ORDER)].reshape(rows, n).numpy(), 4)


def test_awq_golden_word():
    assert awq_columns(torch.arange(8)[None])[0, 0].item() == 0x75316420


def gemv_fast_words(codes: np.ndarray) -> torch.Tensor:
    """llm-awq's interleaved int16 words, one element at a time from the published order of rows and channels."""
    out = np.zeros((len(codes) // 4, codes.shape[1]), np.uint16)
    for n, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            eights, pairs, parity = k % 32 // 8, k % 8 // 2, k % 2  # [0, 1, 8, 9, ..] then [0, 2, 4, 6, 1, 3, 5, 7] of eight
            place = k % 64 // 32 * 32 + pairs * 8 + parity * 4 + eights
            flat = n % 4 * 64 + place
            out[n // 4, k // 64 * 64 + flat // 4] |= code << (4 * (flat % 4))
    return torch.from_numpy(out.view(np.int16))


@pytest.mark.parametrize("version", ["gemm", "GEMM", "gemv", "gemv_fast"])
@pytest.mark.parametrize("group", [32, 64, -1])
def test_awq(tmp_path, version, group):
    n, k = 16, 128
    g = torch.Generator().manual_seed(1)
    groups = k // (group if group > 0 else k)
    codes, zero = torch.randint(0, 16, (n, k), generator=g), torch.randint(0, 16, (n, groups), generator=g)
    zero[0], zero[1] = 0, 15
    scale = torch.rand(n, groups, generator=g).half()
    if version == "gemv_fast":
        pad = torch.nn.functional.pad
        tensors = {f"{M}.qweight": gemv_fast_words(codes.numpy()), f"{M}.scales": pad(scale.t(), (0, 0, 0, 64 - groups)),
                   f"{M}.qzeros": pad(-(zero.float() * scale.float()).half().t(), (0, 0, 0, 64 - groups))}
    elif version == "gemv":
        pad = 8
        wide = torch.zeros(n, pad, dtype=torch.int64)
        wide[:, :groups] = zero
        scales = torch.full((n, pad * 8), 77.0).half()
        scales[:, :groups] = scale
        padded = torch.nn.functional.pad(wide, (0, pad * 8 - pad))
        tensors = {f"{M}.qweight": words(codes.numpy(), 4), f"{M}.qzeros": words(padded.numpy(), 4), f"{M}.scales": scales}
    else:
        tensors = {f"{M}.qweight": awq_columns(codes.t()), f"{M}.qzeros": awq_columns(zero.t()), f"{M}.scales": scale.t()}
    checkpoint = open_checkpoint(directory(tmp_path / "a", tensors, AWQ | {"version": version, "group_size": group}))
    width = k // groups
    expected = (codes - zero.repeat_interleave(width, 1)).double() * scale.double().repeat_interleave(width, 1)
    weight = checkpoint.get(f"{M}.weight")
    assert torch.equal(values(weight), expected)
    assert weight.spec == Spec(UINT4, (1, group if group > 0 else None), zero=True)
    assert checkpoint.act(f"{M}.weight") is None
    assert checkpoint.unread() == []


@pytest.mark.parametrize(("change", "says"), [
    ({"bits": 8}, "8 bits"), ({"version": "marlin"}, "marlin"), ({"version": "gemv_fast"}, "int32"),
    ({"version": "gemv"}, "fits no"),
    ({"modules_to_not_convert": ["down_proj"]}, "says it is not"), ({"group_size": 0}, "group size"),
])
def test_awq_refusals(tmp_path, change, says):
    tensors = {f"{M}.qweight": torch.zeros(64, 2, dtype=torch.int32), f"{M}.qzeros": torch.zeros(2, 2, dtype=torch.int32),
               f"{M}.scales": torch.ones(2, 16).half()}
    with pytest.raises(ValueError, match=says):
        open_checkpoint(directory(tmp_path / "a", tensors, AWQ | change))


@pytest.mark.parametrize(("version", "shape"), [("gemv", (16, 1)), ("gemv_fast", (1, 16))])
def test_awq_padding_is_never_missing(tmp_path, version, shape):
    """Scales of gemv and gemv_fast may have more columns than there are groups, not fewer."""
    words = torch.zeros(16, 8, dtype=torch.int32) if version == "gemv" else torch.zeros(4, 64, dtype=torch.int16)
    tensors = {f"{M}.qweight": words, f"{M}.qzeros": torch.zeros(shape, dtype=words.dtype),
               f"{M}.scales": torch.ones(shape).half()}
    with pytest.raises(ValueError, match=f"fits no AWQ {version} weight .16, 64. in groups of 32"):
        open_checkpoint(directory(tmp_path / "a", tensors, AWQ | {"version": version}))


# ---- GPTQ -----------------------------------------------------------------------------------------------------------


def gptq(bits: int, symmetric: bool, group: int, version: int, ordered: bool = False, borrow: bool = False, seed: int = 0):
    """(tensors, expected values) of a [32, 128] weight. borrow: subtract the one from whole words, as GPTQModel does."""
    n, k = 32, 128
    g = torch.Generator().manual_seed(seed)
    groups = k // (group if group > 0 else k)
    codes = torch.randint(0, 1 << bits, (n, k), generator=g)
    zero = torch.randint(0, 1 << bits, (n, groups), generator=g)
    zero = torch.full_like(zero, 1 << (bits - 1)) if symmetric else zero
    scale = torch.rand(n, groups, generator=g).half()
    order = torch.arange(k) // (k // groups)
    order = order[torch.randperm(k, generator=g)] if ordered else order
    if borrow:
        ones = sum(1 << (bits * i) for i in range(32 // bits)) if bits != 3 else torch.tensor(
            [0b00100100100100100100100100100100, 0b10010010010010010010010010010010, 0b01001001001001001001001001001001])
        packed = words(zero.t().numpy(), bits).to(torch.int64)
        packed = (packed - ones) & 0xFFFFFFFF
        qzeros = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)
    else:
        stored = (zero - (1 if version == 1 else 0)) % (1 << bits)
        qzeros = words(stored.t().numpy(), bits)
    tensors = {f"{M}.qweight": words(codes.numpy(), bits).t(), f"{M}.qzeros": qzeros, f"{M}.scales": scale.t(),
               f"{M}.g_idx": order.to(torch.int32)}
    return tensors, (codes - zero[:, order]).double() * scale.double()[:, order]


def gptq_config(bits, symmetric, group, version=1, **more):
    return {"quant_method": "gptq", "bits": bits, "sym": symmetric, "group_size": group, "desc_act": False,
            "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version]} | more


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("group", "ordered"), [(32, False), (64, True), (128, False), (-1, False), (-1, True)])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(tmp_path, bits, symmetric, group, ordered, version):
    tensors, expected = gptq(bits, symmetric, group, version, ordered)
    config = gptq_config(bits, symmetric, group, version, desc_act=ordered)
    checkpoint = open_checkpoint(directory(tmp_path / "g", tensors, config))
    weight = checkpoint.get(f"{M}.weight")
    assert torch.equal(values(weight), expected)
    assert (weight.order is not None) == (ordered and group == 64)
    assert weight.spec.num.bits == (4 if bits <= 4 else 8)
    assert checkpoint.unread() == []


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_zero_points_with_borrows(tmp_path, bits, symmetric):
    tensors, expected = gptq(bits, symmetric, 32, 1, borrow=True, seed=3)
    made_by = gptq_config(bits, symmetric, 32, meta={"quantizer": ["gptqmodel:7.6.0"]})
    assert torch.equal(values(open_checkpoint(directory(tmp_path / "g", tensors, made_by)).get(f"{M}.weight")), expected)
    per_field, expected = gptq(bits, symmetric, 32, 1, seed=3)
    made_by["meta"] = {"quantizer": "auto_gptq:0.7"}
    assert torch.equal(values(open_checkpoint(directory(tmp_path / "f", per_field, made_by)).get(f"{M}.weight")), expected)


@pytest.mark.parametrize("labelled", [1, 2])
def test_mislabelled_symmetric_gptq_is_read_by_its_zeros(tmp_path, labelled):
    tensors, expected = gptq(4, True, 32, 3 - labelled)
    assert set(tensors[f"{M}.qzeros"].flatten().tolist()) == {0x77777777 if labelled == 2 else 0x88888888 - (1 << 32)}
    checkpoint = open_checkpoint(directory(tmp_path / "g", tensors, gptq_config(4, True, 32, labelled)))
    with pytest.warns(UserWarning, match=f"labelled GPTQ v{labelled}"):
        weight = checkpoint.get(f"{M}.weight")
    assert torch.equal(values(weight), expected)


def test_gptq_without_g_idx_and_with_zeros(tmp_path):
    tensors, expected = gptq(4, True, 32, 1)
    for change in ({}, {f"{M}.g_idx": torch.zeros(128, dtype=torch.int32)}):
        left = {name: t for name, t in tensors.items() if "g_idx" not in name} | change
        checkpoint = open_checkpoint(directory(tmp_path / "g", left, gptq_config(4, True, 32)))
        assert torch.equal(values(checkpoint.get(f"{M}.weight")), expected)


def test_gptq_refusals(tmp_path):
    tensors, _ = gptq(4, False, 32, 1)
    with pytest.raises(ValueError, match="says symmetric"):
        open_checkpoint(directory(tmp_path / "a", tensors, gptq_config(4, True, 32))).get(f"{M}.weight")
    for change, says in (({"checkpoint_format": "marlin"}, "marlin"), ({"bits": 5}, "5 bits"), ({"group_size": 64}, "want"),
                         ({"dynamic": {"-:.*down_proj": {}}}, "says it is not"), ({"is_marlin_format": True}, "own layout"),
                         ({"pack_dtype": "int16"}, "own layout")):
        with pytest.raises(ValueError, match=says):
            open_checkpoint(directory(tmp_path / "b", tensors, gptq_config(4, False, 32) | change))
    open_checkpoint(directory(tmp_path / "c", tensors, gptq_config(4, False, 32, dynamic={"-:.*lm_head": {}})))
    with pytest.warns(UserWarning, match="not used: wavelets"):
        open_checkpoint(directory(tmp_path / "c", tensors, gptq_config(4, False, 32, wavelets=3)))
    for order, says in ((torch.full((128,), 4), "does not name"), (torch.arange(64) // 32, "does not name")):
        changed = tensors | {f"{M}.g_idx": order.to(torch.int32)}
        with pytest.raises(ValueError, match=says):
            open_checkpoint(directory(tmp_path / "d", changed, gptq_config(4, False, 32))).get(f"{M}.weight")
    del tensors[f"{M}.g_idx"]
    with pytest.raises(ValueError, match="no g_idx"):
        open_checkpoint(directory(tmp_path / "e", tensors, gptq_config(4, False, 32, desc_act=True)))


def test_gptq_rules_for_single_modules(tmp_path):
    """GPTQModel's `dynamic`: the first regex that matches changes bits, groups, symmetry of a module."""
    tensors, expected = gptq(8, True, 64, 1)
    rules = {"+:.*up_proj": {"bits": 2}, r".*\.0\.mlp": {"bits": 8, "group_size": 64, "sym": True}}
    checkpoint = open_checkpoint(directory(tmp_path / "c", tensors, gptq_config(4, False, 32, dynamic=rules)))
    assert torch.equal(values(checkpoint.get(f"{M}.weight")), expected)


# ---- FP8 ------------------------------------------------------------------------------------------------------------


def fp8(n=192, k=160) -> torch.Tensor:
    return (torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 40).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (192,), (192, 1)])
@pytest.mark.parametrize(("quantization", "act"), [
    ({"quant_method": "fp8", "activation_scheme": "dynamic"}, PER_TOKEN_FP8), ({"quant_method": "fbgemm_fp8"}, PER_TOKEN_FP8),
    ({"quant_method": "fp8", "activation_scheme": "static"}, Spec(FP8, (None, None))),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, Spec(FP8, (None, None))),
    ({"quant_method": "modelopt", "quant_algo": "fp8_per_channel_per_token"}, PER_TOKEN_FP8),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                                                      "input_tensors": {"dtype": "fp8_e4m3"}}}, Spec(FP8, (None, None))),
])
def test_fp8_scales(tmp_path, shape, quantization, act):
    weight = fp8()
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5
    tensors = {f"{M}.weight": weight, f"{M}.weight_scale": scale.bfloat16() if shape == (1,) else scale}
    if not act.dynamic:
        with pytest.raises(ValueError, match=r"no model\.layers\.0\.\S*input_scale"):
            open_checkpoint(directory(tmp_path / "f", tensors, quantization))
        tensors[f"{M}.input_scale"] = torch.tensor(0.25)
    checkpoint = open_checkpoint(directory(tmp_path / "f", tensors, quantization))
    stored = tensors[f"{M}.weight_scale"].double()
    expected = weight.double() * (stored.reshape(-1, 1) if stored.numel() > 1 else stored)
    assert torch.equal(values(checkpoint.get(f"{M}.weight")), expected)
    assert checkpoint.act(f"{M}.weight") == act
    assert checkpoint.act_scale(f"{M}.weight") == (None if act.dynamic else 0.25)
    assert checkpoint.unread() == []


def test_block_fp8_with_partial_blocks(tmp_path):
    weight = fp8()
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    checkpoint = open_checkpoint(directory(tmp_path / "b", {f"{M}.weight": weight, f"{M}.weight_scale_inv": scale}, config))
    expected = weight.double()
    expected[:, 128:] *= 2
    expected[128:] *= 4
    assert torch.equal(values(checkpoint.get(f"{M}.weight")), expected)
    assert checkpoint.act(f"{M}.weight") == Spec(FP8, (1, 128), dynamic=True)


def test_gptqmodels_inverse_scale_divides(tmp_path):
    weight = fp8()
    divisor = torch.full((192,), 4.0)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_scale_semantics": "inverse"}
    checkpoint = open_checkpoint(directory(tmp_path / "d", {f"{M}.weight": weight, f"{M}.weight_scale_inv": divisor}, config))
    assert torch.equal(values(checkpoint.get(f"{M}.weight")), weight.double() / 4)


@pytest.mark.parametrize(("tensors", "quantization", "says"), [
    ({f"{M}.weight": fp8()}, {"quant_method": "fp8"}, "no scale beside it"),
    ({f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(7)}, {"quant_method": "fp8"}, "fits no scale"),
    ({f"{M}.weight": fp8().float(), f"{M}.weight_scale": torch.ones(1)}, {"quant_method": "fp8"}, "is torch.float32"),
    ({f"{M}.weight": fp8().float().to(torch.float8_e4m3fnuz), f"{M}.weight_scale": torch.ones(1)}, {"quant_method": "fp8"},
     "is torch.float8_e4m3fnuz .*; its scale weight_scale is for a matrix of float8_e4m3fn or float8_e5m2"),
    ({f"{M}.weight": fp8().float().to(torch.float8_e4m3fnuz)}, {"quant_method": "fp8"}, "no scale beside it"),
    ({f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(1)}, {"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(1)},
     {"quant_method": "fbgemm_fp8", "activation_scale_ub": 10.0}, "clipping"),
    ({f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(1)}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ({f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(1)},
     {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["*down_proj"]}, "excludes it"),
    ({f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(1)},
     {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "Quark"),
    ({f"{M}.weight": torch.ones(4, 4)}, {"quant_method": "fp8"}, "holds no linear"),
    ({f"{M}.weight": torch.ones(4, 4)}, {"quant_method": "gptq", "bits": 4}, "holds no linear"),
])
def test_fp8_refusals(tmp_path, tensors, quantization, says):
    with pytest.raises(ValueError, match=says):
        open_checkpoint(directory(tmp_path / "x", tensors, quantization))


def test_a_broken_scale_is_named(tmp_path):
    tensors = {f"{M}.weight": fp8(), f"{M}.weight_scale": torch.tensor(float("nan"))}
    checkpoint = open_checkpoint(directory(tmp_path / "x", tensors, {"quant_method": "fp8", "activation_scheme": "dynamic"}))
    with pytest.raises(ValueError, match=r"weight_scale holds NaN"):
        checkpoint.get(f"{M}.weight")


# ---- KV scales ------------------------------------------------------------------------------------------------------

A = "model.layers.0.self_attn"


@pytest.mark.parametrize(("k_name", "v_name"), [
    (f"{A}.k_scale", f"{A}.v_scale"), (f"{A}.k_proj.k_scale", f"{A}.v_proj.v_scale"),
    (f"{A}.k_proj.output_scale", f"{A}.v_proj.output_scale"), (f"{A}.qkv_proj.k_scale", f"{A}.qkv_proj.v_scale"),
    (f"{A}.qkqkv_proj.k_scale", f"{A}.qkqkv_proj.v_scale"),
    ("backbone.layers.0.mixer.k_proj.k_scale", "backbone.layers.0.mixer.v_proj.v_scale"),
    (f"{A}.k_cache.scale", f"{A}.v_cache.scale"), (f"{A}.attn.k_scale", f"{A}.attn.v_scale"),
])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
def test_every_name_of_a_kv_scale(tmp_path, k_name, v_name, shape):
    tensors = {k_name: torch.full(shape, 0.5), v_name: torch.full(shape, 2.0), "model.norm.weight": torch.ones(4)}
    if shape == (2, 1, 1):
        tensors[k_name][1] = 0.25
    checkpoint = open_checkpoint(directory(tmp_path / "k", tensors, None, num_hidden_layers=1, num_key_value_heads=2))
    k, v = checkpoint.kv_scales(0)
    assert v == 2.0
    assert k.tolist() == [0.5, 0.25] if shape == (2, 1, 1) else k == 0.5
    assert checkpoint.names() == ["model.norm.weight"]
    assert set(checkpoint.ignored()) == {k_name, v_name}


@pytest.mark.parametrize("name", [f"{A}.kv_scale", "transformer.layers.0.attention.kv_cache_scaling_factor"])
def test_one_scale_for_both(tmp_path, name):
    checkpoint = open_checkpoint(directory(tmp_path / "k", {name: torch.tensor([0.25])}, None))
    assert checkpoint.kv_scales(0) == (0.25, 0.25)
    assert checkpoint.kv_scales(1) is None


def test_specific_scales_win_and_one_serves_both(tmp_path):
    checkpoint = open_checkpoint(directory(tmp_path / "a", {
        f"{A}.kv_scale": torch.tensor(9.0), f"{A}.k_scale": torch.tensor(0.5), f"{A}.q_scale": torch.tensor(3.0),
        f"{A}.prob_output_scale": torch.tensor(3.0), "model.layers.1.self_attn.v_scale": torch.tensor(0.125)}, None))
    assert checkpoint.kv_scales(0) == (0.5, 9.0)
    assert checkpoint.kv_scales(1) == (0.125, 0.125)
    assert checkpoint.names() == []
    checkpoint.config["num_hidden_layers"] = 2
    with pytest.warns(UserWarning, match="layers 1 have only one of the K and V scales"):
        assert checkpoint.scales_for("fp8") == [(0.5, 9.0), (0.125, 0.125)]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_nonsense_scales_are_errors(tmp_path, value):
    tensors = {f"{A}.k_scale": torch.tensor(value), f"{A}.v_scale": torch.tensor(1.0)}
    checkpoint = open_checkpoint(directory(tmp_path / "a", tensors, None))
    with pytest.raises(ValueError, match="layer 0 has K scale"):
        checkpoint.kv_scales(0)


def test_affine_kv_is_refused(tmp_path):
    with pytest.raises(ValueError, match="affine"):
        open_checkpoint(directory(tmp_path / "a", {f"{A}.k_proj.k_bias": torch.ones(4)}, None))
    with pytest.raises(ValueError, match="affine"):
        open_checkpoint(directory(tmp_path / "b", {f"{A}.k_zero_point": torch.ones(1)}, None))
    assert open_checkpoint(directory(tmp_path / "c", {f"{A}.k_zero_point": torch.zeros(1)}, None)).names() == []


def test_ordinary_tensors_are_no_scales():
    for name in (f"{A}.k_proj.bias", f"{A}.k_proj.weight", f"{A}.k_norm.weight", f"{A}.k_proj.weight_scale",
                 f"{A}.k_proj.input_scale", "model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight_scale"):
        assert role_of(name) is None


@pytest.mark.parametrize(("config", "kv"), [
    ({"kv_cache_torch_dtype": "float8_e4m3fn"}, "fp8"), ({"kv_cache_dtype": "float8_e4m3fn"}, "fp8"),
    ({"kv_cache_dtype": "float8_e5m2"}, "fp8_e5m2"), ({"kv_cache_dtype": "auto"}, None), ({}, None),
    ({"kv_cache_torch_dtype": "float8_e4m3fn", "kv_cache_dtype": "fp8"}, "fp8"),
    ({"nybble": {"kv_cache": "int4"}}, "int4"),
])
def test_kv_type_of_the_config(tmp_path, config, kv):
    assert open_checkpoint(directory(tmp_path / "a", {f"{A}.kv_scale": torch.tensor(1.0)}, None, **config)).kv == kv


def test_kv_type_conflicts_and_warnings(tmp_path):
    scale = {f"{A}.kv_scale": torch.tensor(1.0)}
    both = {"kv_cache_torch_dtype": "float8_e4m3fn", "kv_cache_dtype": "float8_e5m2"}
    with pytest.raises(ValueError, match="both keys must agree"):
        _ = open_checkpoint(directory(tmp_path / "a", scale, None, **both)).kv
    with pytest.raises(ValueError, match="int5"):
        _ = open_checkpoint(directory(tmp_path / "b", scale, None, kv_cache_dtype="int5")).kv
    checkpoint = open_checkpoint(directory(tmp_path / "c", scale, None, kv_cache_dtype="fp8", num_hidden_layers=4))
    assert checkpoint.kv == "fp8"
    with pytest.warns(UserWarning, match="layers 1-3"):
        assert checkpoint.scales_for("fp8") == [(1.0, 1.0), None, None, None]
    with pytest.warns(UserWarning, match="fp8_e5m2 does not use them"):
        assert checkpoint.scales_for("fp8_e5m2") is None
    assert checkpoint.scales_for("int8") is None
    for heads, scale in ((4, torch.ones(2)), (4, torch.ones(2, 2)), (None, torch.ones(2, 2))):
        with pytest.raises(ValueError, match="wants one scale, or one per KV head"):
            open_checkpoint(directory(tmp_path / "d", {f"{A}.k_scale": scale}, None, num_key_value_heads=heads))


def test_fnuz_scales_are_widened(tmp_path):
    checkpoint = open_checkpoint(directory(tmp_path / "a", {f"{A}.kv_scale": torch.tensor(1.0)}, None,
                                           kv_cache_torch_dtype="float8_e4m3fnuz"))
    # A largest value of 240 * scale must stay within 448 * converted scale.
    assert checkpoint.kv_scales(0)[0] * 448 == pytest.approx(240.0)


def test_scales_for_fnuz_give_the_same_values():
    """A scale for e4m3fn, doubled, on fnuz: bit for bit the same values, saturated ones too (448 becomes 224 there)."""
    x = torch.cat((torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3, torch.tensor([13.44, -13.44, 20.0, 0.0])))
    scale = 13.44 / 448
    plain = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    doubled = scale * FNUZ_FACTORS["e4m3fn", "e4m3fnuz"]
    other = (x / doubled).clamp(-224, 224).to(torch.float8_e4m3fnuz).float() * doubled
    assert torch.equal(plain, other)


def test_kv_side_file(tmp_path):
    path = directory(tmp_path / "a", {"model.norm.weight": torch.ones(4)}, None)
    ranks = {"0": {"0": 0.5, "1": 0.25}, "1": {"0": 0.75, "1": 0.25}}
    (path / "kv_cache_scales.json").write_text(json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": ranks}}))
    assert (open_checkpoint(path).kv_scales(0), open_checkpoint(path).kv_scales(1)) == ((0.75, 0.75), (0.25, 0.25))
    (path / "kv_cache_scales.json").write_text("{}")
    with pytest.raises(ValueError, match="no scale file"):
        open_checkpoint(path)


@pytest.mark.parametrize(("block", "kv"), [
    ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8"), ({"kv_cache_scheme": "FP8"}, "fp8"),
    ({"kv_cache_quant_algo": "FP8"}, "fp8"), ({"kv_cache_quant_algo": None}, None),
    ({"kv_cache_quant_algo": "NVFP4"}, ValueError),
    ({"kv_cache_quant_algo": "INT8"}, ValueError),
])
def test_modelopt_kv(tmp_path, block, kv):
    tensors = {f"{M}.weight": fp8(), f"{M}.weight_scale": torch.ones(()), f"{M}.input_scale": torch.ones(())}
    checkpoint = open_checkpoint(directory(tmp_path / "m", tensors, {"quant_method": "modelopt", "quant_algo": "FP8"} | block))
    if kv is ValueError:
        with pytest.raises(ValueError, match="choose one"):
            _ = checkpoint.kv
    else:
        assert checkpoint.kv == kv


# ---- where the quantization is described ----------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "content", "method"), [
    ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, "gptq"),
    ("quant_config.json", {"wbits": 4, "group_size": -1}, "qqq"),
    ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
    ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ("quantize_config.json", {"quant_method": "awq", "bits": 4}, "awq"),
])
def test_side_configs(tmp_path, file, content, method):
    (tmp_path / file).write_text(json.dumps(content))
    assert find_quantization(tmp_path, {})["quant_method"] == method


def test_old_spellings(tmp_path):
    groups = {"config_groups": {"g": {}}}
    assert find_quantization(tmp_path, {"compression_config": groups})["quant_method"] == "compressed-tensors"
    assert find_quantization(tmp_path, {"quantization_config": groups | {"quant_algo": "FP8"}})["quant_method"] == "modelopt"
    assert find_quantization(tmp_path, {}) is None
    (tmp_path / "quant_config.json").write_text("{}")
    with pytest.raises(ValueError, match="does not say which"):
        find_quantization(tmp_path, {})


@needs_shared
@pytest.mark.parametrize(("model", "method"), [
    ("Qwen--Qwen3-32B-AWQ", "awq"), ("Qwen--Qwen3-32B-FP8", "fp8"), ("Qwen--Qwen3-32B-FP8-Static-PerTensor", "modelopt"),
    ("TheBloke--Genz-70b-GPTQ-3bit", "gptq"), ("nvidia--Llama-3.1-70B-Instruct-FP8", "modelopt"),
    ("meta-llama--Meta-Llama-3.1-8B", None),
])
def test_published_configs(model, method):
    path = SHARED / "data" / "quant_configs" / model
    if not path.is_dir():
        pytest.skip(f"{path} is not here")
    found = find_quantization(path, json.loads((path / "config.json").read_text()))
    assert (found["quant_method"] if found else None) == method
    if method == "modelopt":
        assert (found["quant_algo"], found["kv_cache_quant_algo"]) == ("FP8", "FP8")

"""Whole models in every weight format, from packers written here, against transformers with the decoded weights and hooks that
round activations as the format means."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint_foreign import AWQ_ORDER, gemv_fast_words, qqq_pack, swap_scales
from tiny import make_tiny, token_ids

from nybble.checkpoint import open_checkpoint
from nybble.models import load_model
from nybble.models.window import forward_window


def stream(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, count] -> int32 words, element i at bit bits * i of the row."""
    ones = (fields.numpy()[..., None].astype(np.int64) >> np.arange(bits)) & 1
    packed = np.packbits(ones.reshape(len(fields), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def draw(n, k, group, bits, symmetric, g):
    groups = k // group
    codes = torch.randint(0, 1 << bits, (n, k), generator=g)
    middle = 1 << (bits - 1)
    zero = torch.full((n, groups), middle) if symmetric else torch.randint(1, 1 << bits, (n, groups), generator=g)
    scale = ((torch.rand(n, groups, generator=g) + 0.5) * 4 / (1 << bits) / k**0.5).half()
    return codes, zero, scale


def expanded(codes, zero, scale, order):
    return (codes - zero[:, order]).double() * scale.double()[:, order]


def gptq_linear(n, k, g, bits=4, symmetric=True, group=32, version=1, ordered=False):
    group = group if group > 0 else k
    codes, zero, scale = draw(n, k, group, bits, symmetric, g)
    order = torch.arange(k) // group
    order = order[torch.randperm(k, generator=g)] if ordered else order
    tensors = {"qweight": stream(codes, bits).t(), "scales": scale.t(), "g_idx": order.int(),
               "qzeros": stream((zero.t() - (2 - version)) % (1 << bits), bits)}
    return tensors, expanded(codes, zero, scale, order)


def awq_linear(n, k, g, version="gemm", group=32):
    codes, zero, scale = draw(n, k, group, 4, False, g)
    columns = lambda rows: stream(rows.view(rows.shape[0], -1, 8)[..., list(AWQ_ORDER)].reshape(rows.shape), 4)  # noqa: E731
    pad = torch.nn.functional.pad
    if version == "gemm":
        tensors = {"qweight": columns(codes.t().contiguous()), "qzeros": columns(zero.t().contiguous()), "scales": scale.t()}
    elif version == "gemv":
        tensors = {"qweight": stream(codes, 4), "qzeros": stream(pad(zero, (0, 32 - k // group)), 4),
                   "scales": pad(scale, (0, 32 - k // group))}
    else:
        more = (0, 0, 0, 32 - k // group)
        tensors = {"qweight": gemv_fast_words(codes.numpy()), "scales": pad(scale.t(), more),
                   "qzeros": pad(-(zero.float() * scale.float()).half().t(), more)}
    return tensors, expanded(codes, zero, scale, torch.arange(k) // group)


def packed_linear(n, k, g, bits=4, symmetric=True, group=32, ordered=False):
    group = group if group > 0 else k
    codes, zero, scale = draw(n, k, group, bits, symmetric, g)
    order = torch.arange(k) // group
    order = order[torch.randperm(k, generator=g)] if ordered else order
    tensors = {"weight_packed": stream(codes, bits), "weight_scale": scale, "weight_shape": torch.tensor([n, k])}
    if not symmetric:
        tensors["weight_zero_point"] = stream(zero.t().contiguous(), bits).t()
    if ordered:
        tensors["weight_g_idx"] = order.int()
    return tensors, expanded(codes, zero, scale, order)


def whole_linear(n, k, g, bits=8, group=-1, zero=False):
    group = group if group > 0 else k
    codes, zeros, scale = draw(n, k, group, bits, not zero, g)
    middle = 1 << (bits - 1)
    tensors = {"weight": (codes - middle).to(torch.int8), "weight_scale": scale}
    if zero:
        tensors["weight_zero_point"] = (zeros - middle).to(torch.int8)
    return tensors, expanded(codes, zeros, scale, torch.arange(k) // group)


def qqq_linear(n, k, g, grouped=False):
    codes = torch.randint(-7, 8, (n, k), generator=g)
    over = (torch.rand(1, n, generator=g) + 0.5) * 0.25 / k**0.5
    if not grouped:
        return ({"B": qqq_pack((codes & 15).numpy(), False), "s_channel": swap_scales(over / 16, (4, 4, 2))},
                codes.double() * over.t().double())
    steps = (torch.rand(k // 128, n, generator=g) * 14 + 2).half()
    inner = torch.round(codes.view(n, -1, 128) * steps.t().float()[..., None]).clamp(-128, 127).view(n, k)
    return ({"B": qqq_pack((codes + 8).numpy(), True), "s_channel": swap_scales(over / 8, (4, 4, 2)),
             "s_group": swap_scales(steps, (8, 8))}, inner.double() * (over / 8).t().double())


def fp8_linear(n, k, g, scale="tensor", name="weight_scale", static=False, divide=False):
    weight = (torch.randn(n, k, generator=g) * 60).to(torch.float8_e4m3fn)
    shape = {"tensor": (), "row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[scale]
    factor = (torch.rand(shape, generator=g) + 0.5) / 60 / k**0.5
    wide = factor if scale != "block" else factor.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    tensors = {"weight": weight, name: 1 / factor.flatten() if divide else factor}
    if static:
        tensors["input_scale"] = torch.tensor(0.02)
    return tensors, weight.double() * wide.double()


def int8_rows(x):
    absmax = x.abs().amax(-1, keepdim=True).clamp_min(1e-10)
    return torch.round(x * (127 / absmax)).clamp(-127, 127) * (absmax / 127)


def fp8_rows(x, group=None):
    tiles = x.unflatten(-1, (-1, group or x.shape[-1]))
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def fp8_static(x):
    return (x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.02


def ct(form, act=None, **weights):
    group = {"targets": ["re:.*proj$"], "weights": {"num_bits": 4, "type": "int", "symmetric": True} | weights,
             "input_activations": act}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": True, "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
TOKEN8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FORMATS = {  # name: (packer, its options, quantization_config, rounding of activations)
    **{f"gptq {bits} bit {'sym' if sym else 'asym'} v{v}": (
        gptq_linear, {"bits": bits, "symmetric": sym, "version": v},
        GPTQ | {"bits": bits, "sym": sym, "checkpoint_format": "gptq" if v == 1 else "gptq_v2"}, None)
        for bits, sym, v in ((2, True, 1), (3, True, 2), (3, False, 1), (4, False, 2), (8, True, 1), (8, False, 1))},
    "gptq desc_act": (gptq_linear, {"ordered": True, "group": 64}, GPTQ | {"desc_act": True, "group_size": 64}, None),
    "gptq whole": (gptq_linear, {"group": -1}, GPTQ | {"group_size": -1}, None),
    **{f"awq {v}": (awq_linear, {"version": v}, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                                                 "version": v}, None) for v in ("gemm", "gemv", "gemv_fast")},
    "ct group": (packed_linear, {}, ct("pack-quantized", strategy="group", group_size=32), None),
    "ct asym": (packed_linear, {"symmetric": False},
                ct("pack-quantized", strategy="group", group_size=32, symmetric=False), None),
    "ct actorder": (packed_linear, {"ordered": True},
                    ct("pack-quantized", strategy="group", group_size=32, actorder="group"), None),
    "ct channel": (packed_linear, {"group": -1}, ct("pack-quantized", strategy="channel"), None),
    "ct 8 bit": (packed_linear, {"bits": 8, "group": -1}, ct("pack-quantized", strategy="channel", num_bits=8), None),
    "ct 3 bit asym": (packed_linear, {"bits": 3, "symmetric": False},
                      ct("pack-quantized", strategy="group", group_size=32, num_bits=3, symmetric=False), None),
    "ct w8a8": (whole_linear, {}, ct("int-quantized", TOKEN8, strategy="channel", num_bits=8), int8_rows),
    "ct w8a8 asym weights": (whole_linear, {"zero": True},
                             ct("int-quantized", TOKEN8, strategy="channel", num_bits=8, symmetric=False), int8_rows),
    "ct w4a8": (whole_linear, {"bits": 4, "group": 32},
                ct("int-quantized", TOKEN8, strategy="group", group_size=32), int8_rows),
    "ct w4a8 packed": (packed_linear, {}, ct("pack-quantized", TOKEN8, strategy="group", group_size=32), int8_rows),
    "ct w4a8 asym": (packed_linear, {"symmetric": False},
                     ct("pack-quantized", TOKEN8, strategy="group", group_size=32, symmetric=False), int8_rows),
    "ct fp8": (fp8_linear, {"scale": "row"}, ct("float-quantized", TOKEN8 | {"type": "float"}, strategy="channel", num_bits=8,
                                                type="float"), fp8_rows),
    "ct fp8 weights": (fp8_linear, {}, ct("naive-quantized", strategy="tensor", num_bits=8, type="float"), None),
    "qqq channel": (qqq_linear, {}, {"quant_method": "qqq", "wbits": 4, "group_size": -1}, int8_rows),
    "qqq groups": (qqq_linear, {"grouped": True}, {"quant_method": "qqq", "bits": 4, "group_size": 128, "sym": True},
                   int8_rows),
    "fp8 dynamic": (fp8_linear, {}, {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8_rows),
    "fp8 static": (fp8_linear, {"static": True}, {"quant_method": "fp8", "activation_scheme": "static"}, fp8_static),
    "fp8 blocks": (fp8_linear, {"scale": "block", "name": "weight_scale_inv"},
                   {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
                   lambda x: fp8_rows(x, 128)),
    "fp8 gptqmodel": (fp8_linear, {"scale": "row", "name": "weight_scale_inv", "divide": True},
                      {"quant_method": "fp8", "weight_scale_method": "row", "weight_scale_semantics": "inverse"}, None),
    "fbgemm": (fp8_linear, {"scale": "row"}, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_rows),
    "modelopt": (fp8_linear, {"static": True}, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
                 fp8_static),
    "quark": (fp8_linear, {"static": True}, {"quant_method": "quark", "exclude": ["lm_head"], "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
        "input_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}}, fp8_static),
}


@pytest.mark.parametrize("name", FORMATS)
def test_logits_of_whole_models(tmp_path, name):
    packer, options, quantization, rounding = FORMATS[name]
    model = make_tiny(tmp_path / "m", "qwen2" if name in ("qqq groups", "gptq desc_act") else "llama", use_sliding_window=False,
                      hidden_size=256, intermediate_size=512)
    tensors, g = load_file(tmp_path / "m" / "model.safetensors"), torch.Generator().manual_seed(0)
    for module, linear in model.named_modules():
        if not isinstance(linear, torch.nn.Linear) or module == "lm_head":
            continue
        del tensors[f"{module}.weight"]
        parts, dense = packer(*linear.weight.shape, g, **options)
        tensors |= {f"{module}.{last}": tensor.contiguous() for last, tensor in parts.items()}
        linear.weight.data = dense.float()
        if rounding is not None:
            linear.register_forward_pre_hook(lambda _, inputs: (rounding(inputs[0]),))
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    ids = token_ids(2, 16)
    checkpoint = open_checkpoint(tmp_path / "m")
    ours = forward_window(load_model(checkpoint, "cpu"), ids, "fp32")
    with torch.no_grad():
        theirs = model(ids).logits
    error = (ours - theirs).double()
    if rounding is None:
        assert float(error.abs().max()) <= 2e-4 * float(theirs.std())
    else:  # a value on the edge between two codes may fall to either side, and does so visibly in the tokens after it
        assert float(error.square().mean().sqrt()) <= 0.02 * float(theirs.std())
        assert float(error.abs().median()) <= 1e-3 * float(theirs.std())

"""Fused ops and paged attention against `kernels.reference` in Triton's interpreter, and compiled for every GPU we name.

The interpreter is chosen when a kernel is decorated, so this file runs itself once more in a process that has it on. There
the PTX tricks are replaced by plain conversions; `tests/gpu/test_ops_gpu.py` covers those.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sass
import torch
from ops_cases import attention_case, make_step, poisoned_cache
from sass import TARGETS

from nybble.formats.numerics import quantize_rows
from nybble.kernels import reference
from nybble.kernels.types import Turn

triton = pytest.importorskip("triton")

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
inside = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")
outside = pytest.mark.skipif(INTERPRETING, reason="about the compiled mode")
# The interpreter has no bf16 dots; on CPU the cache of a 16-bit model is fp16 or fp32 here.
KINDS = ("fp32", "fp16", "int8", "int4", "fp8", "fp8_e5m2")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@outside
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


# ---- element-wise -------------------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("width", [8, 80, 1000])
def test_quantize_rows_is_the_vocabulary_bit_for_bit(width: int) -> None:
    from nybble.kernels.ops_triton import quantize_rows as kernel

    x = randn(5, width) * torch.tensor([1.0, 1e-3, 300.0, 0.0, 1.0])[:, None]
    x[4] = torch.arange(width) - width // 2 + 0.5  # many ties
    codes, scale = quantize_rows(x)
    got = kernel(x)
    assert torch.equal(got.codes, codes)
    assert torch.equal(got.scale, scale)
    assert got.codes[3].abs().max() == 0
    assert got.scale[3] > 0


@inside
@pytest.mark.parametrize(("width", "with_residual", "quantize"), [(80, True, True), (80, False, False), (1000, True, False)])
def test_rms_norm(width: int, with_residual: bool, quantize: bool) -> None:
    from nybble.kernels.ops_triton import rms_norm

    x, residual, weight = randn(4, width), randn(4, width, seed=1), randn(width, seed=2)
    residual = residual if with_residual else None
    out, h = rms_norm(x, weight, 1e-5, residual, quantize)
    wide = (x if residual is None else x + residual).double()
    exact = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(h, wide.float())
    if quantize:
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert ((out.codes * out.scale[:, None] - exact).abs() <= step * 0.501).all()
    else:
        torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-6)


@inside
@pytest.mark.parametrize("quantize", [True, False])
def test_silu_mul(quantize: bool) -> None:
    from nybble.kernels.ops_triton import silu_mul

    x = randn(3, 2 * 1100) * 4
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + (-gate).exp()) * up
    out = silu_mul(x, quantize)
    if quantize:
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert ((out.codes * out.scale[:, None] - exact).abs() <= step * 0.501).all()
    else:
        torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-6)


@inside
@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("width", "block"), [(24, 8), (96, 32), (384, 128), (1536, 512), (2048, 2048)])
def test_silu_mul_turned_by_hadamard_s_matrix(width: int, block: int, quantize: bool) -> None:
    from nybble.kernels.ops_triton import silu_mul

    x = randn(3, 2 * width) * 4
    gate, up = x.double().chunk(2, -1)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:  # Sylvester: [[H, H], [H, -H]]
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    exact = ((gate / (1 + (-gate).exp()) * up).view(3, -1, block) @ matrix / block**0.5).view(3, width)
    out = silu_mul(x, quantize, hadamard=block)
    if quantize:
        step = exact.abs().amax(-1, keepdim=True) / 127
        assert ((out.codes * out.scale[:, None] - exact).abs() <= step * 0.501).all()
    else:
        torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)


@inside
@pytest.mark.parametrize("block", [3, 16, 32768])
def test_hadamard_blocks_that_do_not_fit_are_refused(block: int) -> None:
    from nybble.kernels.ops_triton import silu_mul

    with pytest.raises(ValueError, match=f"Hadamard block of {block} for 24 channels"):
        silu_mul(randn(1, 48), True, hadamard=block)


@outside
@pytest.mark.parametrize("width", [8, 96, 576, 1536, 4096, 5120, 11008, 13824, 14336, 18944, 28672, 53248])
def test_a_row_s_programs_on_hopper_cover_it_and_no_more(width: int) -> None:
    from nybble.kernels import ops_hopper as ops

    cases = [(op, 0, rows) for op in (ops.PLAIN, ops.NORM, ops.SILU) for rows in (1, 64)]
    cases += [(ops.SILU, 1 << i, 64) for i in range(1, 14) if width % (1 << i) == 0]
    for op, hadamard, rows in cases:
        threads, vectors, cluster = ops.shape_for(op, width, hadamard, rows)
        assert threads % max(32, hadamard // 8) == 0  # neighbours that are turned together are neighbours in a program
        assert cluster == 1 or threads * cluster <= 1024  # partial results of a row: one for each lane of a warp
        assert (vectors - 1) * threads * cluster * 8 < width <= vectors * threads * cluster * 8


@outside
def test_the_norm_of_a_model_is_hoppers_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    from nybble.kernels import ops_hopper as ops
    from nybble.models import load

    asked: list[tuple] = []
    monkeypatch.setattr(ops, "_run", lambda *arguments: asked.append(arguments))
    x = randn(2, 64).to(torch.bfloat16)
    weight = load._read_vector({"norm": torch.ones(64, dtype=torch.bfloat16)}, "norm", 64, x.device)
    ops.rms_norm(x, weight, 1e-5, x, True)
    assert len(asked) == 1


@inside
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_a_number_reaches_the_scale_of_its_row(bad: float) -> None:
    """Else a request that overflowed would go on with zeros where it should end with an error."""
    from nybble.kernels.ops_triton import quantize_rows, rms_norm, silu_mul

    x = randn(3, 160)
    x[1, 77] = bad
    found = [rms_norm(x, torch.ones(160), 1e-5, None, True)[0], quantize_rows(x)]
    x[1, 77], x[1, 90] = 1.0, bad  # the up half: silu(inf) * 0 would be NaN anyway
    for rows in (*found, silu_mul(x, True), silu_mul(x, True, hadamard=16)):
        assert not rows.scale[1].isfinite()
        assert rows.scale[[0, 2]].isfinite().all()


@inside
@pytest.mark.parametrize("name", KINDS)
def test_a_nan_reaches_the_cache(name: str) -> None:
    from nybble.kernels.ops_triton import rope_write

    step, kv = make_step([3], [3], 16, 2), poisoned_cache(name, 2, 1, 16, 24)
    qkv = randn(3, 3 * 24)
    qkv[1] = float("nan")
    rope_write(qkv, kv, step, torch.ones(8, 24), 1, None, None, 1e-6)
    for values in reference.gather_kv(kv, step.block_table[0, :1].long(), 3):
        assert values[:, 1].isnan().all()
        assert values[:, [0, 2]].isfinite().all()


# ---- RoPE and the cache write -------------------------------------------------------------------------------------


@inside
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary", "normed"), [(4, 2, 32, 32, True), (3, 3, 24, 8, False)])
def test_rope_write(name: str, heads: int, kv_heads: int, dim: int, rotary: int, normed: bool) -> None:
    from nybble.kernels.ops_triton import rope_write

    step = make_step([5, 20], [1, 7], 16, 6)
    step.slots[3] = -1
    qkv = randn(8, (heads + 2 * kv_heads) * dim)
    qkv[1, (heads + kv_heads) * dim : (heads + kv_heads + 1) * dim] = 0.5  # a constant V: scale 0
    angle = torch.arange(32)[:, None] / 10 ** torch.linspace(0, 2, rotary // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    norms = (randn(dim, seed=3), randn(dim, seed=4)) if normed else (None, None)
    caches = [poisoned_cache(name, 6, kv_heads, 16, dim, k_scale=0.02, v_scale=0.013) for _ in range(2)]
    want = reference.rope_write(qkv, caches[0], step, cos_sin, kv_heads, *norms, 1e-6)
    got = rope_write(qkv, caches[1], step, cos_sin, kv_heads, *norms, 1e-6)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    for part in ("k", "v"):
        a, b = (getattr(c, part) for c in caches)
        if a.element_size() == 1:  # a last bit of sin or of the norm may turn a rounding; nothing else may differ
            a, b = a.view(torch.uint8).int(), b.view(torch.uint8).int()
            if name == "int4":
                a, b = torch.cat((a & 15, a >> 4), -1), torch.cat((b & 15, b >> 4), -1)
            assert (a - b).abs().max() <= 1
            assert (a != b).float().mean() < 2e-3
        else:
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-6, equal_nan=True)
        if caches[0].k_params is not None:
            a, b = (getattr(c, f"{part}_params") for c in caches)
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)


@inside
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary", "normed"), [(4, 2, 32, 32, True), (3, 1, 80, 64, False)])
def test_turned_rope_write(name: str, heads: int, kv_heads: int, dim: int, rotary: int, normed: bool) -> None:
    from nybble.kernels.ops_triton import rope_write, turn_heads

    step = make_step([5, 40], [1, 36], 16, 6)
    step.slots[3] = -1
    qkv = randn(37, (heads + 2 * kv_heads) * dim)
    angle = torch.arange(48)[:, None] / 10 ** torch.linspace(0, 2, rotary // 2)
    cos_sin = torch.cat((angle.cos(), angle.sin()), -1)
    norms = (randn(dim, seed=3), randn(dim, seed=4)) if normed else (None, None)
    k, q, v, out = (randn(kv_heads, dim, dim, seed=5 + i) / dim**0.5 for i in range(4))
    turn = Turn(k, q, randn(kv_heads, dim, seed=9), *((v, out) if name == "int4" else ()))
    caches = [poisoned_cache(name, 6, kv_heads, 16, dim, k_scale=0.02, v_scale=0.013) for _ in range(2)]
    want = reference.rope_write(qkv, caches[0], step, cos_sin, kv_heads, *norms, 1e-6, turn)
    got = rope_write(qkv, caches[1], step, cos_sin, kv_heads, *norms, 1e-6, turn)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(turn_heads(got, out), reference.turn_heads(want, out), rtol=1e-5, atol=1e-5)
    for a, b in zip(*((*reference.gather_kv(c, step.block_table[1].long()[:3], 40),) for c in caches)):
        written = ~b.isnan()
        assert torch.equal(written, ~a.isnan())
        room = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.05, "int4": 0.8, "fp8": 0.5, "fp8_e5m2": 1.0}[name]  # a code at most
        assert (a - b)[written].abs().max() <= room
        assert ((a - b)[written].abs() > 1e-2).float().mean() <= 2e-3


@inside
@pytest.mark.parametrize(("name", "limit"), [("fp8", 448), ("fp8_e5m2", 57344)])
def test_float8_bytes_are_torch_s(name: str, limit: float) -> None:
    from nybble.kernels.ops_triton import rope_write

    exponent = torch.linspace(-24, 20, 1600).exp2()
    v = torch.cat((exponent, -exponent, torch.arange(-400, 400) / 1024)).view(-1, 160)
    tokens = v.shape[0]
    step = make_step([tokens], [tokens], 16, tokens // 16 + 2)
    cache = poisoned_cache(name, tokens // 16 + 2, 1, 16, 160)
    qkv = torch.cat((torch.zeros(tokens, 320), v), -1)
    cos_sin = torch.cat((torch.ones(tokens, 80), torch.zeros(tokens, 80)), -1)
    rope_write(qkv, cache, step, cos_sin, 1, None, None, 1e-6)
    stored = cache.v.view(torch.uint8)[step.slots // 16, 0, step.slots % 16]
    assert torch.equal(stored, v.clamp(-limit, limit).to(cache.v.dtype).view(torch.uint8))


# ---- attention ----------------------------------------------------------------------------------------------------


def check_attention(name: str, *case: Any, window: int = 0, **more: Any) -> None:
    from nybble.kernels.attention_triton import attention

    q, kv, step = attention_case(name, *case, **more)
    want = reference.attention(q, kv, step, 0.2, window)
    got = attention(q, kv, step, 0.2, window)
    assert torch.isfinite(got).all()  # unused blocks hold NaN
    tolerance = 1e-5 if name == "fp32" else 2e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@inside
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(2, 2, 32), (6, 2, 40)])
def test_attention_of_a_mixed_batch(name: str, heads: int, kv_heads: int, dim: int) -> None:
    check_attention(name, [1, 300, 40, 9], [1, 1, 21, 9], heads, kv_heads, dim, 16)


@inside
@pytest.mark.parametrize("name", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_attention_window(name: str, kv_heads: int) -> None:
    check_attention(name, [300, 20, 150], [1, 1, 90], 2, kv_heads, 16, 64, window=37)


@inside
@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("window", [0, 700])
def test_many_splits_are_summed_in_groups(name: str, window: int) -> None:
    from nybble.kernels.attention_triton import Tiles, decode

    q, kv, step = attention_case(name, [1100, 130, 600], [1] * 3, 2, 1, 16, 32)
    want, tiles = reference.attention(q, kv, step, 0.2, window), Tiles(16, 1, 1, split=16, levels=0)  # 69 splits
    for programs in (1, 5, 69):
        out = torch.full_like(q, float("nan"))
        decode(q, kv, step, 0.2, window, out, tiles, programs)
        torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)


@inside
@pytest.mark.parametrize(("name", "group"), [("int8", 1), ("fp16", 1), ("int8", 2)])
def test_sharing_a_row_among_programs_moves_no_bit(name: str, group: int) -> None:
    from nybble.kernels.attention_triton import decode

    q, kv, step = attention_case(name, [3, 770], [1] * 2, group, 1, 16, 32)
    outs = []
    for programs in (1, 2, 3, 7):
        outs.append(torch.full_like(q, float("nan")))
        decode(q, kv, step, 0.3, 0, outs[-1], programs=programs)
    assert all(torch.equal(out, outs[0]) for out in outs)


@outside
def test_splits_are_cut_at_fixed_positions() -> None:
    from nybble.kernels.attention_triton import Tiles, split_count

    for split, sizes in ((64, [64] * 8 + [128] * 4 + [256] * 4 + [512] * 4 + [1024] * 40), (128, [128] * 8 + [256] * 40)):
        tiles = Tiles(32, 1, 1, split, levels=4 if split == 64 else 1)
        for count in range(len(sizes)):
            end = sum(sizes[:count])
            assert split_count(end, tiles) == count
            assert split_count(end + 1, tiles) == count + 1


@inside
@pytest.mark.parametrize("room", [0, 2, 7])
def test_context_that_does_not_fit_the_scratch_is_done_in_slices(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nybble.kernels import attention_triton as kernels

    q, kv, step = attention_case("int8", [130, 40, 90], [30, 9, 90], 6, 3, 16, 32)
    whole = kernels.attention(q, kv, step, 0.2, 0)
    monkeypatch.setattr(kernels, "_SCRATCH_BYTES", room * 256 * 16 * 2 * 2)  # so many (row, KV head) pairs
    assert torch.equal(kernels.attention(q, kv, step, 0.2, 0), whole)


@inside
def test_more_rows_than_a_grid_holds_are_done_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has 65535 of all but the first axis."""
    from nybble.kernels import attention_triton as kernels

    q, kv, step = attention_case("int8", [70, 9, 21, 30], [1, 1, 9, 21], 2, 1, 16, 32)
    whole = kernels.attention(q, kv, step, 0.2, 0)
    monkeypatch.setattr(kernels, "_MOST_ROWS", 1)
    rows = set()

    def launch(kernel: Any, grid: tuple[int, int, int], *arguments: Any, **options: Any) -> None:
        rows.add(grid[1 if kernel in (kernels._decode, kernels._combine) else 2])
        kernel[grid](*arguments, **options)

    for programs in (None, 1):  # splits summed in memory, and in registers
        out = torch.empty_like(q)
        kernels.decode(q, kv, step, 0.2, 0, out, programs=programs, launch=launch)
        kernels.prompt(q, kv, step, 0.2, 0, out, launch=launch)
        assert torch.equal(out, whole)
    assert rows == {1}


@outside
def test_positions_times_programs_fit_32_bits() -> None:
    from nybble.kernels import attention_triton as kernels

    launched: list[tuple[int, int, int]] = []
    for context in (1 << 20, 1 << 22, 10_000_000):
        q, kv, step = attention_case("int8", [5], [1], 1, 1, 32, 16)
        step = replace(step, max_context=context)
        kernels.decode(q, kv, step, 0.2, 0, torch.empty_like(q), launch=lambda _, grid, *a, **o: launched.append(grid))
        assert 1 < launched[-2][2] < (1 << 31) / context


@inside
@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_a_block_table_may_be_part_of_a_wider_one(name: str) -> None:
    from nybble.kernels.attention_triton import attention

    q, kv, step = attention_case(name, [70, 40, 90], [1, 1, 30], 2, 1, 16, 16)
    wider = torch.cat((step.block_table, torch.full_like(step.block_table, 1 << 20)), 1)
    part = replace(step, block_table=wider[:, : step.block_table.shape[1]])
    assert torch.equal(attention(q, kv, part, 0.2, 0), attention(q, kv, step, 0.2, 0))


@inside
def test_padding_rows_give_zeros() -> None:
    from nybble.kernels.attention_triton import attention

    q, kv, step = attention_case("int8", [5, 0], [1, 1], 2, 1, 16, 16)
    assert attention(q, kv, step, 0.2, 0)[1].abs().max() == 0


@inside
def test_shapes_that_do_not_fit_are_refused() -> None:
    from nybble.kernels.attention_triton import attention

    q, kv, step = attention_case("int8", [5], [1], 2, 1, 16, 16)
    with pytest.raises(ValueError, match="do not fit"):
        attention(q[..., :8], kv, step, 0.2, 0)
    with pytest.raises(ValueError, match="contiguous"):
        attention(q, replace(kv, v=torch.cat((kv.v, kv.v), 2)[:, :, ::2]), step, 0.2, 0)


# ---- compilation ----------------------------------------------------------------------------------------------------

def compile_for(target: str, kernel: Any, pointers: list[str], constants: dict[str, Any], warps: int) -> Any:
    """Compile `kernel`: its first parameters are `pointers`, `*_scale` and `eps` are fp32, other run-time ones int32."""
    types = {name: "fp32" for name in kernel.arg_names if name.endswith("_scale") or name == "eps"}
    return sass.compile_for(target, kernel, types | dict(zip(kernel.arg_names, pointers)), constants, num_warps=warps)


def compile_attention(target: str, form: str, kind: str, dim: int = 128, sets: int = 1) -> Any:
    """form: decode (four query heads to a KV head) | prompt | gather, as `decode_tiles` and `prompt_tiles` cut them."""
    from nybble.kernels import attention_triton as kernels

    whole = kind == "copy"
    units = dim if whole else dim // (4 if kind == "int4" else 2)
    shape = {"HEADS": 8, "DIM": dim}
    if form == "prompt":
        lines, tiles = kernels.prompt_tiles(dim, 2, 101376)
        constants = shape | {"GROUP": 4, "LANES": triton.next_power_of_2(dim), "WINDOWED": False, "TILE": tiles.tile,
                             "ROWS": lines, "STAGES": tiles.stages}
        pointers = ["*bf16", "*fp16", "*fp16", "*i32", "*i32", "*bf16"]
        return compile_for(target, kernels._prompt, pointers, constants, tiles.warps)
    shape |= {"KIND": kind, "SETS": sets, "BLOCK_SIZE": 64}
    cache = "*bf16" if whole else "*u8" if form == "gather" else "*i16"
    caches = [cache, cache, *(["*i32"] * 2 if kind in ("int8", "int4") else [cache] * 2), "*i32", "*i32"]
    if form == "gather":
        scratch = "*bf16" if whole else "*fp16"
        constants = shape | {"LANES": triton.next_power_of_2(dim), "TILE": kernels.GATHER_TILE}
        return compile_for(target, kernels._gather, [*caches, "*i32", scratch, scratch], constants, 8)
    tiles, early = kernels.decode_tiles(dim, 16 if whole else 4 if kind == "int4" else 8), target in ("sm_90", "sm_100")
    constants = shape | {"GROUP": 4, "UNITS": units, "LANES": max(16, triton.next_power_of_2(units)), "ASM": target != "gfx942",
                         "SPLIT": tiles.split, "LEVELS": tiles.levels, "TILE": tiles.tile, "STAGES": tiles.stages,
                         "DIRECT": False, "ROWS": 16 if target == "gfx942" else 8, "PDL": early}
    return compile_for(target, kernels._decode, ["*bf16", *caches, "*bf16", "*fp32", "*fp32"], constants, tiles.warps)


@outside
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", ["decode", "prompt", "gather"])
def test_attention_compiles(target: str, form: str) -> None:
    code = compile_attention(target, form, "int8", 64).asm
    matrix = r"v_mfma_f32" if target == "gfx942" else r"wgmma|mma\.sync|tcgen05\.mma"
    assert bool(re.search(matrix, code.get("ptx") or code["amdgcn"])) == (form != "gather")


@outside
@pytest.mark.parametrize("target", TARGETS)
def test_rope_write_and_norm_compile(target: str) -> None:
    from nybble.kernels import ops_triton as ops

    early = target.startswith("sm_") and int(target[3:]) >= 90
    compile_for(target, ops._rms_norm_kernel, ["*bf16", "*bf16", "*bf16", "*bf16", "*i8", "*fp32"],
                {"WIDTH": 5120, "CHUNK": 1024, "RESIDUAL": True, "QUANTIZE": True, "PDL": early}, 4)
    for hadamard in (0, 512):
        compile_for(target, ops._silu_mul_kernel, ["*bf16", "*i8", "*fp32"],
                    {"WIDTH": 13824, "CHUNK": 4096, "QUANTIZE": True, "HADAMARD": hadamard, "ROOT": 0.04,
                     "ASM": target.startswith("sm_"), "PDL": early}, 16)
    for kind in ("int4", "int8", "fp8"):
        constants = {"HEADS": 8, "KV_HEADS": 2, "DIM": 128, "HALF": 64, "QUARTER": 32, "ROTARY": 128, "BLOCK_SIZE": 64,
                     "KIND": kind, "Q_NORM": True, "K_NORM": True, "PDL": early}
        cache = "*i16" if kind == "int4" else "*u8"
        pointers = ["*bf16", "*bf16", cache, cache, "*fp16", "*fp16", "*i32", "*i64", "*fp32", "*bf16", "*bf16"]
        compile_for(target, ops._rope_write_kernel, pointers, constants | {"GROUP": 8}, 2)
        turn = ["fp32", "fp32", "fp32", "*fp16", "*fp16", "*fp16", "*fp32", "i32"]
        compile_for(target, ops._turn_write_kernel, pointers + turn, constants | {"ROWS": 32, "V_TURN": kind == "int4"}, 4)


@outside
@pytest.mark.parametrize("kind", ["int8", "int4", "copy", "fp8"])
def test_hopper_decode_loads_wide_and_converts_without_the_conversion_unit(kind: str, tmp_path: Path) -> None:
    compiled = compile_attention("sm_90", "decode", kind)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    assert sass.local_bytes(cubin) == 0
    counts = Counter(re.findall(r"^(?:@!?U?P\w+ )?([A-Z0-9_.]+)", "\n".join(sass.disassemble(cubin)), re.M))
    assert not [name for name in counts if re.match(r"I2F(?!\.RP)|LDS\.U|LDG\.E\.U8$", name)]  # RP: integer division, twice
    assert counts["LDGSTS.E.BYPASS.128"] >= 8
    tile = (64 if kind == "int4" else 32) * 128 * 2 // 32  # codes of K and V a thread holds
    assert counts["HMMA.16816.F32" + (".BF16" if kind == "copy" else "")] == tile // 8  # eight queries an instruction
    assert counts["LDSM.16.MT88.4"] >= 4  # V is transposed on its way to the registers

"""Every linear compiles for every GPU we name, without a GPU, and uses its integer (or 16-bit) matrix instructions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sass
from sass import TARGETS

pytest.importorskip("triton")

from nybble.kernels import linear_triton  # noqa: E402
from nybble.kernels.linear_triton import Tile  # noqa: E402

SMALL = Tile(64, 64, 128, 1, 3, 4)
POINTERS = {"X": "*i8", "XS": "*fp32", "W": "*i8", "WS": "*fp32", "WZ": "*bf16", "WR": "*bf16", "Y": "*bf16",
            "partials": "*i32", "arrivals": "*i32"}  # fmt: skip


def compile_for(target: str, kernel: Any, tile: Tile, types: dict[str, str] | None = None, **flags: Any) -> Any:
    constants = {"BN": tile.BN, "BM": tile.BM, "BK": tile.BK, "SPLIT": tile.split, "ORDER": tile.order, "STAGES": tile.stages}
    cuda = target.startswith("sm_")
    constants |= {"EVEN": True, "PDL": cuda and int(target[3:]) >= 90, "SEGMENTS": 1, "ASM": cuda} | flags
    return sass.compile_for(target, kernel, POINTERS | (types or {}), constants, ("N", "K", "KP", "NP"), num_warps=tile.warps,
                            num_stages=tile.stages)


def assembly(target: str) -> dict[str, str]:
    low, high = (linear_triton.float_assembly(False, high) if target.startswith("sm_") else "" for high in (False, True))
    return {"ASM_LO": low, "ASM_HI": high}


def instructions(compiled: Any) -> str:
    return compiled.asm.get("ptx") or compiled.asm["amdgcn"]


INTEGER = {"sm_90": r"wgmma\.mma_async\S*\.s32\.s8\.s8", "gfx942": r"v_mfma_i32_\S*i8"}
FLOAT = {"sm_90": r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", "gfx942": r"v_mfma_f32_\S*bf16"}


@pytest.mark.parametrize("name", TARGETS)
def test_int4_and_int8_per_channel(name: str) -> None:
    for bits in (4, 8):
        compiled = compile_for(name, linear_triton.plain_linear, SMALL, BITS=bits)
        assert re.search(INTEGER.get(name, r"mma\.sync\S*\.s32\.s8\.s8\.s32|tcgen05\.mma\S*kind::i8"), instructions(compiled))


@pytest.mark.parametrize("name", TARGETS)
def test_int4_groups(name: str) -> None:
    flags = assembly(name) | {"GROUP": 64, "SEGMENTS": 4, "ZERO": False}
    compiled = compile_for(name, linear_triton.group_linear, SMALL, {"partials": "*fp32"}, **flags)
    assert re.search(INTEGER.get(name, r"mma\.sync\S*\.s32\.s8\.s8\.s32|tcgen05\.mma\S*kind::i8"), instructions(compiled))


@pytest.mark.parametrize("name", TARGETS)
def test_w4a16(name: str) -> None:
    types = {"X": "*bf16", "WS": "*bf16", "partials": "*fp32"}
    flags = assembly(name) | {"GROUP": 128, "ZERO": True}
    compiled = compile_for(name, linear_triton.group_linear, SMALL, types, **flags)
    pattern = r"tcgen05\.mma\S*|mma\.sync\S*\.f32\.bf16\.bf16\.f32"
    assert re.search(FLOAT.get(name, pattern), instructions(compiled))


@pytest.mark.parametrize("name", TARGETS)
def test_logits(name: str) -> None:
    types = {"X": "*bf16", "W": "*bf16", "Y": "*fp32"}
    compiled = compile_for(name, linear_triton.plain_linear, Tile(64, 64, 64, 1, 3, 4), types, BITS=16)
    pattern = r"tcgen05\.mma\S*|mma\.sync\S*\.f32\.bf16\.bf16\.f32"
    assert re.search(FLOAT.get(name, pattern), instructions(compiled))


def rows_in_use() -> list[linear_triton.Row]:
    seen = {(row.kind, row.tile): row for row in linear_triton.TILES["hopper"]}
    return [row for row in seen.values() if row.kind in ("int4", "group")]


@pytest.mark.parametrize("row", rows_in_use(), ids=lambda row: f"{row.kind}-{'x'.join(map(str, row.tile))}")
def test_hopper_tiles_keep_weights_in_registers_and_spill_nothing(row: linear_triton.Row, tmp_path: Path) -> None:
    tile = row.tile._replace(split=row.tile.split or 4)
    if row.kind == "int4":
        compiled = compile_for("sm_90", linear_triton.plain_linear, tile, BITS=4)
    else:
        types = {"partials": "*fp32", "WS": "*bf16"}
        flags = assembly("sm_90") | {"GROUP": 128, "SEGMENTS": 4, "ZERO": False}
        compiled = compile_for("sm_90", linear_triton.group_linear, tile, types, **flags)
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    assert sass.local_bytes(tmp_path / "kernel.cubin") == 0
    # a register operand is a brace list of four, a shared-memory one a 64-bit descriptor
    products = re.findall(r"wgmma\.mma_async\S+\s+\{[^}]*\},\s*(\S)", instructions(compiled))
    assert products
    assert set(products) == {"{"}
    assert compiled.metadata.shared <= 227 * 1024

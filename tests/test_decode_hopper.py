"""Attention of generated tokens on Hopper, without one: which steps fit, the room of a program, machine code without spills."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ops_cases import attention_case
from sass import SPILL, assemble

from nybble.kernels import decode_hopper
from nybble.kernels.nvrtc import MOST_BYTES
from nybble.kernels.reference import OPS
from nybble.nn.attention import Attention


def asked(name: str, heads: int, kv_heads: int, dim: int = 128, block_size: int = 64, context: int = 300):
    _, kv, step = attention_case(name, [context], [1], heads, kv_heads, dim, block_size, dtype=torch.bfloat16)
    return torch.zeros(1, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16), heads, kv, step


@pytest.mark.parametrize(
    ("change", "fits"),
    [({}, True), ({"name": "int4"}, True), ({"name": "bf16"}, False), ({"name": "fp8"}, False), ({"dim": 64}, False),
     ({"block_size": 16}, False), ({"block_size": 32}, True), ({"name": "int4", "block_size": 32}, False),
     ({"heads": 18}, False), ({"heads": 16}, True), ({"context": 400}, True), ({"context": 2048}, False),
     ({"context": 1024, "heads": 40, "kv_heads": 40}, True), ({"context": 1100, "heads": 40, "kv_heads": 40}, False)],
)
def test_which_steps_fit(change: dict, fits: bool) -> None:
    x, heads, kv, step = asked(**{"name": "int8", "heads": 4, "kv_heads": 2} | change)
    assert decode_hopper.fits(x, heads, kv, step, 128, 0) is fits


def test_windows_partial_rotation_and_other_types_do_not_fit() -> None:
    x, heads, kv, step = asked("int8", 4, 2)
    assert not decode_hopper.fits(x, heads, kv, step, 128, 100)
    assert not decode_hopper.fits(x, heads, kv, step, 64, 0)
    assert not decode_hopper.fits(x.float(), heads, kv, step, 128, 0)
    assert not decode_hopper.fits(x, heads, kv, replace(step, num_decode=0), 128, 0)
    many = replace(step, num_decode=4000)
    assert decode_hopper.fits(x, heads, kv, many, 128, 0)
    x, heads, kv, step = asked("int4", 4, 2)
    many = replace(step, num_decode=4000)
    assert not decode_hopper.fits(x, heads, kv, many, 128, 0)
    assert decode_hopper.fits(x.view(1, -1, 128), heads, kv, many, 128, 0)  # queries alone


def test_rows_that_see_each_others_keys_of_this_step_are_not_attended_at_once() -> None:
    """A preempted request computes its generated tokens again as rows of one step: each sees those before it, which one kernel
    for all would only be writing. Two of three rows here are one request's, and draw one token."""
    _, kv, step = attention_case("int8", [300, 20, 21], [1, 1, 1], 4, 2, 128, 64, dtype=torch.bfloat16, decode=3)
    ops = replace(OPS, decode=lambda *_: None, rope_write=lambda *_: torch.zeros(3, 4, 128))
    attention = Attention(lambda x, _: x, None, None, None, torch.zeros(400, 128), 2, 128, 1e-5, 0, ops)
    x = torch.zeros(3, 8 * 128, dtype=torch.bfloat16)
    for drawing, dimensions in ((None, 2), (torch.tensor([0, 1, 2]), 2), (torch.tensor([0, 2]), 3), (torch.tensor([]), 3)):
        assert attention.project(x, kv, replace(step, logit_rows=drawing)).ndim == dimensions


@pytest.mark.parametrize("pairs", [1, 8, 40, 65, 132, 300, 640, 5120])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_programs_of_a_processor_have_room(name: str, pairs: int) -> None:
    for group in range(1, 9):
        shape = decode_hopper.shape_for(name, pairs, group)
        assert 1 <= shape.cluster <= 8
        assert shape.warps * shape.resident * 32 * 128 <= 65536  # registers
        splits = decode_hopper.MOST_PARTIAL_BYTES // (512 * group)
        assert decode_hopper.shared_bytes(shape, name, group, 64, splits) <= MOST_BYTES


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_whatever_a_step_of_so_many_rows_takes_is_compiled_ahead(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a prompt (queries) and alone (projections): a request would wait half a second for each."""
    compiled: list[dict] = []
    monkeypatch.setattr(decode_hopper.nvrtc, "compile_ahead", lambda wanted: compiled.extend(d for _, d in wanted))
    monkeypatch.setattr(decode_hopper.nvrtc, "processors", lambda device: 132)
    asked_for: list[dict] = []
    monkeypatch.setattr(decode_hopper.nvrtc, "kernel", lambda name, device, shared_bytes, source, *given:
                        asked_for.append(source(*given)[1]))  # fmt: skip
    monkeypatch.setattr(decode_hopper.nvrtc, "launch", lambda *_: None)
    monkeypatch.setattr(decode_hopper.nvrtc, "bytes_map", lambda *_: None)
    x, heads, kv, step = asked(name, 40, 40)
    decode_hopper.compile_ahead(kv, heads, torch.bfloat16, 128, True)
    for rows in range(1, 129):
        step = replace(step, num_decode=rows)
        for some in (x, x[:, : heads * 128].view(1, heads, 128)):
            if decode_hopper.fits(some, heads, kv, step, 128, 0):
                fused = some.ndim == 2
                decode_hopper.run(some, heads, kv, step, 1.0, torch.zeros(400, 128) if fused else None, fused)
    assert len(asked_for) > 128
    assert all(one in compiled for one in asked_for)
    compiled.clear()
    decode_hopper.compile_ahead(kv, heads, torch.bfloat16, 128, None)  # of a model that turns K and Q
    assert compiled == [one for one in compiled if not one["FUSED"]]
    assert {one["WARPS"] for one in compiled} == {one["WARPS"] for one in asked_for if not one["FUSED"]}


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("name", "heads", "group", "pairs"),
                         [("int8", 40, 1, 40), ("int8", 40, 1, 640), ("int8", 40, 1, 5120), ("int8", 8, 4, 1000),
                          ("int4", 40, 1, 160), ("int4", 40, 1, 400), ("int4", 40, 1, 1000), ("int4", 40, 1, 2000),
                          ("int4", 8, 4, 300), ("int4", 8, 4, 1000)])
def test_machine_code_spills_nothing_between_products(name: str, heads: int, group: int, pairs: int, quantize: bool,
                                                      tmp_path: Path) -> None:
    shape = decode_hopper.shape_for(name, pairs, group)
    lines = assemble(*decode_hopper.source_and_defines(shape, name, heads, group, 64, quantize, quantize, 0), tmp_path)
    products = [i for i, line in enumerate(lines) if re.match(r"(@\S+ )?HMMA", line)]
    assert len(products) == (64 if name == "int4" else 32)  # of a tile: codes times queries once, times weights once
    assert not [line for line in lines[products[0]:products[-1]] if SPILL.match(line)]

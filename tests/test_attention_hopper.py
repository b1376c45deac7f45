"""The Hopper prompt kernel compiles without a GPU to the machine code it is written for; numbers: tests/gpu/test_ops_gpu.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sass import SPILL, disassemble, written_registers

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon import _runtime as gluon_runtime  # noqa: E402

from nybble.kernels import attention_hopper  # noqa: E402


def compile_prompt(dim: int, dtype: torch.dtype) -> Any:
    layout, name = attention_hopper.layout(dim, dtype), {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    tile = f"tensordesc<{name}[{attention_hopper.TILE}, {dim}],{layout!r}>"
    types = {"q_ptr": "*bf16", "k_desc": tile, "v_desc": tile, "context_ptr": "*i32", "query_start_ptr": "*i32",
             "out_ptr": "*bf16", "q_scale": "fp32", "v_scale": "fp32"}
    constants = {"HEADS": 32, "GROUP": 4, "DIM": dim, "ROWS": attention_hopper.ROWS, "TILE": attention_hopper.TILE,
                 "STAGES": attention_hopper.STAGES[dim]}
    kernel = attention_hopper._prompt
    names = kernel.arg_names
    source = gluon_runtime.GluonASTSource(
        fn=kernel, signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in ("q_ptr", "out_ptr")})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def machine_code(compiled: Any, tmp_path: Path) -> list[str]:
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    return disassemble(cubin)


def loops(lines: list[str]) -> list[list[str]]:
    """Bodies of innermost loops that multiply."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    spans = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], at) < at and any("HGMMA" in inside for inside in lines[labels[target[1]] : at]):
            spans.append((labels[target[1]], at))
    inner = [s for s in spans if not any(s[0] <= o[0] and o[1] <= s[1] and o != s for o in spans)]
    return [lines[first:last] for first, last in inner]


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_machine_code(dim: int, dtype: torch.dtype, tmp_path: Path) -> None:
    compiled = compile_prompt(dim, dtype)
    assert compiled.metadata.shared <= 227 * 1024
    lines = machine_code(compiled, tmp_path)
    waits_of = lambda body: [at for at, line in enumerate(body) if "WARPGROUP.DEPBAR" in line]  # noqa: E731
    bodies = [body for body in loops(lines) if len(waits_of(body)) == 2]
    assert len(bodies) >= 4  # two groups of warps, without and with a mask
    products = dim // 16 + attention_hopper.TILE // 16
    bodies = [body for body in bodies if sum("HGMMA" in line for line in body) == products]  # none is issued twice
    assert len(bodies) == 4
    for body in bodies:
        assert not [line for line in body if SPILL.match(line)]
        waits = waits_of(body)
        assert [re.search(r"gsb0, (0x\d)", body[at])[1] for at in waits] == ["0x1", "0x0"]  # type: ignore[index]
        exponentials = [at for at, line in enumerate(body) if "MUFU.EX2" in line]
        assert len(exponentials) == attention_hopper.TILE // 2 + 2
        assert all(waits[0] < at < waits[1] for at in exponentials)  # while p v is under way
        operands: set[int] = set()
        for line in body[: waits[1]]:
            product = re.search(r"HGMMA\S* R\d+, R(\d+), gdesc", line)
            if product:
                operands |= set(range(int(product[1]), int(product[1]) + 4))
            elif "HGMMA" not in line:
                assert not operands & set(written_registers(line)), line  # what the tensor core still reads stays
        assert len(operands) == attention_hopper.TILE // 4

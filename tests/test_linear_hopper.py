"""The Hopper kernel without a GPU: its packed layout against the PTX manual's, and the machine code that it becomes.

Numbers are checked on the GPU (tests/gpu). Here: every operand stays in registers, two products are in flight, nothing in the
main loop spills, and no instruction writes a register that a product in flight still reads (PTX calls that undefined, the
compiler does not look).
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
gluon_runtime = pytest.importorskip("triton.experimental.gluon._runtime")
from triton.backends.compiler import GPUTarget  # noqa: E402

from nybble.formats.spec import SCHEMES  # noqa: E402
from nybble.kernels import linear_hopper  # noqa: E402
from nybble.kernels.linear_hopper import Tile  # noqa: E402
from nybble.kernels.linear_triton import pack_nibbles  # noqa: E402
from nybble.kernels.registry import LinearShape  # noqa: E402


def test_a_thread_finds_its_operands_of_two_products_in_16_bytes() -> None:
    """PTX ISA, wgmma m64nNk32, register operand of 8-bit types: thread t of a warpgroup holds, for rows
    16 (t / 32) + (t % 32) / 4 and 8 below, channels 4 (t % 4).. and 16 further."""
    n, k = 512, 256
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    nibbles = pack_nibbles(codes)
    packed = linear_hopper.pack_fragments(nibbles).view(torch.int8).view(n // 256, k // 128, 4, 2, 128, 4, 4)
    for block, step, tile, half, thread in ((0, 0, 0, 0, 0), (1, 1, 3, 1, 127), (0, 1, 2, 0, 77), (1, 0, 1, 1, 34)):
        row = 256 * block + 64 * tile + 16 * (thread // 32) + thread % 32 // 4
        byte = 64 * step + 32 * half + 4 * (thread % 4)
        words = packed[block, step, tile, half, thread]
        for word, (down, right) in enumerate(((0, 0), (8, 0), (0, 16), (8, 16))):
            expected = nibbles[row + down, byte + right : byte + right + 4]
            assert torch.equal(words[word], expected)


def test_refuses_with_a_reason() -> None:
    cpu = torch.device("cpu")
    for name, reason in (("w4a8", "Hopper GPU"), ("w8a8", "int4"), ("w4a8_g128", "int8 grid"), ("w4a16", "int8 activations")):
        refusal = linear_hopper.KERNELS[0].accepts(LinearShape(SCHEMES[name], 64, 256, cpu, torch.bfloat16))
        assert refusal is not None
        assert reason in refusal


def compile_for_hopper(tile: Tile, grouped: bool):
    flat, tokens, flat_bytes = linear_hopper.shared_layouts(tile)
    types = {
        "w_desc": f"tensordesc<i32[{tile.BM // 16}, 256],{flat!r}>",
        "x_desc": f"tensordesc<i8[{tile.BT}, 128],{tokens!r}>",
        "s_desc": f"tensordesc<i8[1, {max(tile.BM, 128)}],{flat_bytes!r}>",
        "w_scale": "*fp32", "x_scale": "*fp32", "y": "*bf16", "partials": "*i32", "arrivals": "*i32",
    }  # fmt: skip
    constants = {
        "BM": tile.BM,
        "BT": tile.BT,
        "STAGES": tile.stages,
        "STREAM": tile.stream,
        "ORDER": tile.order,
        "GROUPED": grouped,
    }
    kernel = linear_hopper.w4a8
    names = kernel.arg_names
    source = gluon_runtime.GluonASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in (*types, "N") if "desc" not in n},
    )
    options = {"num_warps": tile.warps} | ({"maxnreg": tile.registers} if tile.registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def machine_code(compiled, tmp_path: Path) -> list[str]:
    """SASS, one instruction a line, labels kept."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    text = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    return [re.sub(r"/\*.*?\*/", "", line).strip() for line in text.splitlines()]


def written_registers(line: str) -> range:
    """The general registers that an instruction writes, by its first operand and width."""
    line = re.sub(r"^@!?U?P\d+ ", "", line)
    found = re.match(r"([A-Z0-9_.]+) (?:P\d+, )?R(\d+)", line)
    if not found or found[1].startswith(("ST", "RED", "BAR", "SYNCS", "IGMMA", "WARPGROUP", "UTMA", "BRA", "ISETP", "R2UR")):
        return range(0)
    width = 4 if ".128" in found[1] else 2 if ".64" in found[1] or ".WIDE" in found[1] else 1
    return range(int(found[2]), int(found[2]) + width)


def loop_of_products(lines: list[str]) -> list[str]:
    """The innermost loop with IGMMA in it, from the label its last branch goes back to."""
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    best: list[str] = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA `\((\.L_x_\d+)\)", line)
        if target and labels.get(target[1], at) < at:
            body = lines[labels[target[1]] : at]
            if any("IGMMA" in inside for inside in body) and (not best or len(body) < len(best)):
                best = body
    return best


def overwritten_in_flight(body: list[str]) -> list[str]:
    """Instructions that write an operand of a product that may still run, over two rounds of the loop."""
    flights: list[set[int]] = [set()]  # operand registers per group; the last is not yet committed
    bad = []
    for line in body * 2:
        if "IGMMA" in line:
            operand = int(re.search(r"IGMMA\S* R\d+, R(\d+), gdesc", line)[1])  # type: ignore[index]
            flights[-1] |= set(range(operand, operand + 4))
            if "gsb0" in line:
                flights.append(set())
        elif "DEPBAR" in line:
            left = int(re.search(r"gsb0, 0x(\d+)", line)[1])  # type: ignore[index]
            flights = flights[max(0, len(flights) - 1 - left) :]
        else:
            bad += [line for register in written_registers(line) if any(register in flight for flight in flights)]
    return bad


IN_USE = sorted({tile for *_, tile in linear_hopper.TILES})
CASES = [*((tile, False) for tile in IN_USE), (IN_USE[0], True), (IN_USE[-1], True), (Tile(64, 16, 10, True, 2, 8, 120), True)]


@pytest.mark.parametrize(("tile", "grouped"), CASES, ids=lambda v: "x".join(map(str, v)) if isinstance(v, tuple) else str(v))
def test_machine_code(tile: Tile, grouped: bool, tmp_path: Path) -> None:
    compiled = compile_for_hopper(tile, grouped)
    assert compiled.metadata.shared <= linear_hopper.shared_bytes(tile, grouped) <= 227 * 1024
    body = loop_of_products(machine_code(compiled, tmp_path))
    products = [line for line in body if "IGMMA" in line]
    rows, columns = max(1, tile.BM // (16 * tile.warps)), max(1, tile.BT // 128)
    assert len(products) == 4 * rows * columns  # 128 channels, 32 at a time: none is issued twice
    assert all(re.search(r"IGMMA\.64x\d+x32\.S8\.S8 R\d+, R\d+, gdesc", line) for line in products)
    waits = [line for line in body if "WARPGROUP.DEPBAR" in line]
    assert [re.search(r"0x\d+ *;", line)[0][:3] for line in waits] == ["0x1", "0x1"]  # type: ignore[index]
    assert not [line for line in body if re.match(r"(@\S+ )?(STL|LDL|STS|PRMT)\b", line)]
    assert overwritten_in_flight(body) == []
    words = tile.BM * 64 // 4 // (32 * tile.warps)  # packed words a thread unpacks per step
    logic = sum(len(re.findall(r"\bLOP3", line)) for line in body)
    assert logic <= words * (4 if grouped else 2) + 24  # the rest are addresses and phases


def test_the_check_for_overwritten_operands_can_fail() -> None:
    body = ["IGMMA.64x16x32.S8.S8 R24, R8, gdesc[UR4], R24, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"]
    assert overwritten_in_flight([*body, "LOP3.LUT R9, R2, 0xf0f0f0f0, RZ, 0xc0, !PT ;"])
    assert not overwritten_in_flight([*body, "LOP3.LUT R12, R2, 0xf0f0f0f0, RZ, 0xc0, !PT ;"])

"""What it costs to turn eight packed 4-bit weights into int8 operands: QQQ's two conversions against the ordinary ones.

    python -m nybble.bench.conversion [--target sm_90]

FastINT4toINT8 (per channel: the code stays in the high nibble, the scale takes the 16 back) and FastFP16toINT8 (per group:
code x fp16 scale, rounded by adding 1152, whose mantissa then ends in the int8) are of the QQQ paper, arXiv 2406.09904.
"Ordinary" is what the conversion instructions of the hardware give. Instructions are counted in the SASS as the growth from 1
to 9 conversions; on a GPU every method is checked against torch and timed. Without a GPU the counts alone are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

ROUNDS = 64  # conversions of a timed loop's body
_NIBBLES = "".join(f"bfe.s32 n{i}, $2, {4 * i}, 4; " for i in range(8))
_PACK = "".join(
    f"prmt.b32 p, n{i}, n{i + 2}, 0x0040; prmt.b32 q, n{i + 4}, n{i + 6}, 0x0040; prmt.b32 ${o}, p, q, 0x5410; "
    for o, i in ((0, 0), (1, 1))
)
_HALVES = """lop3.b32 h0, {w}, 0x000F000F, 0x64006400, 0xEA; sub.rn.f16x2 h0, h0, z; fma.rn.f16x2 h0, h0, $3, m;
 lop3.b32 h1, {w}, 0x00F000F0, 0x64006400, 0xEA; fma.rn.f16x2 h1, h1, k, y; fma.rn.f16x2 h1, h1, $3, m;
 prmt.b32 p, h0, h1, 0x6420; xor.b32 {out}, p, 0x80808080; """

# name: (assembly of $0, $1 = convert($2, scale pair $3); where code i of the word lands, as (output, byte); times the scale)
METHODS: dict[str, tuple[str, tuple[tuple[int, int], ...], bool]] = {
    "nothing": ("{ mov.b32 $0, $2; mov.b32 $1, $2; }", (), False),
    "FastINT4toINT8": (
        "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0; }",
        tuple((i % 2, i // 2) for i in range(8)), False,
    ),
    "int4 -> int8, ordinary": (
        "{ .reg .b32 n0,n1,n2,n3,n4,n5,n6,n7,p,q; " + _NIBBLES + _PACK + "}", tuple((i % 2, i // 2) for i in range(8)), False,
    ),
    "FastFP16toINT8": (
        "{ .reg .b32 h0,h1,p,t,z,m,k,y; mov.b32 z, 0x64086408; mov.b32 m, 0x64806480; mov.b32 k, 0x2C002C00;"
        " mov.b32 y, 0xD480D480; " + _HALVES.format(w="$2", out="$0") + "shr.u32 t, $2, 8; "
        + _HALVES.format(w="t", out="$1") + "}",
        ((0, 0), (0, 2), (1, 0), (1, 2), (0, 1), (0, 3), (1, 1), (1, 3)), True,
    ),
    "int4 x scale -> int8, ordinary": (
        "{ .reg .b32 n0,n1,n2,n3,n4,n5,n6,n7,p,q; .reg .f32 s,f; .reg .b16 l,r; mov.b32 {l, r}, $3;"
        " cvt.f32.f16 s, l; " + _NIBBLES
        + "".join(f"cvt.rn.f32.s32 f, n{i}; mul.f32 f, f, s; cvt.rni.s32.f32 n{i}, f; " for i in range(8)) + _PACK + "}",
        tuple((i % 2, i // 2) for i in range(8)), True,
    ),
}  # fmt: skip


@triton.jit
def convert(words, scales, out, ASM: tl.constexpr, COUNT: tl.constexpr, LOOPS: tl.constexpr, BLOCK: tl.constexpr):
    """COUNT * LOOPS conversions of changing words; out[0], out[1]: all results XORed together."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at)
    scale = tl.load(scales + at)
    low, high = word ^ word, word ^ word
    for _ in range(LOOPS):
        for _ in tl.static_range(COUNT):
            a, b = tl.inline_asm_elementwise(ASM, "=&r,=&r,r,r", [word, scale], (tl.int32, tl.int32), is_pure=True, pack=1)
            low, high = low ^ a, high ^ b
            word = word * 5 + 1
    size = tl.num_programs(0) * BLOCK
    tl.store(out + at, low)
    tl.store(out + size + at, high)


def instructions(method: str, target: str) -> float:
    """SASS instructions per conversion of eight weights, the loop's own arithmetic taken off."""
    few, many, idle, idle_many = (_count(METHODS[name][0], count, target) for name in (method, "nothing") for count in (1, 9))
    return (many - few - (idle_many - idle)) / 8


def _count(assembly: str, count: int, target: str) -> int:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {"words": "*i32", "scales": "*i32", "out": "*i32"}
    source = ASTSource(convert, signature, {"ASM": assembly, "COUNT": count, "LOOPS": 1, "BLOCK": 128})
    code = triton.compile(source, target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32), options={"num_warps": 4})
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(code.asm["cubin"])
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        listing = subprocess.run([tool, "-c", cubin], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_.]+)", listing, re.M)
    return sum(name not in ("NOP", "BRA") for name in names)


def expected(method: str, word: int, scale: float) -> tuple[int, int]:
    """The two output words, worked out one weight at a time."""
    _, places, scaled = METHODS[method]
    out = [0, 0]
    for i, (half, byte) in enumerate(places):
        code = (word >> 4 * i & 15) - (16 if word >> 4 * i & 8 else 0)
        if method == "FastFP16toINT8":  # unsigned with a zero of 8, as QQQ stores groups
            code = (word >> 4 * i & 15) - 8
        value = round(code * scale) if scaled else code * (16 if method == "FastINT4toINT8" else 1)
        out[half] |= (value & 255) << 8 * byte
    return out[0], out[1]


def run(method: str, words: torch.Tensor, scales: torch.Tensor, count: int = 1, loops: int = 1) -> torch.Tensor:
    """int32 [2, words] of a method on a GPU; `scales` are fp16 pairs as int32."""
    out = torch.empty((2, words.numel()), dtype=torch.int32, device=words.device)
    convert[(words.numel() // 128,)](words, scales, out, METHODS[method][0], count, loops, 128, num_warps=4)
    return out


def check(method: str, device: torch.device) -> None:
    """Raises ValueError where a method's bytes are not what they should be."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(2**31), 2**31, (1024,), generator=generator).to(torch.int32)
    scales = (torch.rand(1024, generator=generator) * 15).half()
    pairs = torch.stack((scales, scales), -1).view(torch.int32)[:, 0]
    got = run(method, words.to(device), pairs.to(device)).cpu()
    want = torch.tensor([expected(method, w & 0xFFFFFFFF, s) for w, s in zip(words.tolist(), scales.tolist())]).to(torch.int32)
    if not torch.equal(got, want.T):
        raise ValueError(f"{method}: {(got != want.T).sum().item()} of {got.numel()} words are wrong")


def nanoseconds(method: str, device: torch.device) -> float:
    """Per eight weights on one multiprocessor that is full of threads."""
    from nybble.bench.timing import capture, replay_us

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    words = torch.randint(0, 2**31, (processors * 16 * 128,), dtype=torch.int32, device=device)
    graph, _ = capture([lambda: run(method, words, words, ROUNDS, 256)])
    return min(replay_us(graph) for _ in range(5)) * 1e3 / (16 * 128 * ROUNDS * 256)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m nybble.bench.conversion", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", default="sm_90", help="whose instructions are counted")
    target = parser.parse_args().target
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    idle = 0.0 if device is None else nanoseconds("nothing", device)
    record: dict[str, object] = {"bench": "conversion", "target": target}
    lines = [f"{'eight weights':<32}{'instructions':>14}{'ns per SM':>12}"]
    for method in list(METHODS)[1:]:
        count, time = instructions(method, target), None
        if device is not None:
            check(method, device)
            time = nanoseconds(method, device) - idle
        lines.append(f"{method:<32}{count:>14.1f}{'-' if time is None else f'{time:.4f}':>12}")
        record[method] = {"instructions": count, "ns": None if time is None else round(time, 5)}
    sys.stdout.write("\n".join((*lines, json.dumps(record), "")))


if __name__ == "__main__":
    main()

"""Linear kernels on a GPU: correctness against float64, time, share of the roofline, and what cuBLAS does beside them.

`run` prints one table per batch size and appends a JSON line per figure; `sweep` tries every sensible tile per shape and
batch and prints the rows that `kernels.linear_triton.TILES` should hold. Nothing here chooses tiles at run time.
"""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import find_spec
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
import torch
import torch.nn.functional as F
from torch import Tensor

from nybble.bench.plot import Point, roofline_svg
from nybble.bench.timing import Call, Timing, copies_beyond_cache, interleave
from nybble.formats.numerics import quantize_weight
from nybble.formats.qtensor import QTensor, dense
from nybble.formats.spec import FP8, SCHEMES
from nybble.kernels import linear_hopper, linear_triton, reference
from nybble.kernels.linear_triton import Row, Tile
from nybble.kernels.registry import LinearKernel, LinearShape, linear_kernels
from nybble.kernels.types import Rows

# (layer, output rows N, input channels K) of one block, Q/K/V and gate/up joined
MODELS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "llama-2-13b": (("qkv", 15360, 5120), ("o", 5120, 5120), ("gate_up", 27648, 5120), ("down", 5120, 13824)),
    "llama-3-8b": (("qkv", 6144, 4096), ("o", 4096, 4096), ("gate_up", 28672, 4096), ("down", 4096, 14336)),
    "llama-3-70b": (("qkv", 10240, 8192), ("o", 8192, 8192), ("gate_up", 57344, 8192), ("down", 8192, 28672)),
}
TOKENS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
# Names of figures. Weights on an int8 grid by float16 scales are QQQ's, by whole scales Nybble's own.
FORMS = SCHEMES | {"w4a8_whole_g128": SCHEMES["w4a8_qqq_g128"]}
SWEPT = dict.fromkeys(FORMS, "int8") | {"w4a8": "int4", "w4a8_g128": "group", "w4a16_g128": "float4"}
FAMILIES = {"triton": linear_triton, "hopper": linear_hopper}
Report = Callable[[str], object]
Candidate = tuple[str, LinearKernel, QTensor | Tensor, list[Any]]  # scheme, kernel, weight, packed copies


# What the roofline assumes of an H200: bytes per second that a copy reaches, dense int8 and bf16 operations per second.
BYTES_PER_S, INT8_PER_S, BF16_PER_S = 4.3e12, 1500e12, 790e12


def bytes_moved(scheme: str, n: int, k: int, tokens: int) -> float:
    """Weights with their group scales, inputs and bf16 outputs, each once. scheme: a key of FORMS, any other is of 16 bits."""
    form = FORMS.get(scheme, SCHEMES["16bit"])
    bits = 16.0 if form.weight is None else form.weight.num.bits + (16 / form.weight.group if form.weight.group else 0)
    return n * k * bits / 8 + tokens * k * (2 if form.act is None else 1) + 2 * tokens * n


def floor_us(scheme: str, n: int, k: int, tokens: int) -> float:
    """The larger of moving every byte once and doing every operation at the machine's rate."""
    wide = FORMS.get(scheme, SCHEMES["16bit"]).act is None
    computing_s = 2.0 * tokens * n * k / (BF16_PER_S if wide else INT8_PER_S)
    return max(bytes_moved(scheme, n, k, tokens) / BYTES_PER_S, computing_s) * 1e6


# ---- what is timed ------------------------------------------------------------------------------------------------


def kernels_for(shape: LinearShape) -> list[LinearKernel]:
    """Every kernel of this package that accepts, the engine's choice first; what torch multiplies with is a peer."""
    torchs = (reference.SCALED_MM, *reference.KERNELS)
    return [one for one in linear_kernels(shape.device) if one not in torchs and one.accepts(shape) is None]


def random_weight(scheme: str, n: int, k: int, device: torch.device) -> QTensor | Tensor:
    """Normal values to the nearest code, each group's largest at the end of the range, as the peers' are: how often bits flip
    decides the clocks of a large product. Outputs are near one."""
    spec, values = FORMS[scheme].weight, torch.randn(n, k, device=device) / k**0.5
    if spec is None:
        return values.bfloat16()
    largest = values.unflatten(1, (-1, spec.group or k)).abs().amax(dim=2)
    scale = (largest * (2 if spec.zero else 1) / spec.num.qmax).bfloat16().float()
    zero = torch.randint(6, 10, largest.shape, device=device).float() if spec.zero else None
    weight = quantize_weight(values, spec, scale, zero)
    if spec.over is None:
        return weight
    whole = scheme == "w4a8_whole_g128"
    grid = torch.randint(8, 17, scale.shape, device=device) if whole else torch.rand(scale.shape, device=device) * 8 + 7.8
    return replace(weight, scale=grid.half().float(), over=scale[:, :1].contiguous() / 16)


def random_input(scheme: str, tokens: int, k: int, device: torch.device) -> Rows | Tensor:
    """As the multiplying kernel takes it: FP8 too is rounded before, as the peers' is."""
    x, act = torch.randn(tokens, k, device=device), FORMS[scheme].act
    if act is None:
        return x.bfloat16()
    if act.num == FP8:
        codes, scale = reference.quantize_float8(x, act, None)
        return Rows(codes, scale.flatten())
    return reference.quantize_rows(x)


def head(x: Rows | Tensor, rows: int) -> Rows | Tensor:
    return Rows(x.codes[:rows], x.scale[:rows]) if isinstance(x, Rows) else x[:rows]


def relative_error(kernel: LinearKernel, packed: Any, weight: QTensor | Tensor, x: Rows | Tensor) -> float:
    """|out - exact| / |exact| over the first 32 and last 32 rows of the full batch, the output's rounding included."""
    out = kernel.run(packed, x).double()
    value = x.codes.double() * x.scale.double()[:, None] if isinstance(x, Rows) else x.double()
    rows = torch.arange(out.shape[0], device=out.device)
    rows = rows[(rows < 32) | (rows >= out.shape[0] - 32)]
    exact = value[rows] @ dense(weight, torch.float64).t()
    return ((out[rows] - exact).norm() / exact.norm()).item()


def same_alone(kernel: LinearKernel, packed: Any, x: Rows | Tensor) -> bool:
    """The first row by itself gives the bits it gives in the batch."""
    return torch.equal(kernel.run(packed, head(x, 1)), kernel.run(packed, x)[:1])


def copies_of(packed: Any, device: torch.device) -> list[Any]:
    """A packed weight, any frozen dataclass of tensors, as often in different memory as no cache holds."""
    tensors = {name: value for name, value in vars(packed).items() if isinstance(value, Tensor)}
    count = copies_beyond_cache(sum(t.nbytes for t in tensors.values()), device)
    return [packed, *(replace(packed, **{name: t.clone() for name, t in tensors.items()}) for _ in range(count - 1))]


def peer_calls(n: int, k: int, tokens: int, device: torch.device) -> dict[str, list[Call]]:
    """cuBLAS through torch: bf16; FP8 by one scale a tensor, or one a row and token, in its fast sums or exact ones (those of
    ours are exact); raw int8 (no scales at all)."""
    wide = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
    count, x8 = copies_beyond_cache(n * k, device), x.to(torch.float8_e4m3fn)
    weights8 = [wide.to(torch.float8_e4m3fn).t() for _ in range(count)]
    calls: dict[str, list[Call]] = {
        "torch bf16": [partial(F.linear, x, wide.clone()) for _ in range(copies_beyond_cache(2 * n * k, device))],
    }
    for name, rows, columns, fast in (("fp8", 1, 1, True), ("fp8 exact", 1, 1, False), ("fp8 rows", tokens, n, True)):
        scales = {"scale_a": torch.ones(rows, 1, device=device), "scale_b": torch.ones(1, columns, device=device)}
        multiply = partial(torch._scaled_mm, **scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
        calls[f"torch {name}"] = [partial(multiply, x8, weight) for weight in weights8]
    if tokens > 16:
        xi = torch.randint(-127, 128, (tokens, k), dtype=torch.int8, device=device)
        integers = [torch.randint(-127, 128, (n, k), dtype=torch.int8, device=device) for _ in range(count)]
        calls["torch int8 raw"] = [lambda w=w: torch._int_mm(xi, w.t()) for w in integers]
    return calls


# What humming (github.com/vllm-project/humming) calls a scheme: weights, inputs.
HUMMING: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "w4a8": ({"dtype": "int4"}, {"dtype": "int8"}),
    "w4a8_whole_g128": ({"dtype": "int4", "group_size": 128}, {"dtype": "int8"}),
    "w4a16_g128": ({"dtype": "int4", "group_size": 128}, None),
    "w8a8": ({"dtype": "int8"}, {"dtype": "int8"}),
    "fp8": ({"dtype": "float8e4m3"}, {"dtype": "float8e4m3"}),
}


@lru_cache(len(HUMMING))
def _humming_layers(scheme: str, n: int, k: int, device: torch.device) -> list[Any]:
    from humming.layer import HummingLayer

    weights, inputs = HUMMING[scheme]
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=dict(weights), input_config=inputs and dict(inputs),
                         torch_dtype=torch.bfloat16).to(device)  # fmt: skip
    layer.load_from_unquantized(torch.randn(n, k, device=device, dtype=torch.bfloat16))
    layer.transform()
    size = sum(p.numel() * p.element_size() for p in layer.parameters())
    return [layer, *(deepcopy(layer) for _ in range(copies_beyond_cache(size, device) - 1))]


def humming_calls(scheme: str, n: int, k: int, tokens: int, device: torch.device) -> dict[str, list[Call]]:
    """The same linear by humming, inputs already quantized, where it is installed. The first call compiles."""
    if scheme not in HUMMING or find_spec("humming") is None:
        return {}
    from humming.layer import HummingLayerMethod

    layers, x = _humming_layers(scheme, n, k, device), torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
    codes, scale = (x, None) if HUMMING[scheme][1] is None else HummingLayerMethod.may_quant_input(layers[0], x)
    forward = HummingLayerMethod.forward_layer
    return {f"humming {scheme}": [partial(forward, layer, inputs=codes, input_scale=scale) for layer in layers]}


# ---- the table ----------------------------------------------------------------------------------------------------


def run(schemes: Sequence[str], model: str = "llama-2-13b", tokens: Sequence[int] = TOKENS, every_kernel: bool = False,
        budget_s: float = 300.0, results: Path | None = None, plot: Path | None = None,
        report: Report = print) -> list[dict[str, Any]]:
    """Check and time each scheme's chosen kernel (with `every_kernel` all) beside cuBLAS and, if installed, humming.

    Stops starting new work when `budget_s` is spent; what failed is reported and left out. -> the JSON objects.
    """
    device, deadline = torch.device("cuda"), time.monotonic() + budget_s
    about = {"bench": "gemm", "device": torch.cuda.get_device_name(), "commit": _commit(), "date": time.strftime("%Y-%m-%d"),
             "torch": torch.__version__, "command": shlex.join(["nybble", *sys.argv[1:]]), "model": model}
    records: list[dict[str, Any]] = []
    wrong: set[str] = set()
    table: dict[int, dict[str, dict[str, float]]] = {m: {} for m in tokens}
    report(f"{about['device']}  torch {about['torch']}  {model}  us per call; (wrong) failed its check somewhere")
    for layer, n, k in MODELS[model]:
        weights = [found for scheme in schemes for found in _weights(scheme, n, k, every_kernel, report)]
        for m in tokens:
            if time.monotonic() > deadline:
                report(f"budget of {budget_s:.0f} s spent before {layer} M={m}")
                break
            calls, errors, failed = _calls(weights, n, k, m, device, report)
            for scheme in schemes:
                with reported(report, f"humming {scheme} N={n} K={k} M={m}"):
                    calls |= humming_calls(scheme, n, k, m, device)
            wrong |= failed
            timings = _time_all(calls, report)
            peers = {name: round(t.us, 2) for name, t in timings.items() if name not in errors}
            for name, timing in timings.items():
                table[m].setdefault(name, {})[layer] = timing.us
                if name in errors and name not in wrong:
                    scheme, kernel = name.split(" | ")
                    moved = bytes_moved(scheme, n, k, 0)
                    records.append(about | {
                        "layer": layer, "scheme": scheme.replace("_", "-"), "kernel": kernel, "N": n, "K": k, "M": m,
                        "us": round(timing.us, 2), "us_min": round(timing.us_min, 2), "spread": round(timing.spread, 3),
                        "relerr": errors[name], "tflops": round(2e-6 * n * k * m / timing.us, 1),
                        "gb_s": round(moved / timing.us * 1e-3, 1),
                        "share_of_floor": round(floor_us(scheme, n, k, m) / timing.us, 3), "peers": peers})
            del calls
        del weights
        torch.cuda.empty_cache()
    for m in tokens:
        report(_format(m, table[m], MODELS[model], wrong))
    if results is not None and records:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)
    if plot is not None and records:
        plot.write_text(roofline(records, model), encoding="utf-8")
    return records


@contextmanager
def reported(report: Report, what: str) -> Iterator[None]:
    """An error is said and left behind: one kernel that fails must not hide the others."""
    try:
        yield
    except Exception as problem:
        report(f"  {what}: {_short(problem)}")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:160]}".replace("\n", " ")


def roofline(records: Sequence[dict[str, Any]], model: str) -> str:
    """The records of `run` under the roof of an H200, as SVG."""
    points = [Point(f"{r['layer']} M={r['M']}", r["scheme"], 2.0 * r["M"] * r["N"] * r["K"],
                    bytes_moved(r["scheme"].replace("-", "_"), r["N"], r["K"], r["M"]), r["us"],
                    "int8" if FORMS[r["scheme"].replace("-", "_")].act else "bf16") for r in records]
    return roofline_svg(points, BYTES_PER_S, {"int8": INT8_PER_S, "bf16": BF16_PER_S}, f"Linears of {model}")


def _weights(scheme: str, n: int, k: int, every: bool, report: Report) -> list[Candidate]:
    """Of the chosen kernel, or of every one."""
    device, out = torch.device("cuda"), []
    shape = LinearShape(FORMS[scheme], n, k, device, torch.bfloat16)
    for kernel in kernels_for(shape)[: None if every else 1]:
        with reported(report, f"{scheme} | {kernel.name} N={n} K={k}"):
            weight = random_weight(scheme, n, k, device)
            packed = kernel.pack(weight, shape)
            out.append((scheme, kernel, weight, copies_of(packed, device)))
    return out


def _calls(weights: Sequence[Candidate], n: int, k: int, m: int, device: torch.device,
           report: Report) -> tuple[dict[str, list[Call]], dict[str, float], set[str]]:
    """-> (calls per kernel and peer, relative error per kernel, the kernels that failed: too far off or not the same alone)."""
    calls: dict[str, list[Call]] = {}
    errors: dict[str, float] = {}
    wrong: set[str] = set()
    for scheme, kernel, weight, copies in weights:
        name = f"{scheme} | {kernel.name}"
        with reported(report, f"{name} N={n} K={k} M={m}"):
            x = random_input(scheme, m, k, device)
            errors[name] = relative_error(kernel, copies[0], weight, x)
            alone = FORMS[scheme].weight is None or same_alone(kernel, copies[0], x)  # not promised of 16 bits
            if not alone or not errors[name] < max(4e-3, FORMS[scheme].tol):
                wrong.add(name)
                report(f"  {name} N={n} K={k} M={m}: relative error {errors[name]:.1e}, same bits alone: {alone}")
            calls[name] = [partial(kernel.run, p, x) for p in copies]
    with reported(report, f"cuBLAS N={n} K={k} M={m}"):
        calls |= peer_calls(n, k, m, device)
    return calls, errors, wrong


def _time_all(calls: dict[str, list[Call]], report: Report) -> dict[str, Timing]:
    working = {}
    for name, rotation in calls.items():
        with reported(report, name):
            rotation[0]()
            torch.cuda.synchronize()
            working[name] = rotation
    return interleave(working, replays=7, least_us=1000.0)


def _format(m: int, rows: dict[str, dict[str, float]], layers: Sequence[tuple[str, int, int]], wrong: set[str]) -> str:
    columns = "".join(f"{layer:>10}" for layer, _, _ in layers)
    lines = [f"M={m:<6}{'':34}{columns}{'sum':>10}{'floor':>8}{'of floor':>10}"]
    for name, times in rows.items():
        cells = "".join(f"{times[layer]:10.1f}" if layer in times else f"{'-':>10}" for layer, _, _ in layers)
        line = f"  {name + (' (wrong)' if name in wrong else ''):<40}{cells}"
        if len(times) == len(layers):
            scheme = "w8a8" if name.startswith(("torch fp8", "torch int8")) else name.removeprefix("humming ").split(" | ")[0]
            least, total = sum(floor_us(scheme, n, k, m) for _, n, k in layers), sum(times.values())
            line += f"{total:10.1f}{least:8.1f}{least / total:10.2f}"
        lines.append(line)
    return "\n".join(lines)


def _commit() -> str:
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# ---- the sweep ----------------------------------------------------------------------------------------------------


def tiles_to_try(family: str, kind: str, m: int, n: int) -> Iterator[Any]:
    """Every tile that could be good for `m` tokens: register and shared-memory limits of sm_90, small search elsewhere."""
    yield from dict.fromkeys(_hopper_tiles(m, n)) if family == "hopper" else _triton_tiles(kind, m)


def _triton_tiles(kind: str, m: int) -> Iterator[Tile]:
    tokens = [bm for bm in (16, 32, 64, 128, 256) if bm <= max(16, m)][-2 if m > 16 else -1 :]
    if m > 256:
        tokens = [128, 256]
    in_segments = kind in ("group", "float4")
    for bm, bn, bk, warps in itertools.product(tokens, (64, 128, 256), (128, 256), (4, 8)):
        per_thread = bn * bm // (32 * warps)
        if per_thread > (64 if in_segments else 128) or bn < 16 * warps or per_thread < 2:
            continue
        if bk == 256 and (bm > 64 or in_segments):
            continue
        splits = [1] if m > 512 else ([1, 0] if in_segments else [1, 2, 4, 8])
        stage_bytes = bn * bk // (1 if kind == "int8" else 2) + bm * bk * (2 if kind == "float4" else 1)
        stages = [s for s in ((3, 4, 6, 8) if m <= 64 else (3, 4, 5)) if s * stage_bytes <= 220_000]
        for split, stage, order in itertools.product(splits, stages, (8,) if m <= 256 else (4, 16)):
            yield Tile(bn, bm, bk, split, stage, warps, order)


def _hopper_tiles(m: int, n: int) -> Iterator[linear_hopper.Tile]:
    """Few tokens: shares of the channels, and programs small enough that the next kernel's start early. Many: whole
    processors, walking over tiles, what fills no round of them in shares. All that the kernel may choose is among them."""
    tile, count = linear_hopper.Tile, linear_hopper.processors(0)
    if m > 64:
        for mode in (linear_hopper.PER_CHANNEL, linear_hopper.GROUPED):
            yield from linear_hopper.candidates(mode, m, -(-n // 128), count)
    for t in (8, 16, 24, 32, 48, 64, 80, 96, 128):
        if -(-m // t) * t > max(1.25 * m, 8 if m < 8 else m + 15) or m > 16 * t:
            continue
        for warp in (False, True) if t <= 32 else (False,):
            if t <= 96:
                yield from (tile(t, 1, warp, k, 2, ahead=ahead) for k in (1, 2, 3, 4, 5) for ahead in (0, 6))
                yield from (tile(t, 1, warp, k, 2, memory=True) for k in (2, 3, 4, 6))
                yield from (tile(t, 1, warp, 1, 2, stream=True, waves=waves) for waves in (1, 2))
        for rows in (1, 2) if t >= 48 else ():
            tiles = -(-n // (128 * rows)) * -(-m // t)
            yield from (tile(t, rows, False, k) for k in ((1, 2, 4) if m <= 256 else (1,)))
            yield from (tile(t, rows, False, k, memory=True) for k in range(2, 1 + count // tiles))
            for order, lag in ((4, 0), (4, 2), (12, 2)) if m > 256 else ((8, 0),):
                yield tile(t, rows, waves=1, order=order, lag=lag)
                yield tile(t, rows, waves=1, order=order, lag=lag, stream=True)


def _family_kernel(family: str, scheme: str, n: int, k: int) -> tuple[LinearKernel, LinearShape]:
    shape = LinearShape(FORMS[scheme], n, k, torch.device("cuda"), torch.bfloat16)
    kernels = [kernel for kernel in FAMILIES[family].KERNELS if kernel.accepts(shape) is None]
    if not kernels:
        raise LookupError(f"no {family} kernel takes {scheme}")
    return kernels[0], shape


def _try_tile(family: str, scheme: str, tile: Any) -> None:
    """Compile (into the shared cache) and run once on a small weight; in a worker process."""
    device = torch.device("cuda")
    n, k = 512, 2048
    kernel, shape = _family_kernel(family, scheme, n, k)
    packed = kernel.pack(random_weight(scheme, n, k, device), shape)
    tokens = tile.tokens if family == "hopper" else tile.BM
    for segments in {1, 4} if getattr(packed, "kind", "") in ("group", "float4") else {1}:
        packed = replace(packed, segments=segments) if segments > 1 else packed
        kernel.run(replace(packed, tile=tile), random_input(scheme, tokens, k, device))
    torch.cuda.synchronize()


def sweep(schemes: Sequence[str], model: str = "llama-2-13b", tokens: Sequence[int] = TOKENS[1:], family: str = "triton",
          budget_s: float = 400.0, report: Report = print) -> None:
    """The fastest tiles per shape and batch, and the rows for `TILES`. Tiles compile in parallel before anything is timed."""
    device, deadline = torch.device("cuda"), time.monotonic() + budget_s
    candidates = {
        (scheme, m, n): list(tiles_to_try(family, SWEPT[scheme], m, n))
        for scheme, m, (_, n, _) in itertools.product(schemes, tokens, MODELS[model])
    }
    wanted = {(scheme, tile) for (scheme, *_), tiles in candidates.items() for tile in tiles}
    usable = _compile_all(family, wanted, deadline - 0.4 * budget_s, report)
    best: dict[tuple[str, int, int, int], Any] = {}
    for scheme, (layer, n, k) in itertools.product(schemes, MODELS[model]):
        try:
            kernel, shape = _family_kernel(family, scheme, n, k)
        except LookupError:
            report(f"no {family} kernel takes {scheme} N={n} K={k}")
            continue
        weight = random_weight(scheme, n, k, device)
        packed = kernel.pack(weight, shape)
        copies = copies_of(packed, device)
        for m in tokens:
            if time.monotonic() > deadline:
                report("budget spent")
                break
            x = random_input(scheme, m, k, device)
            found = _sweep_one(kernel, copies, x, [t for t in candidates[scheme, m, n] if (scheme, t) in usable], deadline)
            if not found:
                continue
            error = relative_error(kernel, replace(packed, tile=found[0][1]), weight, x)
            shown = "  ".join(f"{us:.1f} {'x'.join(str(int(v)) for v in tile)}" for us, tile in found[:4])
            least = floor_us(scheme, n, k, m)
            report(f"{scheme} {layer} N={n} K={k} M={m} floor {least:.1f} relerr {error:.0e} tried {len(found)}: {shown}")
            best[scheme, m, n, k] = found[0][1]
        del copies, packed, weight
    for (scheme, m, n, k), tile in sorted(best.items()):
        report(f"        {Row(SWEPT[scheme], m, n, tile) if family == 'triton' else (m, n, k, tile)},")


def _compile_all(family: str, wanted: set[tuple[str, Any]], deadline: float, report: Report) -> set[tuple[str, Any]]:
    """Compile and try every tile in worker processes; one that hangs is given up after 45 s and its process killed."""
    start, usable, failures = time.monotonic(), set(), []
    pool = ProcessPoolExecutor(12, mp_context=get_context("spawn"))
    futures = {pool.submit(_try_tile, family, *item): item for item in sorted(wanted)}
    for future, item in futures.items():
        try:
            future.result(timeout=max(0.1, min(45.0, deadline - time.monotonic())))
            usable.add(item)
        except Exception as problem:
            failures.append(f"{item[0]} {tuple(item[1])}: {_short(problem)}")
            future.cancel()
    pool.shutdown(wait=False, cancel_futures=True)
    for child in active_children():
        child.kill()
    report(f"compiled {len(usable)} of {len(wanted)} tiles in {time.monotonic() - start:.0f} s")
    for line in failures[:6]:
        report(f"  {line}")
    return usable


def _sweep_one(kernel: LinearKernel, copies: Sequence[Any], x: Rows | Tensor, tiles: Sequence[Any],
               deadline: float) -> list[tuple[float, Any]]:
    """(microseconds, tile), fastest first; the five best are timed again in turns."""

    def rotation(tile: Any) -> list[Call]:
        return [partial(kernel.run, replace(packed, tile=tile), x) for packed in copies]

    found = []
    for tile in tiles:
        if time.monotonic() > deadline:
            break
        try:
            found.append((interleave({"": rotation(tile)}, replays=3, least_us=300.0)[""].us, tile))
        except Exception:  # a tile this shape cannot take; the others still count
            torch.cuda.synchronize()
    found.sort(key=lambda item: item[0])
    close = [tile for _, tile in found[:5]]
    if close:
        again = interleave({str(i): rotation(tile) for i, tile in enumerate(close)}, replays=7)
        found[: len(close)] = sorted((again[str(i)].us, tile) for i, tile in enumerate(close))
    return found


def command(*, schemes: str | None = None, model: Literal[tuple(MODELS)] = "llama-2-13b",
            tokens: str = ",".join(map(str, TOKENS)),
            every_kernel: Annotated[bool, cyclopts.Parameter(negative=())] = False,
            results: Path | None = Path("bench/results/h200.jsonl"), plot: Path | None = None,
            budget: Annotated[float, cyclopts.Parameter(help="Seconds.")] = 300.0,
            sweep_tiles: Annotated[bool, cyclopts.Parameter(name=["--sweep", "--tune"], negative=())] = False,
            family: Literal[tuple(FAMILIES)] = "triton") -> None:
    """Linear kernels beside cuBLAS on this GPU: correctness and time in one run.

    :param schemes: With commas between, of w4a8, w4a8_whole_g128, w4a8_qqq_g128, w8a8, w4a16_g128 (these are the default), fp8,
        16bit and the others of the table of schemes.
    :param tokens: Rows of the input, with commas between.
    :param every_kernel: Time all kernels that accept, not the chosen one alone.
    :param results: Append one JSON line per figure here.
    :param plot: Write an SVG of the roofline here.
    :param sweep_tiles: Try tiles, and print the best as rows for TILES.
    :param family: Whose tiles to sweep.
    """
    asked = schemes.split(",") if schemes else ["w4a8", "w4a8_g128"] if sweep_tiles else [
        "w4a8", "w4a8_whole_g128", "w4a8_qqq_g128", "w8a8", "w4a16_g128"]
    if unknown := [scheme for scheme in asked if scheme not in FORMS]:
        raise ValueError(f"--schemes {','.join(unknown)}: wants some of {', '.join(FORMS)}, with commas between")
    if not torch.cuda.is_available():
        raise ValueError(f"torch {torch.__version__} sees no GPU, and kernels are compared on one")
    options: dict[str, Any] = {"model": model, "tokens": [int(m) for m in tokens.split(",")], "budget_s": budget,
                               "report": partial(print, flush=True)}
    if sweep_tiles:
        sweep(asked, family=family, **options)
    else:
        run(asked, every_kernel=every_kernel, results=results, plot=plot, **options)

"""W8A8 linears on Hopper (sm_90a), in CUDA (`w8a8_sm90.cu`): int8 per token and channel, and FP8 E4M3 per token or tensor and
channel or tensor, and in blocks (one scale per token, row and 128 channels).

int8 sums are int32. FP8 products are added in the tensor core, which keeps about 14 bits of the largest; left alone (cuBLAS's
fast accumulation) a sum of 13824 is 2.8e-3 off, more than rounding it to bf16 costs (1.7e-3). So every 2048 channels' sum is
added in float32, which leaves 8e-4; in blocks each 128 channels', times its scales (1.3e-4). Channels are taken in one order:
no tile and no batch changes a bit. This file packs weights, chooses tiles and launches.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.formats.numerics import FLOAT8
from nybble.formats.qtensor import QTensor, expand
from nybble.formats.spec import FP8, INT8, PER_TOKEN_INT8, Spec
from nybble.kernels import nvrtc, reference
from nybble.kernels.linear_hopper import OUT
from nybble.kernels.linear_triton import LARGEST_IN
from nybble.kernels.nvrtc import BLOCK, processors
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import Rows

ROWS = 64  # of a packed tile, and of a warpgroup
INTEGER, FLOAT, BLOCKS, EVEN_BLOCKS = 0, 1, 2, 3  # KIND of the .cu; the last for batches, where 128 rows share a scale
BFLOAT16, FLOAT16 = 4, 5  # both KIND 4, see `linear_hopper_16`
IN_BLOCKS = (BLOCKS, EVEN_BLOCKS)
PER_TOKEN, PER_GROUP, STATIC = 1, 2, 3  # QUANTIZE of the .cu


# ---- tiles --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """64 weight rows a warpgroup x `tokens`; as many steps of 128 channels in flight as shared memory holds.

    cluster: programs with neighbouring rows that share their tokens, each copying a part for all. resident: programs that fit
    a processor. order: token tiles before the next rows. staged: outputs of 16 bits leave by copies from shared memory, 16
    tokens each. turned: so many weight rows are the tensor core's columns, and tokens its rows, for blocks of
    128 x 128. shares: of the sum over K, in as many programs of a cluster; rows_held: of the tile where it is not 64
    a warpgroup (both 16 bits only).
    """

    tokens: int
    warpgroups: int = 1
    cluster: int = 1
    resident: int = 1
    order: int = 8
    staged: bool = False
    turned: int = 0
    shares: int = 1
    rows_held: int = 0

    @property
    def rows(self) -> int:
        return self.turned or self.rows_held or ROWS * self.warpgroups

    def threads(self, kind: int) -> int:
        return 128 * self.warpgroups + (128 if self.registers else 64 if kind in IN_BLOCKS else 32)

    @property
    def registers(self) -> int:
        """Of a multiplying thread where the even share is too few (0: it is not)."""
        few = self.tokens < 128 or self.warpgroups == 1 or self.resident > 1
        return 0 if few else {2: 232, 3: 160, 4: 112}[self.warpgroups]


# Few tokens, (tokens and rows at most, tile), the first match wins; more: see `plan`. Both from sweeps on an H200 over the
# four Llama-2-13B linears at 1, 16, 32, 64, 128, 256, 384, 512, 1024, 2048 and 4096 tokens.
ANY = 1 << 30
WIDE_128 = Tile(128, 2, 4, staged=True)
FEW = (
    *(row for t in (8, 16, 32, 64) for row in ((t, 8192, Tile(t)), (t, ANY, Tile(t, 2)))),
    (128, 8192, Tile(128, 1, 4)),
    (128, ANY, WIDE_128),
)
FEW_BLOCKS = (*(row for t in (16, 32, 64) for row in ((t, 8192, Tile(t, 1, 2)), (t, ANY, Tile(t, 1, 1, 2)))), *FEW[-2:])
NARROW: dict[int, tuple[tuple[int, int, Tile], ...]] = {INTEGER: FEW, FLOAT: FEW, BLOCKS: FEW_BLOCKS}
NARROW[EVEN_BLOCKS] = (
    *FEW_BLOCKS[:4],
    (64, 8192, Tile(64, 1, 2, turned=64)),
    (64, ANY, Tile(64, 1, 2, turned=128)),
    (128, 8192, Tile(128, 2, turned=64)),
    (128, ANY, Tile(128, 2, turned=128)),
)
# For more tokens; int8's first is what whole rounds in two launches are made of. A thread of FP8 has two sums each.
PAIRS = tuple(Tile(tokens, 2, 2, staged=True) for tokens in (192, 176, 160, 144, 96, 80))
EIGHT_BIT = (*PAIRS, Tile(128, 2, staged=True), Tile(128, 3, staged=True))
WIDE: dict[int, tuple[Tile, ...]] = {
    INTEGER: (Tile(256, 2, staged=True), *EIGHT_BIT),
    FLOAT: EIGHT_BIT,
    BLOCKS: (WIDE_128,),
    EVEN_BLOCKS: (Tile(256, 2, turned=128), Tile(192, 3, turned=128), Tile(128, 2, turned=128)),
}
START = {2: 32, 3: 56}  # the way in and out of a tile by its warpgroups, in tokens of 128 rows
LAUNCH_TOKENS = 16  # what a second launch costs, in tokens of 128 rows
MOST_ROUNDS = 10  # of more, power is the limit and not the last round


class Launch(NamedTuple):
    """A tile and the rows it is for, `first` a multiple of its rows."""

    tile: Tile
    first: int
    rows: int


@functools.lru_cache(4096)
def plan(kind: int, tokens: int, rows: int, processors: int) -> tuple[Launch, ...]:
    """The launches for a batch: from the table for few tokens; else the wide tile with the least rounds over all processors
    times what it takes, for int8 also whole rounds of the widest and the rest in tiles that fit one round better. Neither moves
    a bit."""
    for most, widest, tile in NARROW[kind]:
        if tokens <= most and rows <= widest:
            return (Launch(tile, 0, rows),)

    def rounds(tile: Tile, rows: int) -> int:
        tiles = -(-rows // (tile.rows * tile.cluster)) * tile.cluster * -(-tokens // tile.tokens)
        return -(-tiles // processors)

    def cost(tile: Tile, rows: int) -> int:  # in tokens of 128 rows
        products = tile.tokens * tile.rows // 128
        if tile.turned:
            return rounds(tile, rows) * (products + 64 // tile.warpgroups)
        copies = (tile.tokens + tile.rows) * 35 // 64  # at 58 bytes a clock
        # Rows that the last tile lacks: copies take 2 ns to fill one. Of many tiles few are the last.
        missing = -tokens % tile.tokens if tokens <= 256 else 0
        return rounds(tile, rows) * (max(products, copies) + START[tile.warpgroups]) + missing * 27 // 32

    wide = WIDE[kind]
    best = min(wide, key=lambda tile: cost(tile, rows))
    found, least = (Launch(best, 0, rows),), 0.98 * cost(best, rows)
    for full in range(1, rounds(wide[0], rows) if kind == INTEGER and rounds(wide[0], rows) <= MOST_ROUNDS else 1):
        group = wide[0].rows * wide[0].cluster
        first = full * processors // (-(-tokens // wide[0].tokens) * wide[0].cluster) * group
        if not 0 < first < rows:
            continue
        rest = min((tile for tile in wide if first % tile.rows == 0), key=lambda tile: cost(tile, rows - first))
        total = cost(wide[0], first) + cost(rest, rows - first) + LAUNCH_TOKENS
        if total < least:
            found, least = (Launch(wide[0], 0, first), Launch(rest, first, rows - first)), total
    return found


def shared_memory(tile: Tile, kind: int) -> tuple[int, int]:
    """(stages, bytes) of a program; the layout is the .cu's."""
    each = (tile.rows + tile.tokens) * (BLOCK + (4 if kind in IN_BLOCKS else 0)) + 16
    held = tile.warpgroups * -(-tile.tokens // 64) * 256 if kind < BLOCKS and tile.tokens > 64 else 16 * (tile.shares > 1)
    stages = min(24, (nvrtc.room(tile.resident) - held) // each)
    return stages, -(-(stages * each + held) // 128) * 128


# ---- packing ------------------------------------------------------------------------------------------------------


def tile_order() -> Tensor:
    """Where byte i of a packed tile comes from, as an index into the row-major tile of 64 rows x 128 bytes. int64.

    Row p of the tensor core's 64 is row 16 (p / 16) + 2 (p % 8) + (p % 16) / 8, so that the two a thread gets are neighbours,
    and 16 bytes c of it lie at c xor p % 8, the 128-byte swizzle.
    """
    p, c, byte = torch.arange(64)[:, None, None], torch.arange(8)[None, :, None], torch.arange(16)[None, None, :]
    row = p // 16 * 16 + p % 8 * 2 + p % 16 // 8
    return (row * 128 + (c ^ p % 8) * 16 + byte).flatten()


def pack_tiles(codes: Tensor) -> Tensor:
    """Bytes [N, K], N a multiple of 64, K of 128 -> [N / 64, K / 128, 8192]."""
    n, k = codes.shape
    tiles = codes.view(n // 64, 64, k // 128, 128).permute(0, 2, 1, 3).reshape(n // 64, k // 128, -1)
    return tiles[:, :, tile_order().to(codes.device)].contiguous()


@dataclass(frozen=True)
class Packed:
    """codes: see `pack_tiles`. scale: float32 [N padded to 128], or [K / 128, N padded] in blocks. act: how FP8 activations are
    made, act_scale: float32 [1], where it is static."""

    kind: int
    n: int
    k: int
    dtype: torch.dtype
    codes: Tensor
    scale: Tensor
    act: Spec
    act_scale: Tensor | None = None
    tile: Tile | None = None  # set: this tile whatever the batch (benchmarks, tests)


def _pack(weight: QTensor | Tensor, shape: LinearShape) -> Packed:
    assert isinstance(weight, QTensor)
    assert shape.scheme.act is not None
    weight = weight.to(shape.device)
    n, k = weight.shape
    codes = torch.nn.functional.pad(weight.codes.view(torch.uint8), (0, -k % BLOCK, 0, -n % ROWS))
    groups = weight.scale.shape[1]
    scale = expand(weight.scale, (n, groups), tile=(weight.spec.tile[0], None))
    kind = INTEGER if weight.spec.num == INT8 else BLOCKS if shape.scheme.act.group == BLOCK else FLOAT
    if kind == BLOCKS:
        kind = BLOCKS if weight.spec.tile[0] is not None and weight.spec.tile[0] % BLOCK else EVEN_BLOCKS
        scale = scale.expand(n, -(-k // BLOCK))
    scale = torch.nn.functional.pad(scale.t(), (0, -n % BLOCK)).contiguous()
    if shape.device.type == "cuda":
        compile_ahead(kind, n, k, shape.dtype, processors(shape.device.index or 0))
    given = None if shape.act_scale is None else torch.tensor([shape.act_scale], device=shape.device)
    return Packed(kind, n, k, shape.dtype, pack_tiles(codes), scale, shape.scheme.act, given)


# ---- launching ----------------------------------------------------------------------------------------------------


class Arguments(ctypes.Structure):
    """`Arguments` of the .cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("w", "w_scale", "x_scale", "y")),
        *((name, ctypes.c_int) for name in ("tokens", "rows", "padded_rows", "steps", "row_tiles", "token_tiles")),
        *((name, ctypes.c_int) for name in ("order", "x_stride", "first")),
    ]


class QuantizeArguments(ctypes.Structure):
    _fields_ = [("x", ctypes.c_void_p), ("codes", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("k", ctypes.c_int),
                ("stride", ctypes.c_int)]  # fmt: skip


PRODUCTS = {
    INTEGER: ("k32.s32.s8.s8", ""),
    BFLOAT16: ("k16.f32.bf16.bf16", ", 1, 1, 0, 0"),
    FLOAT16: ("k16.f32.f16.f16", ", 1, 1, 0, 0"),
}  # wgmma's channels and types, the others FP8; its signs and, of 16 bits, no transposition


def product(kind: int, columns: int) -> str:
    """CUDA for the sums' type and one wgmma: 64 rows times `columns`, 32 bytes of channels of both, in shared memory."""
    n, sum_type, letter = columns // 2, *(("int", "r") if kind == INTEGER else ("float", "f"))
    sums, places = ", ".join(f"%{i}" for i in range(n)), ", ".join(f'"+{letter}"(sum[{i}])' for i in range(n))
    types, signs = PRODUCTS.get(kind, ("k32.f32.e4m3.e4m3", ", 1, 1"))
    return (
        f"typedef {sum_type} Sum; typedef unsigned long long Operand;\n"
        f"__device__ __forceinline__ void product(Sum (&sum)[{n}], Operand rows, Operand columns, int add) {{\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{n + 2}, 0;"\n'
        f'      "wgmma.mma_async.sync.aligned.m64n{columns}{types} {{{sums}}}, %{n}, %{n + 1}, p{signs}; }}"\n'
        f'      : {places} : "l"(rows), "l"(columns), "r"(add));\n}}\n'
    )


def source_and_defines(tile: Tile, kind: int, out: int) -> tuple[str, dict[str, int]]:
    columns = tile.turned or tile.tokens
    number = BFLOAT16 if kind >= BFLOAT16 else EVEN_BLOCKS if tile.turned else min(kind, BLOCKS)
    defines = {
        "KIND": number, "TOKENS": tile.tokens, "COLUMNS": columns, "STAGES": shared_memory(tile, kind)[0],
        "WARPGROUPS": tile.warpgroups, "RESIDENT": tile.resident, "CLUSTER": tile.cluster, "SHARES": tile.shares,
        "ROWS": tile.rows, "REGISTERS": tile.registers, "STAGED": int(tile.staged), "OUT": out,
    }  # fmt: skip
    return product(kind, columns) + nvrtc.source("w8a8_sm90.cu"), defines


@functools.cache
def kernel(tile: Tile, kind: int, out: int, device: int) -> ctypes.c_void_p:
    source, defines = source_and_defines(tile, kind, out)
    return nvrtc.load(nvrtc.machine_code(source, defines), "w8a8", shared_memory(tile, kind)[1], device)


def fitted(tile: Tile, n: int, k: int, dtype: torch.dtype) -> Tile:
    return tile._replace(staged=tile.staged and n % 8 == 0 and k > BLOCK and dtype != torch.float32)


@functools.cache
def compile_ahead(kind: int, n: int, k: int, dtype: torch.dtype, count: int) -> None:
    tiles = {fitted(launch.tile, n, k, dtype) for m in nvrtc.usual_batches(n, k) for launch in plan(kind, m, n, count)}
    nvrtc.compile_ahead(source_and_defines(tile, kind, OUT[dtype]) for tile in tiles)


@functools.cache
def quantizer(how: int, dtype: torch.dtype, device: int) -> ctypes.c_void_p:
    code = nvrtc.machine_code(nvrtc.source("w8a8_sm90.cu"), {"QUANTIZE": how, "OUT": OUT[dtype]})
    return nvrtc.load(code, "quantize", 0, device)


def quantize(x: Tensor, act: Spec, scale: Tensor | None, stride: int) -> tuple[Tensor, Tensor]:
    """[M, K] of 16 or 32 bits -> (FP8 codes [M, K], float32 scales: [M], [K / 128 rounded up, stride] in groups, or the one
    given). The codes and scales of `reference.quantize_float8`, bit for bit."""
    tokens, k = x.shape
    if tokens == 0:
        return x.to(FLOAT8[FP8.name]), x.new_zeros(1, dtype=torch.float32)
    how = STATIC if scale is not None else PER_GROUP if act.group == BLOCK else PER_TOKEN
    codes = torch.empty((tokens, k), dtype=FLOAT8[FP8.name], device=x.device)
    if scale is None:
        shape = (-(-k // BLOCK), stride) if how == PER_GROUP else (tokens,)
        scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    arguments = QuantizeArguments(x.data_ptr(), codes.data_ptr(), scale.data_ptr(), k, stride)
    nvrtc.launch(quantizer(how, x.dtype, x.device.index), tokens, 256, 0, 1, (arguments,), x.device)
    return codes, scale


@functools.cache
def most_clusters(tile: Tile, kind: int, handle: int, device: int) -> int:
    """How many clusters of such programs run at once: some groups of processors are no multiple of a cluster."""
    attribute, count = nvrtc.Attribute(nvrtc.CLUSTER_ATTRIBUTE), ctypes.c_int()
    attribute.value[:3] = [tile.cluster, 1, 1]
    size = shared_memory(tile, kind)[1]
    config = nvrtc.LaunchConfig((tile.cluster, 1, 1), (tile.threads(kind), 1, 1), size, None, ctypes.pointer(attribute), 1)
    status = nvrtc.driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), ctypes.c_void_p(handle), ctypes.byref(config))
    nvrtc.check(status, f"counting clusters of {tile.cluster}")
    return max(1, count.value)


def multiply(packed: Packed, launches: tuple[Launch, ...], codes: Tensor, scale: Tensor, stride: int) -> Tensor:
    """Quantized rows [M, K] times the weight -> [M, N]. scale: as `quantize` gives it; stride: from one token's to the next's
    (0: one for all), in blocks from one group's to the next's, with room for whole tiles."""
    tokens = codes.shape[0]
    y = torch.empty((tokens, packed.n), dtype=packed.dtype, device=codes.device)
    for tile, first, rows in launches if tokens else ():
        start(
            Launch(fitted(tile, packed.n, packed.k, packed.dtype), first, rows), packed.kind, codes.data_ptr(), packed.k, y,
            (packed.codes, packed.scale, scale), packed.scale.shape[1], stride,
        )  # fmt: skip
    return y


def start(part: Launch, kind: int, x: int, row_bytes: int, y: Tensor, weight: tuple[Tensor, ...], padded_rows: int = 0,
          stride: int = 0) -> None:
    """One launch: rows of y [M, N] from M rows of `row_bytes` at address x. weight: codes, scales of rows and of tokens, or 16
    bits [N, K]."""
    (tile, first, rows), (tokens, n), out = part, y.shape, OUT[y.dtype]
    token_tiles, row_groups = -(-tokens // tile.tokens), -(-rows // (tile.rows * tile.cluster))
    handle, size, clusters = kernel(tile, kind, out, y.device.index), shared_memory(tile, kind)[1], row_groups * token_tiles
    if tile.shares == 1:
        clusters = min(clusters, most_clusters(tile, kind, handle.value or 0, y.device.index))
    addresses = [tensor.data_ptr() for tensor in weight]
    arguments = Arguments(
        *(addresses + [None, None])[:3], y.data_ptr(), tokens, n, padded_rows, -(-row_bytes // BLOCK), row_groups, token_tiles,
        tile.order, stride, first // tile.rows,
    )  # fmt: skip
    inputs = nvrtc.bytes_map(x, tokens, row_bytes, tile.tokens // tile.cluster)
    outputs = nvrtc.bytes_map(y.data_ptr(), tokens, n * 2, 16) if tile.staged else inputs
    weights = nvrtc.bytes_map(addresses[0], n, row_bytes, tile.rows) if kind >= BFLOAT16 else inputs
    group = tile.cluster * tile.shares
    nvrtc.launch(handle, clusters * group, tile.threads(kind), size, group, (inputs, outputs, weights, arguments), y.device)


def _run(packed: Packed, x: Rows | Tensor) -> Tensor:
    tokens = (x.codes if isinstance(x, Rows) else x).shape[0]
    launches = plan(packed.kind, tokens, packed.n, processors(packed.codes.device.index))
    if packed.tile is not None:
        launches = (Launch(packed.tile, 0, packed.n),)
    if isinstance(x, Rows):
        return multiply(packed, launches, x.codes.contiguous(), x.scale.contiguous(), 1)
    stride = 1 if packed.act_scale is None else 0
    if packed.kind in IN_BLOCKS:
        stride = max(-(-tokens // tile.tokens) * tile.tokens for tile, *_ in launches)
    return multiply(packed, launches, *quantize(x.contiguous(), packed.act, packed.act_scale, stride), stride)


def _refuse(shape: LinearShape) -> str | None:
    if shape.has_order or (shape.scheme.weight is not None and shape.scheme.weight.zero):
        return "wants symmetric weights whose groups are contiguous"
    if shape.in_features % 16 or shape.in_features > LARGEST_IN:
        return f"wants input channels in multiples of 16 up to {LARGEST_IN}"
    return nvrtc.refusal(shape.device)


def _accepts_int8(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or weight.num != INT8 or shape.scheme.act != PER_TOKEN_INT8:
        return "wants int8 weights with int8 activations per token"
    if weight.over is not None or weight.group not in (None, shape.in_features):
        return "wants one scale per channel or tensor"
    return _refuse(shape)


def _accepts_fp8(shape: LinearShape) -> str | None:
    weight, act = shape.scheme.weight, shape.scheme.act
    refusal = reference.refuse_float8(shape)
    if refusal is not None:
        return refusal
    if weight is None or act is None or (weight.num, act.num) != (FP8, FP8):
        return "wants weights and activations in fp8_e4m3"
    whole = (None, shape.in_features)
    if act.group not in (*whole, BLOCK) or weight.group not in ((*whole, BLOCK) if act.group == BLOCK else whole):
        return f"wants one scale per token and per row or tensor, or both per {BLOCK} channels"
    return _refuse(shape)


KERNELS: tuple[LinearKernel, ...] = (
    LinearKernel("hopper w8a8", _accepts_int8, _pack, _run, PER_TOKEN_INT8),
    LinearKernel("hopper fp8", _accepts_fp8, _pack, _run, None),
)

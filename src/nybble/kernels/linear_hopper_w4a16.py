"""int4 weights with 16-bit activations on Hopper (sm_90a), in CUDA (`w4a16_sm90.cu`): AWQ's with zeros, GPTQ's without, per
channel or in groups.

The fp32 sum over K runs in shares fixed by the weight's shape, so tiles and the batch cannot change a bit. What a weight is
matches `linear_triton`: (code - zero) * scale in the activations' 16 bits with one rounding, its scale rounded to them before.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor
from nybble.kernels import linear_triton, nvrtc
from nybble.kernels.nvrtc import BLOCK, OUT, processors
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import Rows

ROWS = 256  # packed N is a multiple of it; a packed tile is 128 rows x 128 channels
STEP = {torch.bfloat16: 133, torch.float16: 24}  # a code in a float's lowest bits is it times 2^-this
CODE = {torch.bfloat16: 6, torch.float16: 10}  # codes that are given a zero, or no scale, become floats times 2^-this


# ---- tiles --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """`tokens` x 64 `row_tiles` `warpgroups` weight rows; as many steps of 128 channels in flight as shared memory holds.

    resident: programs that fit a processor. chunk: products of 16 channels that are issued together. walk: at most one wave of
    programs, each going over tiles, `order` token tiles before the next row tile; else one program per tile. stagger: the
    second warpgroup starts later, so that one multiplies while the other stores. split: shares of the sum over K run at once,
    in the programs of a cluster, else one after another.
    """

    tokens: int
    row_tiles: int = 1
    warpgroups: int = 2
    resident: int = 1
    chunk: int = 4
    walk: bool = False
    order: int = 8
    stagger: bool = False
    split: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.row_tiles * self.warpgroups

    @property
    def threads(self) -> int:
        return 128 * self.warpgroups + (128 if self.registers else 32)

    @property
    def registers(self) -> int:
        """Of a multiplying thread where the even share is too few (0: it is not)."""
        return 232 if self.row_tiles * (self.tokens + 32) >= 192 and self.warpgroups == 2 and self.resident == 1 else 0


class Launch(NamedTuple):
    """A tile and the rows it is for, `first` a multiple of 256."""

    tile: Tile
    first: int
    rows: int


def shares_for(n: int, k: int) -> int:
    """How many parts the sum over K has, whatever the batch: two where row tiles alone leave half the processors idle."""
    return 2 if n <= 8448 and k >= 1024 else 1


def cluster_of(tile: Tile, shares: int) -> int:
    return shares if tile.split else 1


def few_tokens(tokens: int, n: int, shares: int, processors: int) -> Tile:
    """Up to 128: one tile of tokens. Programs that fill a processor each while there are enough of those, else half of one."""
    width = next(t for t in (8, 16, 32, 64, 88, 128) if tokens <= t)
    if -(-n // 128) * shares <= processors:
        return Tile(width, 1, 2, 1, 4 if width <= 64 else 2, split=True)
    if width <= 64:
        return Tile(width, 2, 1, 2, 4 if width <= 32 else 2, split=True)
    return Tile(width, 2, 2, 1, 2, split=True)


LARGEST = Tile(128, 2, 2, 1, 2, True, 4)
MANY = (
    *(Tile(t, 1, 2, 1, 2) for t in (64, 88, 104, 128, 160, 176, 208, 256)),
    *(LARGEST._replace(tokens=t) for t in (64, 88, 96, 112, 128)),
)


def wave_us(tile: Tile, k: int, shares: int) -> float:
    """What a full wave of programs takes on an H200: a line through measured tiles, the tensor cores' rate at least."""
    if tile.row_tiles == 2:
        us = max(14 + 0.328 * tile.tokens, 0.4375 * tile.tokens) * k / 5120
    else:
        us = max(11.5 + 0.14 * tile.tokens, 0.228 * tile.tokens) * k / 5120
    if shares > 1 and tile.split:
        return us / shares + 3.3  # exchanging sums
    return us + (shares - 1) * 1.5e-4 * tile.rows * tile.tokens  # keeping them in L2


@functools.lru_cache(4096)
def plan(tokens: int, n: int, k: int, shares: int, processors: int) -> tuple[Launch, ...]:
    """The launches for a batch, one or two: whole waves of the largest tile, and the rest in tiles that fit one wave better.

    Neither changes a bit, so this is free to follow time: measured ones for few tokens, `wave_us` for many.
    """
    if tokens <= 128:
        return (Launch(few_tokens(tokens, n, shares, processors), 0, n),)
    tiles = [tile._replace(split=split) for tile in MANY for split in (False, True)[:shares]]

    def waves(tile: Tile, rows: int) -> int:
        return -(-(-(-rows // tile.rows) * -(-tokens // tile.tokens) * cluster_of(tile, shares)) // processors)

    def us(tile: Tile, rows: int) -> float:
        return waves(tile, rows) * wave_us(tile, k, shares)

    def launch(tile: Tile, first: int, rows: int) -> Launch:
        if waves(tile, rows) == 1:
            return Launch(tile._replace(walk=False, order=8), first, rows)
        return Launch(tile._replace(stagger=tile.walk and cluster_of(tile, shares) < shares), first, rows)  # no gain elsewhere

    best = min(tiles, key=lambda tile: us(tile, n))
    columns, found, least = -(-tokens // LARGEST.tokens), (launch(best, 0, n),), 0.98 * us(best, n)
    for full in range(1, waves(LARGEST, n)):
        first = full * processors // columns * LARGEST.rows
        if not 0 < first < n:
            continue
        rest = min(tiles, key=lambda tile: us(tile, n - first))
        total = us(LARGEST, first) + us(rest, n - first) + 2
        if total < least:
            found = launch(LARGEST, 0, first), launch(rest, first, n - first)
            least = total
    return found


def shared_memory(tile: Tile, cluster: int, tile_bytes: int) -> tuple[int, int]:
    """(stages, bytes) of a program; the layout is the .cu's."""
    each = tile.rows // 128 * tile_bytes + tile.tokens * BLOCK * 2 + 16
    sums = (cluster - 1) * -(-tile.tokens // 8 // cluster) * tile.row_tiles * tile.warpgroups * 2048
    stages = min(16, (nvrtc.room(tile.resident) - sums - 16 * tile.warpgroups - 127) // each)
    return stages, -(-(stages * each + 16 * tile.warpgroups) // 128) * 128 + sums


# ---- packing ------------------------------------------------------------------------------------------------------


def pack_fragments(codes: Tensor) -> Tensor:
    """Codes 0..15, uint8 [N, K], both multiples of 128 -> uint8 [N / 128, K / 128, 8192], in the order of the tensor core.

    16 bytes of a thread are four products' operands, a word each: rows r and r + 1 (8 apart to the tensor core), channels c and
    c + 8 in a byte, then c + 1. A thread's four rows in two products of 64 are neighbours: it writes outputs 8 bytes at a time.
    """
    n, k = codes.shape
    parts = codes.view(n // 128, 4, 8, 2, 2, k // 128, 2, 4, 2, 4, 2)  # warp, four rows, row tile, r; half, 16, 8, c, c + 1
    low, high = parts.unbind(8)
    return (low | high << 4).permute(0, 5, 6, 3, 1, 2, 8, 7, 9, 4).reshape(n // 128, k // 128, 8192)


@dataclass(frozen=True)
class Packed:
    """weight: uint8 [N / 128, K / 128, bytes]: codes as `pack_fragments` and, of each group, scales, zeros and addends of 128
    rows in 16 bits. scale: float32 [N padded], of the sum. group: channels of a scale, 0 when there is one a row. zero: 0 none,
    1 whole numbers, 2 with an addend. shares: see `shares_for`."""

    n: int
    k: int
    group: int
    zero: int
    shares: int
    dtype: torch.dtype
    weight: Tensor
    scale: Tensor
    tile: Tile | None = None  # set: this tile whatever the batch (benchmarks, tests)


def _pack(weight: QTensor | Tensor, shape: LinearShape) -> Packed:
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    n, k = weight.shape
    n_padded, k_padded, code = -(-n // ROWS) * ROWS, -(-k // BLOCK) * BLOCK, CODE[shape.dtype]
    offset = 8 if weight.spec.num.qmin < 0 else 0
    codes = torch.nn.functional.pad((weight.codes + offset).to(torch.uint8), (0, k_padded - k, 0, n_padded - n))
    packed, group, addends = pack_fragments(codes), 0, 0
    if weight.zero is None and weight.scale.shape[1] == 1:
        row = weight.scale.expand(n, 1)[:, 0] * 2.0**code
    else:
        group, scale, zero = linear_triton.by_group(weight, k_padded)
        largest = scale.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
        power = torch.frexp(largest).exponent + 9  # scales / 2^power are below 2^-9
        row, scale = torch.exp2(power.float())[:, 0], torch.ldexp(scale, -power)
        scale = scale.to(shape.dtype).float()  # the rounding is the same as the whole scale's
        if zero is None:
            parts = [torch.ldexp(scale, torch.tensor(STEP[shape.dtype], device=scale.device))]
        else:
            whole = (zero + offset).round().clamp(-64, 64)
            parts = [scale * 2.0**code, whole * -(2.0**-code)]
            rest = (whole - zero - offset) * scale
            addends = int(rest.count_nonzero() > 0)
            parts += [rest] if addends else []
        held = torch.stack([_by_tile(part.to(shape.dtype), group, n_padded, k_padded) for part in parts], 2)
        packed = torch.cat((packed, held.view(*packed.shape[:2], -1).view(torch.uint8)), -1)
    row = torch.nn.functional.pad(row, (0, n_padded - n)).contiguous()
    zeros = 0 if weight.zero is None else 1 + addends
    shares = min(shares_for(n, k), k_padded // BLOCK)
    if shape.device.type == "cuda":
        compile_ahead(n, k, shares, group, zeros, shape.dtype, processors(shape.device.index or 0))
    return Packed(n, k, group, zeros, shares, shape.dtype, packed.contiguous(), row)


def _by_tile(values: Tensor, group: int, n_padded: int, k_padded: int) -> Tensor:
    """[N, groups] -> [N / 128, K / 128, groups of 128 channels, 128], padded with zeros."""
    values = torch.nn.functional.pad(values, (0, k_padded // group - values.shape[1], 0, n_padded - values.shape[0]))
    return values.view(n_padded // 128, 128, k_padded // BLOCK, BLOCK // group).permute(0, 2, 3, 1)


# ---- launching ----------------------------------------------------------------------------------------------------


Arguments = nvrtc.structure("w scale totals y", ints="tokens rows width steps row_tiles token_tiles order")


def source_and_defines(tile: Tile, shares: int, group: int, zero: int, dtype: torch.dtype) -> tuple[str, dict[str, int]]:
    cluster, tile_bytes = cluster_of(tile, shares), 8192 + ((1 + zero) * BLOCK // group * 256 if group else 0)
    defines = {
        "TOKENS": tile.tokens, "STAGES": shared_memory(tile, cluster, tile_bytes)[0], "ROW_TILES": tile.row_tiles,
        "WARPGROUPS": tile.warpgroups, "RESIDENT": tile.resident, "SHARES": shares, "CLUSTER_K": cluster, "OUT": OUT[dtype],
        "GROUP": group, "ZERO": zero, "REGISTERS": tile.registers, "CHUNK": tile.chunk, "STAGGER": int(tile.stagger),
    }  # fmt: skip
    kind = "f16" if dtype == torch.float16 else "bf16"
    return nvrtc.product(tile.tokens, 16, f"f32.{kind}.{kind}", ", 1, 1, 0") + nvrtc.source("w4a16_sm90.cu"), defines


@functools.cache
def compile_ahead(n: int, k: int, shares: int, group: int, zero: int, dtype: torch.dtype, count: int) -> None:
    tiles = {launch.tile for m in nvrtc.usual_batches(n, k) for launch in plan(m, n, k, shares, count)}
    nvrtc.compile_ahead(source_and_defines(tile, shares, group, zero, dtype) for tile in tiles)


def _run(packed: Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Tensor)
    x, tokens = x.contiguous(), x.shape[0]
    y = torch.empty((tokens, packed.n), dtype=packed.dtype, device=x.device)
    if tokens == 0:
        return y
    launches = plan(tokens, packed.n, packed.k, packed.shares, processors(x.device.index))
    for part in launches if packed.tile is None else (Launch(packed.tile, 0, packed.n),):
        _launch(packed, x, y, *part)
    return y


def _launch(packed: Packed, x: Tensor, y: Tensor, tile: Tile, first: int, rows: int) -> None:
    tokens, device, cluster = x.shape[0], x.device.index, cluster_of(tile, packed.shares)
    _, steps, tile_bytes = packed.weight.shape
    row_tiles, token_tiles = -(-rows // tile.rows), -(-tokens // tile.tokens)
    clusters, totals = row_tiles * token_tiles, None
    if tile.walk:
        clusters = min(clusters, processors(device) * tile.resident // cluster)
    if cluster < packed.shares:
        totals = torch.empty(clusters * tile.rows * tile.tokens, dtype=torch.float32, device=x.device)
    arguments = Arguments(
        packed.weight.data_ptr() + first // 128 * steps * tile_bytes, packed.scale.data_ptr() + first * 4,
        None if totals is None else totals.data_ptr(), y.data_ptr() + first * 2, tokens, rows, packed.n, steps, row_tiles,
        token_tiles, tile.order,
    )  # fmt: skip
    size = shared_memory(tile, cluster, tile_bytes)[1]
    form = packed.shares, packed.group, packed.zero, packed.dtype
    nvrtc.launch(
        nvrtc.kernel("w4a16", device, size, source_and_defines, tile, *form),
        clusters * cluster, tile.threads, size, cluster,
        (nvrtc.bytes_map(x.data_ptr(), tokens, packed.k * 2, tile.tokens), arguments),
        x.device,
    )  # fmt: skip


def _accepts(shape: LinearShape) -> str | None:
    refusal = linear_triton.accepts_float(shape)
    if refusal is not None:
        return refusal
    if shape.in_features % 8:
        return "wants input channels in multiples of 8"
    return nvrtc.refusal(shape.device)


KERNELS: tuple[LinearKernel, ...] = (LinearKernel("hopper w4a16", _accepts, _pack, _run, None),)

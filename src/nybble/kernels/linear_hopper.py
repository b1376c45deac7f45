"""Linears with int8 activations on Hopper (sm_90a), in CUDA (`w4a8_sm90.cu`): int4 weights per channel, and in groups on an
int8 grid, with whole scales (Nybble's) or any float16 ones (QQQ's).

Not portable and not for other schemes: those are `linear_triton`'s. Sums are int32 from the first product to the last, so
tiles, the split of K and the batch cannot change a bit. This file packs weights, chooses a tile by a table and launches.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nybble.formats.qtensor import QTensor
from nybble.formats.spec import INT4, PER_TOKEN_INT8
from nybble.kernels import linear_triton, nvrtc
from nybble.kernels.nvrtc import BLOCK, processors
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import Rows

ROWS = 256  # packed N is a multiple of it; a packed tile is 128 rows x 128 channels
PER_CHANNEL, GROUPED, ROUNDED = 0, 1, 2  # MODE of the .cu, bytes of a group's scale
WARPGROUPS = 2  # that multiply, each 64 or 128 rows
OUT = nvrtc.OUT | {torch.float32: 2}


# ---- tiles --------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """`tokens` x 128 `row_tiles` weight rows; as many steps of 128 channels in flight as shared memory holds.

    warp: products of single warps (mma.sync), less latency for few tokens; else of warpgroups (wgmma). cluster_k: shares of
    the input channels, added up inside a cluster, or with `memory` (any number fits, later) through global memory. resident:
    programs that fit a processor, so that the next kernel's can start copying early. waves: 0: one program per tile; else at
    most so many a processor, each walking over tiles, `order` token tiles before the next row tile. stream: tiles that fill no
    round of all processors are cut into equal shares, partial sums through global memory. lag: steps that the second warpgroup
    starts late, so that one stores while the other multiplies. ahead: stages of weights copied before the kernel ahead ends (0:
    all of them); activations queue up behind them.
    """

    tokens: int
    row_tiles: int = 1
    warp: bool = False
    cluster_k: int = 1
    resident: int = 1
    waves: int = 0
    order: int = 8
    stream: bool = False
    lag: int = 0
    memory: bool = False
    ahead: int = 0

    @property
    def rows(self) -> int:
        return 64 * self.row_tiles * WARPGROUPS

    @property
    def registers(self) -> int:
        """Of a multiplying thread: what the copying ones leave. The hand-over also tells the compiler that warps are whole, or
        it moves every address of the main loop through a vector register (0: none, an even share)."""
        return {1: 232, 2: 104}.get(self.resident, 0)


def expected_us(tile: Tile, mode: int, tokens: int, rows: int, channels: int, count: int) -> float:
    """Microseconds on a GPU of `count` processors, for more than 64 tokens: fitted to an H200 running linears of Llama-2-13B
    and Llama-3-8B at 80 to 1024 tokens. The tile it prefers took up to 6 % longer than the fastest, 0.5 % on average."""
    tiles, steps = -(-rows // tile.rows) * -(-tokens // tile.tokens), -(-channels // BLOCK)
    size = tile.row_tiles * tile.tokens / 128
    step = 0.0024 * tile.row_tiles * tile.tokens + 0.035 + 0.006 * tile.row_tiles + 0.0006 * max(0, tile.tokens - 176)
    if mode != PER_CHANNEL:  # the more tokens share what is unpacked, the less of it shows
        unpacking, hidden = {GROUPED: 0.095, ROUNDED: 0.165}[mode], 0.0008 * (tile.tokens - 96)
        step += max(0.025, unpacking - hidden if tile.row_tiles == 1 else 1.6 * unpacking - 2.9 * hidden)
    if tile.stream:
        return tiles / count * (steps * step + 0.55 * size) + 5.8 + 2.3 * size
    sums = 0.35 * (tile.cluster_k - 1) + 0.65 * size if tile.memory else 0.8 * size * (tile.cluster_k > 1)
    rounds = -(-tiles * tile.cluster_k // count)
    end = (0.8 if rounds > 1 and not tile.lag else 0.55) * size
    return rounds * (-(-steps // tile.cluster_k) * step + end) + 3.3 + sums


@functools.lru_cache(1 << 14)
def tile_for(mode: int, tokens: int, rows: int, channels: int, count: int = 132) -> Tile:
    """The tile for a batch on a GPU of `count` processors. Few tokens: what a sweep over the Llama-2-13B linears found, shares
    of the channels that fill two programs a processor. More: the least of `expected_us`."""
    blocks, steps = -(-rows // 128), -(-channels // BLOCK)
    if tokens > 64:
        choices = candidates(mode, tokens, blocks, count)
        return min(choices, key=lambda tile: expected_us(tile, mode, tokens, rows, channels, count))
    few = next(t for t in (8, 16, 24, 32, 48, 64) if tokens <= t)
    if few == 64 and blocks > count and mode == PER_CHANNEL:
        return Tile(few, 2)
    shares = min(count // blocks, 8) if few == 64 and mode == PER_CHANNEL else 0
    if 10 * blocks * shares >= 7 * count:  # one program fills a processor
        return Tile(few, cluster_k=shares, memory=through_memory(blocks, shares, count), ahead=6)
    uneven = steps >= 100 and 4 * blocks > count  # a quarter takes long, and some processors have two
    if uneven and mode and few >= 48 and 6 * blocks <= 2 * count:
        return Tile(few, 1, False, 6, 2, memory=True, ahead=3 * (few == 64))
    shares = next(k for k in (5 if uneven else 4, 4, 2, 1) if k == 1 or blocks * k <= 2 * count)
    return Tile(few, 1, few <= 16, shares, 2, ahead=3 if few == 64 else 6 if steps <= 22 * shares else 0)


def through_memory(tiles: int, shares: int, count: int) -> bool:
    """Clusters of more than three do not fill the processors, nor do those of three where few are left over."""
    return shares > 3 or (shares == 3 and 4 * tiles > count)


def candidates(mode: int, tokens: int, blocks: int, count: int) -> list[Tile]:
    """For more than 64 tokens and `blocks` of 128 rows: tiles that fill one round of the processors, whole rounds, equal
    shares."""
    choices = []
    for each in (128, 96, 80, 112, 144, 160, 176, 192, *((208, 256) if mode else ())):
        columns = -(-tokens // each)
        order = 8 if columns <= 2 else 4
        for row_tiles in (1, 2) if each <= 128 else (1,):
            tiles, lag = columns * -(-blocks // row_tiles), 2 * (row_tiles == 2)
            if tiles <= count:
                for shares in {1, 3 if 4 * tiles <= count else 1, min(count // tiles, 8)}:
                    memory = through_memory(tiles, shares, count)
                    choices.append(Tile(each, row_tiles, False, shares, order=order, memory=memory, ahead=3))
            else:
                choices.append(Tile(each, row_tiles, waves=1, order=order, lag=lag, ahead=3))
            if each > 192 or (each == 128 and (row_tiles == 2 or tiles <= count)):
                choices.append(Tile(each, row_tiles, waves=1, order=order, stream=True, lag=lag, ahead=3))
    return choices


def share_bytes(tile: Tile) -> int:
    """Int32 sums that a share of the input channels gets from the others."""
    return (tile.cluster_k - 1) * -(-tile.tokens // 8 // tile.cluster_k) * tile.row_tiles * WARPGROUPS * 2048


def shared_memory(tile: Tile, mode: int) -> tuple[int, int]:
    """(stages, bytes) of a program; the layout is the .cu's."""
    each = tile.rows * 64 + tile.tokens * BLOCK + tile.rows * mode + 16
    sums = 0 if tile.memory else share_bytes(tile)
    scales = WARPGROUPS * tile.tokens * 4
    apart = sums if sums <= 16384 else 0
    stages = min(24, (nvrtc.room(tile.resident) - apart - scales - 127) // each)
    return stages, max(-(-(stages * each + scales) // 128) * 128 + apart, sums)


# ---- packing ------------------------------------------------------------------------------------------------------


def fragment_order() -> Tensor:
    """Where byte i of a packed tile comes from, as an index into the row-major tile of 128 rows x 64 bytes. int64.

    Bit by bit of i: four bytes of k, the next row, k + 16, the four threads of a quad along k, eight times four rows, the four
    warps, two rows on, and last k + 32. A thread's 16 bytes are the operands of two products of 32 channels each, and its four
    rows in two products of 64 are neighbours, so outputs are written 8 bytes at a time straight from registers.
    """
    steps = [(0, 1), (0, 2), (1, 0), (0, 16), (0, 4), (0, 8), (4, 0), (8, 0), (16, 0), (32, 0), (64, 0), (2, 0), (0, 32)]
    index = torch.arange(8192)
    return sum((index >> bit & 1) * (row * 64 + byte) for bit, (row, byte) in enumerate(steps))


def pack_fragments(rows: Tensor) -> Tensor:
    """int8 [N, K / 2] of `linear_triton.pack_nibbles`, N a multiple of 128 -> [N / 128, K / 128, 8192] in fragment order."""
    n, width = rows.shape
    tiles = rows.view(n // 128, 128, width // 64, 64).permute(0, 2, 1, 3).reshape(n // 128, width // 64, -1)
    return tiles[:, :, fragment_order().to(rows.device)].contiguous()


@dataclass(frozen=True)
class Packed:
    """codes: see `pack_fragments`. group_scale: [K / 128, N padded], int8 or float16, or None per channel. scale: float32
    [N padded], of the int32 sum. arrivals: int32 counters, zero between launches."""

    mode: int
    n: int
    k: int
    dtype: torch.dtype
    codes: Tensor
    group_scale: Tensor | None
    scale: Tensor
    arrivals: Tensor
    tile: Tile | None = None  # set: this tile whatever the batch (benchmarks, tests)


def mode_of(weight: QTensor) -> int | None:
    """The kernel's form for a weight; None: its scales on the int8 grid are neither whole numbers in 0..16 (with sums that fit
    int32) nor float16, or a product leaves the int8 range."""
    if weight.over is None:
        return PER_CHANNEL
    scale = weight.scale
    groups = torch.nn.functional.pad(weight.codes, (0, -weight.codes.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    largest_sum = 16 * 128 * (groups.abs().sum(dim=2) * scale).sum(dim=1)  # of 16 * code * scale * activation
    if bool(((scale == scale.round()) & (scale >= 0) & (scale <= 16)).all() and (largest_sum < 1 << 31).all()):
        return GROUPED
    low, high = (torch.round(edge * scale) for edge in groups.aminmax(dim=2))
    inside = (torch.minimum(low, high) >= -128) & (torch.maximum(low, high) <= 127)
    return ROUNDED if bool((inside & (scale == scale.half().float())).all()) else None


def _pack(weight: QTensor | Tensor, shape: LinearShape) -> Packed | linear_triton.Packed:
    """What no form here takes goes to the int8 kernel, bit-exactly."""
    assert isinstance(weight, QTensor)
    weight = weight.to(shape.device)
    mode = mode_of(weight)
    if mode is None:
        return linear_triton.pack_int(weight, shape)
    n, k = weight.shape
    n_padded, k_padded = -(-n // ROWS) * ROWS, -(-k // BLOCK) * BLOCK
    codes = torch.nn.functional.pad(weight.codes, (0, k_padded - k, 0, n_padded - n))
    scale = weight.over if weight.over is not None else weight.scale / 16  # codes enter as 16 * code
    scale = torch.nn.functional.pad(scale.expand(n, 1)[:, 0], (0, n_padded - n)).contiguous()
    group_scale = None
    if mode:
        codes = codes + 8
        scales = weight.scale.expand(n, -1)
        groups = torch.nn.functional.pad(scales, (0, k_padded // BLOCK - scales.shape[1], 0, n_padded - n))
        group_scale = groups.t().to(torch.int8 if mode == GROUPED else torch.float16).contiguous()
    packed = pack_fragments(linear_triton.pack_nibbles(codes))
    count = processors(shape.device.index or 0)
    compile_ahead(n, k, mode, OUT[shape.dtype], count)
    arrivals = torch.zeros(4 * WARPGROUPS * count, dtype=torch.int32, device=shape.device)
    return Packed(mode, n, k, shape.dtype, packed, group_scale, scale, arrivals)


# ---- launching ----------------------------------------------------------------------------------------------------


Arguments = nvrtc.structure("w group w_scale x_scale y partials arrivals",
                            ints="tokens rows padded_rows steps row_tiles token_tiles order whole")  # fmt: skip


def source_and_defines(tile: Tile, mode: int, out: int) -> tuple[str, dict[str, int]]:
    stages = shared_memory(tile, mode)[0]
    defines = {
        "TOKENS": tile.tokens, "STAGES": stages, "ROW_TILES": tile.row_tiles, "WARPGROUPS": WARPGROUPS,
        "RESIDENT": tile.resident, "CLUSTER_K": tile.cluster_k, "MODE": mode, "OUT": out,
        "REGISTERS": tile.registers, "STREAM": int(tile.stream), "WARP_LEVEL": int(tile.warp), "LAG": tile.lag,
        "THROUGH_MEMORY": int(tile.memory), "AHEAD": min(tile.ahead or stages, stages),
    }  # fmt: skip
    return nvrtc.product(tile.tokens, 32, "s32.s8.s8") + nvrtc.source("w4a8_sm90.cu"), defines


@functools.cache
def compile_ahead(n: int, k: int, mode: int, out: int, count: int) -> None:
    tiles = {tile_for(mode, m, n, k, count) for m in nvrtc.usual_batches(n, k)}
    nvrtc.compile_ahead(source_and_defines(tile, mode, out) for tile in tiles)


def whole_waves(tiles: int, clusters: int) -> int:
    """Rounds of a tile each, before what is left is cut into equal shares; these are half a tile at least where they can be."""
    waves, rest = divmod(tiles, clusters)
    return max(0, waves - (0 < 2 * rest < clusters))


def _run(packed: Packed | linear_triton.Packed, x: Rows | Tensor) -> Tensor:
    assert isinstance(x, Rows)
    if isinstance(packed, linear_triton.Packed):
        return linear_triton.run_int(packed, x)
    codes, scale = x.codes.contiguous(), x.scale.contiguous()
    tokens, device = codes.shape[0], codes.device.index
    y = torch.empty((tokens, packed.n), dtype=packed.dtype, device=codes.device)
    if tokens == 0:
        return y
    tile, steps = packed.tile or tile_for(packed.mode, tokens, packed.n, packed.k, processors(device)), -(-packed.k // BLOCK)
    row_tiles, token_tiles = -(-packed.n // tile.rows), -(-tokens // tile.tokens)
    tiles = clusters = row_tiles * token_tiles
    tile = tile._replace(cluster_k=min(tile.cluster_k, steps))
    if tile.memory and tiles * WARPGROUPS > packed.arrivals.numel():
        tile = tile._replace(cluster_k=1, memory=False)
    partials, whole = None, 0
    if tile.stream:
        clusters = min(processors(device) * max(1, tile.waves), tiles * steps)
        whole = whole_waves(tiles, clusters) * clusters
        partials = torch.empty(clusters * tile.rows * tile.tokens, dtype=torch.int32, device=codes.device)
    elif tile.memory:
        partials = torch.empty(tiles * tile.cluster_k * share_bytes(tile) // 4, dtype=torch.int32, device=codes.device)
    elif tile.waves and tile.cluster_k == 1:
        clusters = min(clusters, processors(device) * tile.waves)
    arguments = Arguments(
        *nvrtc.addresses(packed.codes, packed.group_scale, packed.scale, scale, y, partials, packed.arrivals),
        tokens, packed.n, packed.scale.numel(), steps, row_tiles, token_tiles, tile.order, whole,
    )  # fmt: skip
    size = shared_memory(tile, packed.mode)[1]
    nvrtc.launch(
        nvrtc.kernel("w4a8", device, size, source_and_defines, tile, packed.mode, OUT[packed.dtype]),
        clusters * tile.cluster_k, 128 * WARPGROUPS + (128 if tile.registers else 32), size,
        1 if tile.memory else tile.cluster_k,
        (nvrtc.bytes_map(codes.data_ptr(), tokens, packed.k, tile.tokens), arguments), codes.device,
    )  # fmt: skip
    return y


def _accepts(shape: LinearShape) -> str | None:
    weight = shape.scheme.weight
    if weight is None or shape.scheme.act != PER_TOKEN_INT8:
        return "wants quantized weights with int8 activations per token"
    if weight.num != INT4 or weight.zero or shape.has_order:
        return "wants symmetric int4 weights in contiguous groups"
    if weight.over is None and weight.group not in (None, shape.in_features):
        return "wants one scale per channel, or group scales on an int8 grid"
    if weight.over is not None and weight.group != BLOCK:
        return f"wants groups of {BLOCK} int4 on the int8 grid"
    if weight.tile[0] not in (1, None):
        return f"wants one scale per channel, not a tile of {weight.tile[0]} rows"
    if shape.in_features % 16 or shape.in_features > linear_triton.LARGEST_IN:
        return f"wants input channels in multiples of 16 up to {linear_triton.LARGEST_IN}"
    return nvrtc.refusal(shape.device)


KERNELS: tuple[LinearKernel, ...] = (LinearKernel("hopper int8", _accepts, _pack, _run, PER_TOKEN_INT8),)

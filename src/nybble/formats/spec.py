"""What numbers mean: number kinds, scale tiles, and the table of schemes.

A `Spec` says how one tensor is stored; a `Scheme` pairs a weight spec with an activation spec. Adding a scheme is one
line in `SCHEMES`, a KV cache type one line in `KV`. How a scale is *chosen* is the quantizer's business, not this file's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Num:
    """A number kind. `qmin`/`qmax` bound the codes (or the finite floats) that may be stored."""

    name: str
    bits: int
    kind: str  # "int" | "float"
    qmin: float
    qmax: float


INT4 = Num("int4", 4, "int", -8, 7)
INT8 = Num("int8", 8, "int", -127, 127)
UINT4 = Num("uint4", 4, "int", 0, 15)
UINT8 = Num("uint8", 8, "int", 0, 255)
FP8 = Num("fp8_e4m3", 8, "float", -448.0, 448.0)
FP8_FNUZ = Num("fp8_e4m3fnuz", 8, "float", -240.0, 240.0)
FP8_E5M2 = Num("fp8_e5m2", 8, "float", -57344.0, 57344.0)
BF16 = Num("bf16", 16, "float", -3.3895e38, 3.3895e38)
FP16 = Num("fp16", 16, "float", -65504.0, 65504.0)
FP32 = Num("fp32", 32, "float", -3.4028e38, 3.4028e38)

Tile = tuple[int | None, ...]


@dataclass(frozen=True)
class Spec:
    """How one tensor is quantized.

    `tile` is the block that shares one scale, `None` spans the axis: per tensor `(None, None)`, per channel `(1, None)`,
    group `(1, 128)`, block `(128, 128)`, KV per token and head `(1, 1, None)`. `zero` adds an offset per tile. `over` is a
    coarser spec on whose grid the scales live (QQQ g128: int4 tiles of 128 over int8 per channel). `dynamic` means the
    scale is computed at run time.
    """

    num: Num
    tile: Tile = (1, None)
    zero: bool = False
    over: Spec | None = None
    dynamic: bool = False

    @property
    def group(self) -> int | None:
        """Input channels that share a scale along the last axis, `None` when one scale spans it."""
        return self.tile[-1]

    def num_scales(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Of an [N, K] weight: tiles along each axis, the last of which may be a part."""
        rows, columns = (1 if size is None else -(-side // size) for size, side in zip(self.tile, shape))
        return rows, columns

    def with_group(self, group: int | None) -> Spec:
        return replace(self, tile=(*self.tile[:-1], group))


@dataclass(frozen=True)
class Scheme:
    """A weight spec with an activation spec; `None` keeps 16 bits. `tol` is the relative error a kernel may add."""

    name: str
    weight: Spec | None
    act: Spec | None
    tol: float = 1e-3


PER_TOKEN_INT8 = Spec(INT8, (1, None), dynamic=True)
PER_TOKEN_FP8 = Spec(FP8, (1, None), dynamic=True)
INT8_CHANNEL = Spec(INT8, (1, None))

SCHEMES: dict[str, Scheme] = {
    s.name: s
    for s in (
        Scheme("16bit", None, None, tol=5e-3),
        Scheme("w4a8", Spec(INT4, (1, None)), PER_TOKEN_INT8),
        Scheme("w4a8_g128", Spec(INT4, (1, 128)), PER_TOKEN_INT8),
        Scheme("w4a8_g64", Spec(INT4, (1, 64)), PER_TOKEN_INT8),
        Scheme("w4a8_g32", Spec(INT4, (1, 32)), PER_TOKEN_INT8),
        Scheme("w4a8_qqq_g128", Spec(INT4, (1, 128), over=INT8_CHANNEL), PER_TOKEN_INT8),
        Scheme("w8a8", INT8_CHANNEL, PER_TOKEN_INT8),
        Scheme("w4a16", Spec(INT4, (1, None)), None, tol=5e-3),
        Scheme("w4a16_g128", Spec(INT4, (1, 128)), None, tol=5e-3),
        Scheme("w4a16_g64", Spec(INT4, (1, 64)), None, tol=5e-3),
        Scheme("w4a16_g32", Spec(INT4, (1, 32)), None, tol=5e-3),
        Scheme("w4a16_zero_g128", Spec(UINT4, (1, 128), zero=True), None, tol=5e-3),
        Scheme("w8a16", INT8_CHANNEL, None, tol=5e-3),
        Scheme("fp8", Spec(FP8, (1, None)), PER_TOKEN_FP8, tol=5e-3),
    )
}

# K and V as stored in the cache. The integers have an fp16 scale and minimum per token and head, int4 for each half of the
# head's channels; fp8 takes scales from the checkpoint (or 1.0). Arithmetic on what is read back is never 8-bit floats.
INT4_KV_GROUPS = 2
KV: dict[str, Spec] = {
    "fp32": Spec(FP32, ()),
    "bf16": Spec(BF16, ()),
    "fp16": Spec(FP16, ()),
    "int8": Spec(UINT8, (1, 1, None), zero=True, dynamic=True),
    "int4": Spec(UINT4, (1, 1, None), zero=True, dynamic=True),
    "fp8": Spec(FP8, (None, None, None)),
    "fp8_e5m2": Spec(FP8_E5M2, (None, None, None)),
}


def scheme_of(weight: Spec | None, act: Spec | None) -> Scheme:
    """The table's entry for a pair of specs, or an unnamed one when the table has none."""
    for scheme in SCHEMES.values():
        if scheme.weight == weight and scheme.act == act:
            return scheme
    return Scheme(f"{describe(weight)}/{describe(act)}", weight, act, tol=5e-3)


def describe(spec: Spec | None) -> str:
    if spec is None:
        return "16bit"
    tile = "x".join("*" if t is None else str(t) for t in spec.tile)
    return f"{spec.num.name}[{tile}]" + ("+zero" if spec.zero else "") + (f" over {describe(spec.over)}" if spec.over else "")


def fit_group(group: int | None, in_features: int) -> int | None:
    """The group a layer can take: the one asked for if it divides `in_features`, else the largest power of two >= 32 below
    it that does, else `None` (per channel)."""
    if group is None or in_features % group == 0:
        return group
    candidate = 1 << (group.bit_length() - 1)
    while candidate >= 32:
        if candidate < group and in_features % candidate == 0:
            return candidate
        candidate //= 2
    return None

"""How each layer turns K and V before a cache of few bits: chosen when a model is loaded, from it and a page of text.

Attention weights do not change when K is multiplied by a matrix that Q is multiplied by the inverse of, nor when one vector is
taken off every key. So K is stored in a basis where rounding costs least:

- Hadamard spreads an outlier channel over all channels (QuaRot, arXiv 2404.00456).
- int4 rounds each half of the channels around its mean, which it keeps in half precision. Two directions may therefore be
  kept nearly exactly, by turning them onto the halves' means: K's own mean, which eats most of the range, and the direction
  in which queries are longest, where an error costs most; for V the two in which it is longest.
- Where a channel pair is much larger than the others (K biases, as Qwen2 has), K's pairs are scaled, and the query's
  inversely, by what makes both as long as each other (SmoothAttention, QServe, arXiv 2405.04532): the mean of such a K turns
  with the position.

The statistics come from `TOKENS` tokens of any text run through the model; random tokens give nearly the same directions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nybble.formats.spec import KV
from nybble.kernels.reference import gather_kv, hadamard_blocks
from nybble.kernels.types import Turn
from nybble.models.decoder import Decoder
from nybble.models.window import FLOAT_KV, scratch_kv, window_step
from nybble.nn.parallel import ALONE, Group

TOKENS = 2048
SAMPLE = Path(__file__).parents[1] / "quantize" / "data" / "calibration.txt"
OUTLIER = 64.0  # energy of a pair over the median pair's about its mean, from which a head is scaled
INT8_OUTLIER = 16.0  # for int8, which leaves layers without such pairs as they are


@dataclass(frozen=True)
class Moments:
    """Of one layer after rotary embedding, float64, per KV head: K's mean [H, D], and E[x x^T] of K, Q and V [H, D, D]."""

    mean: Tensor
    keys: Tensor
    queries: Tensor
    values: Tensor


def turn_keys(model: Decoder, kv_name: str | None, encode: Callable[[str], Sequence[int]] | None = None) -> Decoder:
    """Give a model's layers their turns for a cache type, in place; -> the model. Types of 16 bits have none. int8 has one only
    where K has biases or norms, and of those layers only the ones whose K has outlier pairs.

    encode: a tokenizer's, for the text that comes with the package and is run through the model; None: random tokens, always
    the same.
    Warns of layers whose K, Q or V is not finite, which stay as they are.
    """
    config = model.config
    if kv_name is None or KV[kv_name].num.bits > 8 or (kv_name == "int8" and not (config.qkv_bias or config.qk_norm)):
        return model
    dtype = torch.float16 if model.device.type == "cuda" and model.dtype.itemsize == 2 else torch.float32
    token_ids = None if encode is None else encode(SAMPLE.read_text(encoding="utf-8")[: 8 * TOKENS])
    layers, broken = [], []
    for index, (layer, moments) in enumerate(zip(model.layers, measure(model, token_ids), strict=True)):
        finite = model.group.least(all(bool(x.isfinite().all()) for x in vars(moments).values()))
        turn = turn_of(moments, kv_name, model.group) if finite else None
        broken += [] if finite else [str(index)]
        turn = None if turn is None else turn.to(model.device, dtype)
        layers.append(replace(layer, attention=replace(layer.attention, turn=turn)))
    if broken:
        warnings.warn(f"K, Q or V of layers {', '.join(broken)} are not finite: nothing is done to store them better in a "
                      f"{kv_name} cache", stacklevel=2)
    model.layers = tuple(layers)
    return model


@torch.inference_mode()
def measure(model: Decoder, token_ids: Sequence[int] | None = None) -> list[Moments]:
    """Each layer's moments over some tokens, None: random ones."""
    length = min(TOKENS, model.config.max_position, TOKENS if token_ids is None else len(token_ids))
    if token_ids is None:
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    else:
        ids = torch.tensor(token_ids[:length])[None]
    step = window_step(ids.to(model.device))
    kv = scratch_kv(model.config, FLOAT_KV[model.dtype], step.block_table.numel(), model.device)
    found, pieces = [], model.pieces(step, kv)
    try:
        attention, q, cache = next(pieces)
        while True:
            k, v = (x[:, 1:].double() for x in gather_kv(cache, step.block_table[0].long(), length))
            grouped = q.double().unflatten(1, (k.shape[0], -1)).permute(1, 0, 2, 3).flatten(1, 2)
            queries = model.group.mean(_second(grouped), model.config.twins)
            found.append(Moments(*(x.cpu() for x in (k.mean(1), _second(k), queries, _second(v)))))
            attention, q, cache = pieces.send(attention.attend(q, cache, step))
    except StopIteration:
        return found


def _second(x: Tensor) -> Tensor:
    """E[x x^T] of [H, N, D] -> [H, D, D]."""
    return x.mT @ x / x.shape[1]


def turn_of(moments: Moments, kv_name: str, group: Group = ALONE) -> Turn | None:
    """A layer's turn for a cache type, on the CPU; None where K is best stored as it is, in the heads of all ranks."""
    heads, dim = moments.mean.shape
    scale = pair_scale(moments, INT8_OUTLIER if kv_name == "int8" else OUTLIER)
    if kv_name == "int8" and group.least(bool((scale == 1).all())):
        return None
    basis = hadamard_blocks(torch.eye(dim, dtype=torch.float64), dim & -dim).expand(heads, dim, dim)
    if kv_name != "int4":
        # Scales of an fp8 cache were measured on K as it is: half of it fits whatever the turn adds to the largest channel.
        scale = scale if kv_name == "int8" else scale / 2
        return Turn(*(x.float() for x in (scale[..., None] * basis, basis / scale[..., None], moments.mean)))
    queries = moments.queries / scale[:, None] / scale[:, :, None]
    keep = torch.stack((moments.mean * scale, torch.linalg.eigh(queries)[1][..., -1]), -1)
    values = onto_means(basis, torch.linalg.eigh(moments.values)[1][..., [-1, -2]])
    basis = onto_means(basis, keep)
    still = torch.zeros_like(scale)
    turned = (scale[..., None] * basis, basis / scale[..., None], still, values, values.mT)
    return Turn(*(x.float().contiguous() for x in turned))


def pair_scale(moments: Moments, outlier: float) -> Tensor:
    """float64 [H, D]: what K's channels are multiplied by, the same for both of a pair (i, i + D/2), at most 1. Heads without
    outlier pairs have 1."""
    energy = lambda second: second.diagonal(dim1=1, dim2=2).unflatten(1, (2, -1)).sum(1)  # noqa: E731
    keys, queries = energy(moments.keys), energy(moments.queries)
    rest = energy(moments.keys - moments.mean[:, :, None] * moments.mean[:, None]).clamp_min(0)
    outlying = (keys > outlier * rest.median(1, True)[0]).any(1, True)
    # The mean is taken off, but turns away in sequences longer than the sample: between what K is with it and without.
    ideal = (queries.clamp_min(1e-30) / (keys * rest).sqrt().clamp_min(1e-30)).pow(0.25)  # makes both as long as each other
    ideal = (ideal / ideal.median(1, True)[0]).clamp(2**-8, 2**3)  # float16 holds the inverse, also of what no query meets
    scale = torch.where(outlying, ideal / ideal.amax(1, True), 1.0)
    return torch.cat((scale, scale), 1)


def onto_means(basis: Tensor, directions: Tensor) -> Tensor:
    """A basis [H, D, D] reflected so that the directions [H, D, groups] (made orthonormal in their order) lie along the means
    of groups of channels: x . direction is then sqrt(D / groups) times the mean of a group of x @ basis."""
    dim, groups = directions.shape[1:]
    wanted = torch.linalg.qr(directions)[0]
    for g in range(groups):
        target = torch.zeros(dim, dtype=basis.dtype)
        target[g * dim // groups : (g + 1) * dim // groups] = (groups / dim) ** 0.5
        now = torch.einsum("hd,hde->he", wanted[..., g], basis)
        normal = now - target
        length = normal.norm(dim=-1, keepdim=True)
        normal = torch.where(length > 1e-9, normal / length.clamp_min(1e-9), 0.0)
        basis = basis - 2 * torch.einsum("hde,he->hd", basis, normal)[..., None] * normal[:, None]
    return basis

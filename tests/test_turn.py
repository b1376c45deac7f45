"""What K is turned by before few bits store it: exact in real arithmetic, and better than nothing where K is hard to store."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny import make_tiny

from nybble.checkpoint import open_checkpoint
from nybble.engine.kvcache import allocate, bytes_per_token
from nybble.formats.numerics import quantize_min_max
from nybble.kernels.reference import hadamard_blocks
from nybble.models import forward_window, load_model
from nybble.models.turn import Moments, onto_means, turn_keys, turn_of


def moments(dim: int, kv_heads: int = 2, bias: float = 0.0, speed: float = 0.7) -> tuple[Moments, torch.Tensor, torch.Tensor]:
    """Of keys and queries that are returned too, [H, N, D] float64."""
    generator = torch.Generator().manual_seed(dim)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    k, q, v = (random(kv_heads, 500, dim) + 3 * random(kv_heads, 1, dim) for _ in range(3))
    angle = torch.arange(500) * speed
    k[0, :, 3] += bias * angle.cos()
    k[0, :, 3 + dim // 2] += bias * angle.sin()
    q[0, :, [3, 3 + dim // 2]] /= max(1.0, bias) if speed > 0.1 else 1.0  # what stays the same for all keys may be large
    second = lambda x: x.mT @ x / x.shape[1]  # noqa: E731
    return Moments(k.mean(1), second(k), second(q), second(v)), k, q


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
def test_a_basis_keeps_two_directions_in_the_means_of_its_halves(dim):
    basis = hadamard_blocks(torch.eye(dim, dtype=torch.float64), dim & -dim)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(dim, dtype=torch.float64))
    kept = torch.linalg.qr(torch.randn(3, dim, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    basis = onto_means(basis.expand(3, dim, dim), kept)
    torch.testing.assert_close(basis @ basis.mT, torch.eye(dim, dtype=torch.float64).expand(3, dim, dim))
    means = (kept.mT @ basis).unflatten(-1, (2, -1))
    one = torch.full((3, dim // 2), (2 / dim) ** 0.5, dtype=torch.float64)
    for g in range(2):
        torch.testing.assert_close(means[:, g, g].abs(), one)
        torch.testing.assert_close(means[:, g, 1 - g], torch.zeros_like(one), atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "fp8_e5m2"])
@pytest.mark.parametrize("dim", [64, 80])
def test_scores_move_by_one_number_per_query(name, dim):
    found, k, q = moments(dim, bias=200.0)
    turn = turn_of(found, name)
    turned = q @ turn.q.double() @ ((k - turn.shift.double()[:, None]) @ turn.k.double()).mT
    moved = turned - q @ k.mT
    assert (moved - moved.mean(-1, keepdim=True)).abs().max() < 1e-4
    if name == "int4":
        torch.testing.assert_close(turn.v @ turn.out, torch.eye(dim).expand(2, dim, dim), atol=1e-5, rtol=0)
    even = torch.eye(dim, dtype=torch.float64).expand(2, dim, dim)
    assert turn_of(Moments(torch.zeros_like(found.mean), even, even, even), "int8") is None  # nothing sticks out: nothing to do


@pytest.mark.parametrize(("name", "levels", "speed", "gain"), [("int8", 255, 0.7, 20), ("int4", 15, 0.7, 5),
                                                               ("int8", 255, 1e-4, 34), ("int4", 15, 1e-4, 40)])
def test_scores_of_a_key_with_a_large_pair_survive(name, levels, speed, gain):
    """A K bias of 200 in a pair that turns with the position, where there is no constant to take away, or hardly does. Errors
    of scores in float64."""
    found, k, q = moments(64, bias=200.0, speed=speed)
    turn = turn_of(found, name)

    def stored(x):
        x = x if name == "int8" else x.unflatten(-1, (2, -1))
        codes, scale, minimum = quantize_min_max(x, levels, centred=name == "int4")
        out = codes.double() * scale.double()[..., None] + minimum.double()[..., None]
        return out if name == "int8" else out.flatten(-2)

    def spread(error):
        return (error - error.mean(-1, keepdim=True))[0].pow(2).mean().sqrt()

    plain = spread(q @ (stored(k) - k).mT)
    turned_k = (k - turn.shift.double()[:, None]) @ turn.k.double()
    assert spread((q @ turn.q.double()) @ (stored(turned_k) - turned_k).mT) * gain < plain


def test_biases_of_most_pairs_are_no_less_of_an_outlier():
    k = torch.randn(1, 500, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    k[:, :, :24] += 100.0
    second = k.mT @ k / 500
    assert turn_of(Moments(k.mean(1), second, torch.eye(64, dtype=torch.float64)[None], second), "int8") is not None


def test_a_model_with_a_large_key_bias_loads_into_int8(tmp_path):
    """Next-token probabilities against the same model with a float32 cache."""
    make_tiny(tmp_path, "qwen2")
    model = load_model(open_checkpoint(tmp_path), "cpu", editable=True)
    for layer in model.layers:
        qkv, parts = layer.attention.qkv, []
        bias = torch.zeros(2, 32)
        bias[:, [1, 15]], bias[:, [17, 31]] = 217.0, -90.0
        for part in qkv.parts:
            if part.name.endswith("k_proj"):
                part = replace(part, bias=part.bias + bias.flatten())
            elif part.name.endswith("q_proj"):  # as in trained models: what meets the bias is small
                small = (bias == 0).float().clamp_min(1 / 64).repeat_interleave(2, 0).flatten()
                part = replace(part, weight=part.weight * small[:, None], bias=part.bias * small)
            parts.append(part)
        qkv.parts, qkv._linears = tuple(parts), ()
    ids = torch.randint(0, 384, (1, 200), generator=torch.Generator().manual_seed(3))
    exact = forward_window(model, ids, "fp32").log_softmax(-1)
    apart = lambda: float((exact.exp() * (exact - forward_window(model, ids, "int8").log_softmax(-1))).sum(-1).mean())  # noqa: E731
    plain = apart()
    turn_keys(model, "int8")
    assert all(layer.attention.turn is not None for layer in model.layers)
    assert apart() * 20 < plain
    torch.testing.assert_close(forward_window(model, ids, "fp32").log_softmax(-1), exact)  # caches of 16 bits are not turned


def test_plain_models_are_left_alone_by_int8(tmp_path):
    make_tiny(tmp_path, "llama")
    model = load_model(open_checkpoint(tmp_path), "cpu")
    assert turn_keys(model, "int8").layers[0].attention.turn is None
    assert turn_keys(model, None).layers[0].attention.turn is None
    first = turn_keys(model, "int4").layers[0].attention.turn
    again = turn_keys(model, "int4").layers[0].attention.turn
    assert torch.equal(first.k, again.k)
    assert torch.equal(first.v, again.v)


@pytest.mark.parametrize(("name", "bytes_per_head"), [("int4", 64 // 2 + 8), ("int8", 64 + 4), ("fp8", 64), ("bf16", 128)])
def test_a_token_costs_what_is_allocated(name, bytes_per_head):
    shape = SimpleNamespace(num_layers=3, num_kv_heads=2, head_dim=64)
    assert bytes_per_token(shape, name) == 2 * 3 * 2 * bytes_per_head
    tensors = [t for kv in allocate(shape, name, 5, 16, "cpu") for t in (kv.k, kv.v, kv.k_params, kv.v_params) if t is not None]
    assert sum(t.numel() * t.element_size() for t in tensors) == 5 * 16 * bytes_per_token(shape, name)

"""The start-up test of kernels: a right one passes, a wrong or broken one is refused with the reason."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nybble.engine.kvcache import allocate
from nybble.formats.numerics import random_qtensor
from nybble.formats.spec import FP8, SCHEMES, Spec, Tile
from nybble.kernels import cpu, reference, selftest
from nybble.kernels.registry import LinearKernel, LinearShape
from nybble.kernels.types import LayerKV, Step

KERNELS = cpu.kernels()


def asked(scheme: str) -> LinearShape:
    return LinearShape(SCHEMES[scheme], 1000, 4096, torch.device("cpu"), torch.float32)


def taken(scheme: str) -> LinearKernel:
    return next(kernel for kernel in KERNELS if kernel.accepts(asked(scheme)) is None)


@pytest.mark.skipif(not KERNELS, reason="no C compiler here")
@pytest.mark.parametrize("scheme", ["w4a8", "w4a8_g128", "w8a8", "w4a16_g128"])
def test_a_kernel_that_is_right_passes_and_a_wrong_one_does_not(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    kernel = taken(scheme)
    assert selftest.failure(kernel, asked(scheme)) is None
    off_by_a_row = replace(kernel, run=lambda packed, x: kernel.run(packed, x).roll(1, -1))
    with caplog.at_level(logging.WARNING):
        assert "off by" in (selftest.failure(off_by_a_row, asked(scheme)) or "")
    assert kernel.name in caplog.text


@pytest.mark.skipif(not KERNELS, reason="no C compiler here")
def test_not_a_number_and_exceptions_are_failures() -> None:
    kernel = taken("w4a8")
    nothing = replace(kernel, run=lambda packed, x: kernel.run(packed, x) * float("nan"))
    assert "nan" in (selftest.failure(nothing, asked("w4a8")) or "")

    def broken(packed: object, x: object) -> torch.Tensor:
        raise RuntimeError("no kernel image is available")

    assert "no kernel image" in (selftest.failure(replace(kernel, run=broken), asked("w4a8")) or "")


@pytest.mark.parametrize(
    ("tile", "scales"), [((None, None), (1, 1)), ((1, None), (300, 1)), ((1, 128), (300, 2)), ((128, 128), (3, 2))]
)
def test_made_up_weights_have_the_scales_their_format_has(tile: Tile, scales: tuple[int, int]) -> None:
    weight = random_qtensor(Spec(FP8, tile), (300, 256), torch.Generator().manual_seed(0), torch.float32)
    assert weight.scale.shape == scales


def test_row_kernels_are_tried_too(caplog: pytest.LogCaptureFixture) -> None:
    cpu_device = torch.device("cpu")
    assert selftest.rows_failure(reference.OPS, cpu_device) is None

    def next_row(*arguments: object) -> object:
        rows = reference.silu_mul(*arguments)
        return rows._replace(scale=rows.scale.roll(1))

    with caplog.at_level(logging.WARNING):
        wrong = replace(reference.OPS, name="wrong", silu_mul=next_row)
        assert "SiLU of 33 rows is off" in (selftest.rows_failure(wrong, cpu_device) or "")
    assert "'wrong'" in caplog.text


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "fp8"])
def test_attention_that_is_off_is_refused(name: str, window: int) -> None:
    shape = SimpleNamespace(num_layers=1, num_kv_heads=2, head_dim=64)
    (kv,) = allocate(shape, name, 1, 16, torch.device("cpu"))
    selftest.check_attention(reference.OPS, kv, 4, window, torch.float32)
    assert not kv.k.view(torch.uint8).any()

    def one_token_short(q: torch.Tensor, kv: LayerKV, step: Step, scale: float, window: int) -> torch.Tensor:
        shorter = torch.where(step.context_len == 70, 69, step.context_len)
        return reference.attention(q, kv, replace(step, context_len=shorter), scale, window)

    with pytest.raises(RuntimeError, match=f"attention .* of a {name} cache on cpu are off by"):
        selftest.check_attention(replace(reference.OPS, attention=one_token_short), kv, 4, window, torch.float32)

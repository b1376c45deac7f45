"""The start-up test of kernels: a right one passes, a wrong or broken one is refused with the reason."""

import logging
from dataclasses import replace

import pytest
import torch

from nybble.formats.spec import SCHEMES
from nybble.kernels import cpu, selftest
from nybble.kernels.registry import LinearKernel, LinearShape

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

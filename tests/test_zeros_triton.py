"""Zero points under int8 activations: the two small kernels in Triton's interpreter, and compiled for every GPU we name."""

import os
import subprocess
import sys

import pytest
import torch

from nybble.formats.numerics import quantize_rows
from nybble.kernels.types import Rows

triton = pytest.importorskip("triton")
from nybble.kernels import zeros_triton  # noqa: E402

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(INTERPRETING, reason="about the compiled mode")
def test_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")
@pytest.mark.parametrize(("rows", "k", "group", "outputs"), [(1, 256, 32, 64), (5, 384, 128, 200), (9, 320, 320, 130),
                                                             (3, 96, 96, 7)])
def test_what_zeros_add_is_taken_off(rows, k, group, outputs):
    g = torch.Generator().manual_seed(0)
    x = Rows(*quantize_rows(torch.randn(rows, k, generator=g)))
    y, correction = torch.randn(rows, outputs, generator=g), torch.randn(k // group, outputs, generator=g)
    found = zeros_triton.subtract(y, x, correction, torch.float32)
    sums = x.codes.double().view(rows, k // group, group).sum(-1) * x.scale.double()[:, None]
    expected = y.double() - sums @ correction.double()
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    alone = zeros_triton.subtract(y[:1], Rows(x.codes[:1], x.scale[:1]), correction, torch.float32)
    assert torch.equal(alone, found[:1])  # other rows change nothing


@pytest.mark.skipif(INTERPRETING, reason="about the compiled mode")
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64)])
def test_compiles(target):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for kernel, types, constants in (
        (zeros_triton._sum, {"codes_ptr": "*i8", "scale_ptr": "*fp32", "sums_ptr": "*fp32", "groups": "i32"},
         {"GROUP": 128, "WIDTH": 128, "LANES": 16}),
        (zeros_triton._subtract, {"y_ptr": "*fp32", "sums_ptr": "*fp32", "correction_ptr": "*fp32", "out_ptr": "*bf16",
                                  "rows": "i32", "outputs": "i32", "groups": "i32"}, {"ROWS": 8, "COLUMNS": 128, "AHEAD": 8}),
    ):
        names = kernel.arg_names
        signature = {name: "constexpr" if name in constants else types[name] for name in names}
        source = ASTSource(fn=kernel, signature=signature, constexprs={(names.index(n),): v for n, v in constants.items()})
        assert triton.compile(source, target=GPUTarget(*target)).asm

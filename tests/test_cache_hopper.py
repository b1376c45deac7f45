"""The cache's CUDA kernels on Hopper, without one: what fits, arguments in their places, machine code without spills. Bits:
tests/gpu/test_ops_gpu.py."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ops_cases import attention_case, poisoned_cache
from sass import SPILL, assemble

from nybble.kernels import cache_hopper as cache

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dim", "rotary", "dtype", "fits"),
    [("int8", 128, 128, BF16, True), ("int4", 80, 80, BF16, True), ("fp8", 96, 96, torch.float16, True),
     ("fp8_e5m2", 256, 256, BF16, True), ("bf16", 64, 64, BF16, True), ("bf16", 64, 64, torch.float16, False),
     ("fp32", 64, 64, torch.float32, False), ("int8", 128, 64, BF16, False), ("int8", 24, 24, BF16, False)],
)
def test_which_caches_are_written_here(name: str, dim: int, rotary: int, dtype: torch.dtype, fits: bool) -> None:
    kv = poisoned_cache(name, 2, 2, 16, dim)
    assert cache.fits(torch.zeros(3, 8 * dim, dtype=dtype), kv, dim, rotary) is fits
    assert not cache.fits(torch.zeros(0, 8 * dim, dtype=dtype), kv, dim, rotary)


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 160, 256])
def test_a_head_has_as_many_threads_as_sixteens_of_channels(dim: int) -> None:
    lanes = cache.lanes_of(dim)
    assert 32 % lanes == 0
    assert lanes * 16 >= dim > lanes * 8 or lanes == 2


@pytest.mark.parametrize("tokens", [1, 128, 1000])
def test_programs_hold_all_heads_of_a_token_and_hardly_more(tokens: int) -> None:
    assert cache.turns_of(40, 40, 128) == 10 + 10 + 10  # four heads at once
    assert cache.turns_of(41, 8, 128) == 11 + 2 + 2
    assert cache.turns_of(3, 1, 256) == 2 + 1 + 1
    for turns in (3, 12, 15, 30, 100):
        warps, items = cache.shape_for(tokens, turns)
        programs = -(-turns // (warps * items))
        assert (warps - 1) * items * programs < turns <= warps * items * programs
        assert warps <= 32


@pytest.mark.parametrize(("name", "rows", "tokens", "bytes_of_a_page"),
                         [("int8", 65, 65, 64 * 2 * (128 + 4)), ("int4", 128, 128, 64 * 2 * (64 + 8)), ("int8", 64, 64, None),
                          ("int8", 128, 129, None), ("bf16", 128, 128, None)])
def test_the_cache_moves_ahead_of_many_rows(name: str, rows: int, tokens: int, bytes_of_a_page: int | None) -> None:
    step = SimpleNamespace(num_decode=rows, slots=torch.zeros(tokens))
    pages = 28 * 2**20 // bytes_of_a_page if bytes_of_a_page else 0
    assert cache.pages_ahead(poisoned_cache(name, 2, 2, 64, 128), step) == pages


def test_gather_takes_what_the_portable_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = pytest.importorskip("nybble.kernels.attention_triton", reason="needs Triton")
    launched: list[tuple] = []
    monkeypatch.setattr(cache.nvrtc, "launch", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(cache.nvrtc, "kernel", lambda name, device, shared_bytes, source, *given: given)
    monkeypatch.setattr(attention, "_gather_of", lambda *_: cache.Gather(torch.device("cpu")))
    q, kv, step = attention_case("int8", [130, 40, 300], [1, 9, 90], 6, 3, 16, 32, dtype=BF16)
    portable: list[dict] = []

    def launch(kernel, grid, *arguments, **options):
        if isinstance(kernel, cache.Gather):
            portable.append(dict(zip(attention._gather.arg_names, arguments)))
            kernel[grid](*arguments, **options)[grid](*(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments))

    attention.prompt(q, kv, step, 0.2, 0, torch.empty_like(q), launch=launch)
    asked = portable[0]
    assert len(launched) == 2  # of tensors, and again of addresses
    for defined, programs, threads, *_, (given,), _ in launched:
        kind, heads, dim, block_size, tile = defined
        assert [kind, heads, dim, block_size, tile] == [asked[n] for n in ("KIND", "HEADS", "DIM", "BLOCK_SIZE", "TILE")]
        assert threads == 256
        assert programs == 2 * 3 * 2 * 384 // 128  # K and V, heads, rows, positions
        for name, _ in given._fields_:
            value = asked.get(f"{name}_ptr", asked.get(name, 3))
            assert getattr(given, name) == (value.data_ptr() if isinstance(value, torch.Tensor) else value), name


def test_what_steps_ask_for_is_compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict] = []
    monkeypatch.setattr(cache.nvrtc, "compile_ahead", lambda wanted: started.extend(defines for _, defines in wanted))
    kv = poisoned_cache("int4", 2, 8, 64, 128)
    cache.compile_ahead(kv, 32, torch.float32, 128)
    cache.compile_ahead(poisoned_cache("fp32", 2, 8, 64, 128), 32, BF16, 128)
    assert not started
    cache.compile_ahead(kv, 32, BF16, 128)
    shapes = {cache.shape_for(tokens, cache.turns_of(32, 8, 128)) for tokens in range(1, 3000)}
    assert {(each["WARPS"], each["ITEMS"]) for each in started[:-1]} == shapes
    assert started[-1] == cache.gather_source("int4", 8, 128, 64, 128)[1]


@pytest.mark.parametrize("kind", list(cache.KINDS))
@pytest.mark.parametrize("dim", [128, 80])
def test_machine_code(kind: str, dim: int, tmp_path: Path) -> None:
    lines = assemble(*cache.rope_source(cache.Shape(5, 3), kind, 40, 40, dim, 64, 0), tmp_path)
    loads = [line for line in lines if re.search(r"\bLDG\.E\.(64|128) ", line)]
    assert len(loads) == (3 * 4 + 4 if kind == "int4" else 3 * 2 + 4)  # of three heads and the angles, each once
    lines += assemble(*cache.gather_source(kind, 40, dim, 64, 128), tmp_path)
    assert not [line for line in lines if SPILL.match(line)]
    assert not [line for line in lines if re.search(r"\bI2F(?!\.U32\.RP)", line)]  # RP: a division

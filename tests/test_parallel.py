"""Tensor parallel: processes over gloo against one process, and against transformers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sass import SPILL, assemble
from tiny import make_tiny, token_ids

from nybble.engine.config import EngineConfig
from nybble.engine.load import open_engine
from nybble.engine.messages import SamplingParams
from nybble.evals import evaluate
from nybble.formats.qtensor import dequantize
from nybble.formats.spec import SCHEMES
from nybble.kernels import ops_hopper, peers_hopper
from nybble.llm import LLM
from nybble.models import dummy_model, forward_window, load_model, read_config, share_of
from nybble.nn.parallel import ALONE, Group, new_meeting, take_rows

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 262, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SOME = ("16bit", "w4a8", "w4a8_g128", "w4a8_qqq_g128", "w8a8", "w4a16", "w4a16_zero_g128", "w8a16", "fp8")
CASES = [(scheme, "int8") for scheme in SOME] + [("w4a8", "int4"), ("w4a8", "fp8"), ("w4a8+w8a8", "fp32")]
RANK = """
import os, sys, torch
from test_parallel import CASES, logits
from nybble.nn.parallel import open_group
torch.set_num_threads(1)
rank, folder, ports = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
for size, port in zip((2, 4), ports):
    if rank < size:
        group = open_group(rank, size, torch.device("cpu"), port.encode())
        found = [logits(*case, group) for case in CASES]
        if rank == 0:
            torch.save(found, f"{folder}/{size}")
        group.least(0)
os._exit(0)
"""


def logits(scheme: str, kv: str, group: Group = ALONE) -> torch.Tensor:
    from nybble.models import turn_keys

    model = turn_keys(dummy_model(SHAPE, scheme, "cpu", group=group), kv)
    return forward_window(model, token_ids(3, 24, vocab_size=262), kv)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[torch.Tensor]]:
    """Logits of every case by two and by four ranks (of which two share a KV head each)."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    meetings = [new_meeting(size, CPU) for size in (2, 4)]
    ports = [port.decode() for port, _ in meetings]
    processes = [subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(folder), *ports], env=environment)
                 for rank in range(4)]
    assert [process.wait(90) for process in processes] == [0] * 4
    return {size: torch.load(folder / str(size)) for size in (2, 4)}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", range(len(CASES)), ids=["-".join(case) for case in CASES])
def test_logits_are_those_of_one_process(found: dict[int, list[torch.Tensor]], case: int, size: int) -> None:
    alone, ranks = logits(*CASES[case]), found[size][case]
    act = SCHEMES[CASES[case][0].partition("+")[0]].act
    if act is not None and act.num.kind == "int":  # integer sums: to the bit
        assert torch.equal(ranks, alone)
    else:  # the CPU's float products add in an order that depends on a weight's number of rows
        torch.testing.assert_close(ranks, alone, rtol=0, atol=2e-2 * alone.std().item())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A checkpoint with KV heads for two, prompts, and what transformers makes of them."""
    path = tmp_path_factory.mktemp("tiny")
    model, prompts = make_tiny(path, "qwen3"), token_ids(5, 21)
    wanted = model.generate(prompts, max_new_tokens=10, min_new_tokens=10, do_sample=False)[:, 21:]
    return path, prompts.tolist(), wanted.tolist()


def options(**changes: object) -> dict:
    return {"max_batch": 3, "num_blocks": 40, "block_size": 16, "max_batched_tokens": 32, "kv": "fp32", "seed": 0, **changes}


def test_an_engine_of_ranks_answers_as_one_alone_and_as_transformers(tiny: tuple) -> None:
    path, prompts, wanted = tiny
    drawn = SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.5, logprobs=2, max_tokens=10, ignore_eos=True, seed=7)
    answers = []
    for size in (1, 2):
        with LLM(path, **options(tensor_parallel=size)) as llm:
            greedy = [one.token_ids for one in llm.generate(prompts, GREEDY)]
            assert greedy == wanted
            alone = [llm.generate(prompt, GREEDY).token_ids for prompt in prompts[:2]]
            assert alone == wanted[:2]
            answers.append([one.token_ids for one in llm.generate(prompts, drawn)])
            processes = [] if size == 1 else llm.engine.runner.tell.__self__._processes
    assert answers[0] == answers[1]
    assert [process.poll() is not None for process in processes] == [True]


def test_an_evaluation_by_ranks_is_that_of_one(tiny: tuple, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The same tokens whatever the number of ranks. " * 20)
    alone, ranks = (evaluate(tiny[0], [f"ppl:{text}"], window=64, max_windows=3, device="cpu", keep=True, tensor_parallel=size)
                    for size in (1, 2))
    assert ranks.results[0].scores["nll"] == pytest.approx(alone.results[0].scores["nll"], rel=1e-5)
    beside = evaluate(tiny[0], [f"ppl:{text}"], window=64, max_windows=3, device="cpu", against=ranks)
    assert beside.divergences["ppl:text.txt"].kl_mean < 1e-6


def test_a_dead_rank_ends_the_engine_and_the_others(tiny: tuple) -> None:
    path, prompts, _ = tiny
    llm = LLM(path, **options(tensor_parallel=4))
    llm.generate(prompts[0], GREEDY)
    processes = llm.engine.runner.tell.__self__._processes
    processes[1].send_signal(signal.SIGKILL)
    assert "rank 2 ended" in llm.generate(prompts[0], GREEDY).error
    for process in processes:
        process.wait(10)
    assert "rank 2 ended" in llm.engine.runner.lost
    with pytest.raises(RuntimeError, match="rank 2 ended"):
        llm.generate(prompts[0], GREEDY)


def test_ranks_end_with_a_killed_parent(tiny: tuple) -> None:
    text = ("import sys, time\nfrom nybble.llm import LLM\n"
            f"llm = LLM({str(tiny[0])!r}, max_batch=2, tensor_parallel=2)\n"
            "print(llm.engine.runner.tell.__self__._processes[0].pid, flush=True)\ntime.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the rank outlives its parent"
        time.sleep(0.1)


def test_numbers_of_ranks_that_have_no_equal_shares(tiny: tuple) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel = 3 does not divide .* 4 attention heads.* 1, 2, 4 would do"):
        open_engine(tiny[0], "cpu", EngineConfig(tensor_parallel=3))
    with pytest.raises(ValueError, match="wants 1 or more"):
        EngineConfig(tensor_parallel=0)
    shape = read_config(SHAPE)
    shares = [share_of(shape, size) for size in (1, 2, 4)]
    assert [(one.num_heads, one.num_kv_heads, one.twins) for one in shares] == [(4, 2, 1), (2, 1, 1), (1, 1, 2)]


def test_a_rank_that_cannot_load_says_why(tiny: tuple) -> None:
    with pytest.raises((ValueError, RuntimeError), match="max_context"):
        LLM(tiny[0], **options(tensor_parallel=2, max_context=10**6))


@given(st.integers(0, 5), st.integers(0, 3))
def test_shares_cover_everything_once(units: int, power: int) -> None:
    size, unit = 2**power, 3
    count = size * (units + 1)
    rows = [i for rank in range(size) for i in range(count * unit)[Group(rank, size, CPU, None, None).share(count, unit)]]
    assert rows == list(range(count * unit))


def test_what_a_rank_takes_is_part_of_the_whole() -> None:
    weight = dummy_model(SHAPE, "w4a8_g128", "cpu", editable=True).layers[0].part("q_proj").weight
    rows = Group(1, 4, CPU, None, None).share(4, 64)
    assert torch.equal(dequantize(take_rows(weight, rows)), dequantize(weight)[64:128])


def test_a_checkpoint_read_for_one_rank_holds_its_rows(tiny: tuple) -> None:
    from nybble.checkpoint import open_checkpoint

    group = Group(1, 2, CPU, None, None)
    whole, part = (load_model(open_checkpoint(tiny[0]), "cpu", editable=True, group=one) for one in (ALONE, group))
    for name, rows in (("q_proj", slice(128, 256)), ("k_proj", slice(64, 128)), ("v_proj", slice(64, 128)),
                       ("o_proj", slice(None)), ("gate_proj", slice(128, 256)), ("up_proj", slice(128, 256)),
                       ("down_proj", slice(64, 128))):  # fmt: skip
        assert torch.equal(part.layers[1].part(name).weight, whole.layers[1].part(name).weight[rows])
    assert torch.equal(part.head.weight, whole.head.weight[192:])
    assert torch.equal(part.embedding.table, whole.embedding.table)


@pytest.mark.parametrize("ranks", [2, 8])
def test_peers_kernels_keep_their_values_in_registers_and_flags_beside_data(ranks: int, tmp_path: Path) -> None:
    lines = assemble(*peers_hopper.source_and_defines(ranks), tmp_path)
    assert not any(SPILL.match(line) for line in lines)
    posted = [line for line in lines if re.match(r"(@\S+ )?STG?\.E\.128\.STRONG\.SYS", line)]
    assert len(posted) >= 2 * (ranks - 1)  # 16 bytes at once, or a flag might arrive before its data


def test_parts_of_a_row_are_not_quantized_by_a_kernel_that_the_row_is_too_wide_for() -> None:
    """The rows of small batches are whole: theirs and a large batch's then come from the same kernel."""
    part = torch.zeros(200, 2 * 26624, dtype=torch.bfloat16)  # of Llama-3.1-405B, by two
    assert ops_hopper.fits(ops_hopper.SILU, part, 26624)
    assert not ops_hopper.fits(ops_hopper.SILU, part, 53248)
    asked: list[torch.Tensor] = []
    assert ops_hopper.silu_mul_part(part, 0, lambda most: asked.append(most) or most, 2) is None
    assert not asked

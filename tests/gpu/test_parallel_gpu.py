"""Tensor parallel over NCCL and peer memory on two GPUs, against one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

from nybble.engine.messages import SamplingParams, Submit
from nybble.llm import LLM
from nybble.quantize import Recipe, quantize_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny import make_tiny, token_ids  # noqa: E402

pytestmark = pytest.mark.gpu
HOPPER = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
                            reason="wants a Hopper GPU")


@HOPPER
@pytest.mark.parametrize("hadamard", [0, 256])
@pytest.mark.parametrize("width", [6912, 11008])
def test_parts_of_rows_are_quantized_as_the_rows_are(width: int, hadamard: int) -> None:
    from nybble.kernels import ops_hopper

    halves = torch.randn(300, 2, 2, width, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).bfloat16()
    wanted = ops_hopper.silu_mul(halves.flatten(1), True, hadamard)
    own = [halves[:, :, rank].flatten(1) for rank in range(2)]
    most: list[torch.Tensor] = []
    for part in own:
        ops_hopper.silu_mul_part(part, hadamard, lambda found: most.append(found.clone()) or found, 2)
    largest = torch.stack(most).amax(0)
    parts = [ops_hopper.silu_mul_part(part, hadamard, lambda _: largest, 2) for part in own]
    assert torch.equal(torch.cat([part.codes for part in parts], 1), wanted.codes)
    assert all(torch.equal(part.scale, wanted.scale) for part in parts)


@HOPPER
@pytest.mark.parametrize("ranks", [2, 4])
def test_peers_put_slices_side_by_side(ranks: int) -> None:
    """Ranks of one GPU, each on a stream of its own."""
    from nybble.kernels import peers_hopper

    device = torch.device("cuda", 0)
    rooms = [torch.zeros(peers_hopper.room_bytes(ranks), dtype=torch.uint8, device=device) for _ in range(ranks)]
    peers = [peers_hopper.Peers(rank, [room.data_ptr() for room in rooms], device) for rank in range(ranks)]
    streams = [torch.cuda.Stream() for _ in range(ranks)]
    shapes = [(1, 64, 1), (1, 13824, 2), (3, 2560, 1), (16, 2560, 1), (16, 13824, 2), (40, 13824, 2), (1, 64, 2), (7, 6912, 1)]
    for turn in range(60):
        tokens, width, parts = shapes[turn % len(shapes)]
        generator = torch.Generator(device).manual_seed(turn)
        slices = [torch.randn(tokens, width, device=device, generator=generator).bfloat16() for _ in range(ranks)]
        torch.cuda.synchronize()
        found = []
        for rank, stream in enumerate(streams):
            assert peers[rank].fits(slices[rank], parts)
            with torch.cuda.stream(stream):
                found.append(peers[rank].columns(slices[rank], parts))
        deadline = time.monotonic() + 5
        while not all(stream.query() for stream in streams) and time.monotonic() < deadline:
            pass
        for one in peers:
            one.lost[0] = int(time.monotonic() >= deadline)
        torch.cuda.synchronize()
        assert time.monotonic() < deadline, "a rank waits for ever"
        wanted = torch.cat([one.unflatten(1, (parts, -1)) for one in slices], 2).flatten(1)
        assert all(torch.equal(one, wanted) for one in found)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder / "16bit", dtype=torch.bfloat16, hidden_size=512, intermediate_size=1024, num_attention_heads=8)
    quantize_checkpoint(folder / "16bit", folder / "w4a8", Recipe(method="rtn", transform="none"), device="cpu")
    return folder / "w4a8"


def engine(model: Path, size: int) -> LLM:
    return LLM(model, kv="int8", max_batch=8, max_batched_tokens=256, kv_memory=1e9, seed=0, tensor_parallel=size)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="wants two GPUs")
def test_two_gpus_give_the_tokens_of_one_until_one_dies(model: Path) -> None:
    prompts = token_ids(8, 100).tolist()
    drawn = [SamplingParams(temperature=0.9, top_p=0.9, presence_penalty=0.5, max_tokens=24, seed=i) for i in range(8)]
    answers = []
    for size in (1, 2):
        llm = engine(model, size)
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        found = [llm.generate(prompts, greedy), llm.generate(prompts, drawn), [llm.generate(prompts[0], greedy)]]
        answers.append([[one.token_ids for one in some] for some in found])
    assert answers[1] == answers[0]
    assert answers[1][2][0] == answers[1][0][0]
    llm.engine.runner.tell.__self__._processes[0].kill()
    llm.engine.submit(Submit("late", [3, 4, 5], SamplingParams(max_tokens=100, ignore_eos=True)))
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        list(iter(llm.engine.step, None))

"""Quantization on a GPU: the compiled inner loop against torch's on a CPU, and whole runs against the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nybble.checkpoint import open_checkpoint
from nybble.formats.spec import FP8, INT4, INT8, Num
from nybble.models import forward_window, load_model
from nybble.quantize import Recipe, quantize_checkpoint
from nybble.quantize.gptq import one_block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "one", "dog", "ate", "his", "hat", "while", "it", "rained"]


@pytest.mark.parametrize("num", [INT4, INT8, FP8], ids=lambda n: n.name)
@pytest.mark.parametrize("sweep", [False, True])
def test_a_block_on_the_gpu_is_the_block_on_the_cpu(num: Num, sweep: bool):
    random = torch.Generator().manual_seed(3)
    k, n = 300, 1001
    x = torch.randn(900, k, generator=random)
    matrix = (x.t() @ x / 900 + torch.eye(k)).contiguous()
    scale = torch.rand(k, n, generator=random) * 0.1 + 0.01
    state = torch.randn(k, n, generator=random) * 0.3 * num.qmax / 7
    start = torch.randint(-7, 8, (k, n), generator=random).float()
    here, there = start.clone(), start.cuda()
    moved = one_block(state.clone(), here, scale, matrix, 128, 256, num, sweep)
    on_gpu = one_block(state.cuda(), there, scale.cuda(), matrix.cuda(), 128, 256, num, sweep).cpu()
    same = (here == there.cpu()).all(0)  # rounding a tie the other way changes the rest of its row
    assert same.float().mean() > 0.98
    torch.testing.assert_close(on_gpu[:, same], moved[:, same], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(WORDS) + 1, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
                         tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.txt").write_text(" ".join(WORDS[i * i % 15] for i in range(4000)))
    return folder


@pytest.mark.parametrize("recipe", [
    Recipe(samples=8, sequence_length=128), Recipe(samples=8, sequence_length=128, bits=5.0),
    Recipe(scheme="w8a8", samples=8, sequence_length=128), Recipe(scheme="fp8", samples=8, sequence_length=128),
    Recipe(group=64, samples=8, sequence_length=128, transform="smooth"),
    Recipe(scheme="fp8", samples=8, sequence_length=128, static_activations=True),
    Recipe(scheme="w8a8", samples=8, sequence_length=128, online_hadamard=True),
    Recipe(samples=8, sequence_length=128, learn_scales=2),
], ids=lambda r: f"{r.scheme}-{r.group}-{r.bits}-{r.transform}-{r.static_activations}-{r.online_hadamard}-{r.learn_scales}")
def test_a_run_on_the_gpu_is_as_good_as_on_the_cpu_and_repeats_its_bytes(checkpoint: Path, tmp_path: Path, recipe: Recipe):
    text = checkpoint / "text.txt"
    slow = quantize_checkpoint(checkpoint, tmp_path / "cpu", recipe, "int8", text, "cpu")
    fast = quantize_checkpoint(checkpoint, tmp_path / "gpu", recipe, "int8", text, "cuda")
    assert fast.bits_per_weight == pytest.approx(slow.bits_per_weight, abs=0.3 if recipe.bits else 1e-9)
    if not recipe.bits:
        for name, error in slow.errors.items():
            assert fast.errors[name] == pytest.approx(error, rel=0.25, abs=1e-4)
    quantize_checkpoint(checkpoint, tmp_path / "again", recipe, "int8", text, "cuda")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (tmp_path / "gpu" / "model.safetensors").read_bytes()
    ids = torch.arange(48)[None] % 15
    before = forward_window(load_model(open_checkpoint(checkpoint), "cpu"), ids)
    after = forward_window(load_model(open_checkpoint(tmp_path / "gpu"), "cuda"), ids).cpu()
    assert (after - before).square().mean() < (0.02 if recipe.scheme in ("w8a8", "fp8") else 0.25) * before.square().mean()

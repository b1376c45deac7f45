"""Perplexity against transformers, and the arithmetic of comparisons."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nybble.checkpoint import open_checkpoint
from nybble.evals import Comparison, Measured, Perplexity, compare, evaluate_perplexity, perplexity
from nybble.models import load_model
from nybble.quantize import Recipe, quantize_checkpoint

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "that", "dog", "ate", "his", "hat", "while", "one", "bird", "sang", "in",
         "some", "tree", "by", "an", "open", "sea"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(WORDS) + 1, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
                         tie_word_embeddings=False, initializer_range=0.4, bos_token_id=None, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, len(WORDS), (300,), generator=random).tolist()
    (folder / "text.txt").write_text(" ".join(WORDS[i] for i in ids))
    return folder


def ids_of(folder: Path) -> list[int]:
    return [WORDS.index(word) for word in (folder / "text.txt").read_text().split()]


def test_perplexity_is_that_of_transformers(checkpoint: Path):
    from transformers import LlamaForCausalLM

    ids = ids_of(checkpoint)
    reference = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    losses = []
    for start in (0, 64, 128, 192):  # the last 44 of 300 tokens fill no window
        window = torch.tensor(ids[start : start + 64])[None]
        with torch.no_grad():
            losses.append(float(reference(window, labels=window).loss))
    shares: list[float] = []
    found = perplexity(load_model(open_checkpoint(checkpoint), "cpu"), ids, 64, progress=lambda what, done: shares.append(done))
    assert found.window_nll == pytest.approx(losses, rel=1e-5)
    assert found.ppl == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)
    assert shares == [0, 0.25, 0.5, 0.75, 1.0]
    from_files = evaluate_perplexity(checkpoint, checkpoint / "text.txt", 64, max_windows=2, device="cpu")
    assert from_files.window_nll == pytest.approx(losses[:2], rel=1e-5)
    assert "2 windows of 64 tokens" in str(from_files)


def test_kv_types_are_in_effect(checkpoint: Path):
    model, ids = load_model(open_checkpoint(checkpoint), "cpu"), ids_of(checkpoint)
    found = {kv: perplexity(model, ids, 64, kv).nll for kv in ("fp32", "int8", "int4")}
    assert 0 < abs(found["int8"] - found["fp32"]) < 0.01
    assert abs(found["int8"] - found["fp32"]) < abs(found["int4"] - found["fp32"])


def test_short_texts_and_bad_windows(checkpoint: Path):
    model, ids = load_model(open_checkpoint(checkpoint), "cpu"), ids_of(checkpoint)
    assert perplexity(model, ids[:20], 64).window == 20
    assert perplexity(model, ids, 4096).window == 128  # the model's context
    for tokens, window, most in ((ids[:1], 8, None), (ids, 1, None), (ids, 8, 0)):
        with pytest.raises(ValueError, match="wants"):
            perplexity(model, tokens, window, max_windows=most)
    with pytest.raises(FileNotFoundError):
        evaluate_perplexity(checkpoint, checkpoint / "nothing.txt")


def test_losses_are_paired_by_window():
    def row(*nll: float) -> Measured:
        return Measured("m", "16bit", "bf16", 100.0, 100, 10, Perplexity(nll, 8, None, 0.0))

    both = Comparison((row(2.0, 4.0, 6.0), row(2.1, 4.2, 6.3)))
    mean, error = both.loss(both.rows[1])
    assert mean == pytest.approx(0.2)
    assert error == pytest.approx(0.1 / math.sqrt(3))  # not that of the windows' own spread, which is 2
    assert both.rows[0].perplexity.standard_error == pytest.approx(2 / math.sqrt(3))


def test_compare_measures_sizes_and_losses(checkpoint: Path, tmp_path: Path):
    quantize_checkpoint(checkpoint, tmp_path / "out", Recipe(method="rtn", group=32), "int8", device="cpu")
    found = compare([checkpoint, tmp_path / "out"], checkpoint / "text.txt", window=64, device="cpu")
    before, after = found.rows
    linears = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    others = 2 * 24 * 64 + 5 * 64
    assert before.weight_bytes == 4 * (linears + others)
    assert after.weight_bytes == 4 * others + linears * (4 + 16 / 32) / 8
    assert (before.kv, after.kv) == ("fp32", "int8")
    assert before.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert after.kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)
    assert after.disk_bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert found.loss(after)[0] == pytest.approx(after.perplexity.nll - before.perplexity.nll)
    assert after.perplexity.kv == "int8"
    assert "w4a8_g32" in str(found)

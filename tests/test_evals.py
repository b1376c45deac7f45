"""Evaluation against transformers, published statistics, and the real files of the tasks."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nybble.checkpoint import open_checkpoint
from nybble.cli import app
from nybble.evals import Divergence, Evaluation, TaskResult, comparison, deltas, evaluate, perplexity
from nybble.evals.demo import run_demo
from nybble.evals.evaluate import mcnemar, paired_mean, paired_share, t_quantile
from nybble.evals.examine import examine
from nybble.evals.harness import harness_model
from nybble.evals.likelihood import Subject, likelihoods, open_subject
from nybble.evals.report import report, verdict
from nybble.evals.tasks import marks, read_task, score_task
from nybble.formats.qtensor import dequantize
from nybble.quantize import Recipe, quantize_checkpoint
from nybble.serve.protocol import checkpoint_sampling

SHARED = Path(__file__).parents[2] / "shared" / "data"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "that", "dog", "ate", "his", "hat", "while", "one", "bird", "sang", "in",
         "some", "tree", "by", "an", "open", "sea", "Question:", "Answer:"]
LIMIT = 128


def make_model(folder: Path, seed: int, hidden_size: int = 64) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=len(WORDS) + 1, hidden_size=hidden_size, intermediate_size=96, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=LIMIT,
                         tie_word_embeddings=False, initializer_range=0.4, bos_token_id=None, eos_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "?"])}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 23, (300,), generator=random).tolist()
    (folder / "text.txt").write_text(" ".join(WORDS[i] for i in ids))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="module")
def quantized(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quantized") / "out"
    quantize_checkpoint(checkpoint, out, Recipe(method="rtn", group=32, transform="none"), "int8", device="cpu")
    return out


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return open_subject(checkpoint, "fp32", "cpu")


def ids_of(folder: Path) -> list[int]:
    return [WORDS.index(word) for word in (folder / "text.txt").read_text().split()]


def reference(folder: Path) -> Any:
    """-> log-probabilities in float64 [L, V] of a list of ids, by transformers."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def run(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return run


def expected(run: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = (context + continuation)[-LIMIT - 1 :]
    rows = run(ids[:-1])[-len(continuation) :]
    return float(sum(row[i] for row, i in zip(rows, continuation))), [int(row.argmax()) for row in rows] == continuation


def test_perplexity_is_that_of_transformers(checkpoint: Path):
    ids, run = ids_of(checkpoint), reference(checkpoint)
    losses = []
    for start in (0, 64, 128, 192):  # the last 44 of 300 tokens fill no window
        window = ids[start : start + 64]
        losses.append(-sum(float(row[i]) for row, i in zip(run(window), window[1:])) / 63)
    shares: list[float] = []
    found = perplexity(open_subject(checkpoint, device="cpu"), ids, 64, progress=lambda what, done: shares.append(done))
    assert found.window_nll == pytest.approx(losses, rel=1e-5)
    assert found.ppl == pytest.approx(math.exp(sum(losses) / 4), rel=1e-5)
    assert shares == [0, 0.25, 0.5, 0.75, 1.0]
    from_files = evaluate(checkpoint, [f"ppl:{checkpoint / 'text.txt'}"], window=64, max_windows=2, device="cpu")
    assert from_files.results[0].scores["nll"] == pytest.approx(losses[:2], rel=1e-5)
    assert f"{math.exp(sum(losses[:2]) / 2):.3f}" in str(from_files)


def test_kv_types_are_in_effect(checkpoint: Path, subject: Subject):
    ids = ids_of(checkpoint)
    subjects = {kv: open_subject(checkpoint, kv, "cpu") for kv in ("fp32", "int8", "int4")}
    found = {kv: perplexity(one, ids, 64).nll for kv, one in subjects.items()}
    assert 0 < abs(found["int8"] - found["fp32"]) < 0.01
    assert abs(found["int8"] - found["fp32"]) < abs(found["int4"] - found["fp32"])
    pairs = [(ids[i : i + 40], ids[i + 40 : i + 50]) for i in range(0, 200, 20)]
    scored = {kv: [nats for nats, _ in likelihoods(one, pairs)] for kv, one in subjects.items()}
    error = {kv: sum(abs(a - b) for a, b in zip(scored[kv], scored["fp32"])) for kv in ("int8", "int4")}
    assert 0 < error["int8"] < error["int4"] / 2


def test_short_texts_and_bad_windows(checkpoint: Path, subject: Subject):
    ids = ids_of(checkpoint)
    assert perplexity(subject, ids[:20], 64).window == 20
    assert perplexity(subject, ids, 4096).window == LIMIT
    for tokens, window, most in ((ids[:1], 8, None), (ids, 1, None), (ids, 8, 0)):
        with pytest.raises(ValueError, match="wants"):
            perplexity(subject, tokens, window, max_windows=most)
    with pytest.raises(FileNotFoundError):
        evaluate(checkpoint, [f"ppl:{checkpoint / 'nothing.txt'}"])


def test_divergence_is_that_of_the_logits(checkpoint: Path, tmp_path: Path, subject: Subject):
    other, ids = make_model(tmp_path, 7), ids_of(checkpoint)
    p, q = reference(checkpoint), reference(other)
    kl, same = [], []
    for start in (0, 64):
        a, b = p(ids[start : start + 64])[:-1], q(ids[start : start + 64])[:-1]
        kl += (a.exp() * (a - b)).sum(-1).tolist()
        same += (a.argmax(-1) == b.argmax(-1)).tolist()
    before = perplexity(subject, ids, 64, max_windows=2, keep=True)
    found = perplexity(open_subject(other, "fp32", "cpu"), ids, 64, max_windows=2, against=before.trace).divergence
    assert found is not None
    assert found.tokens == 126
    assert found.kl_mean == pytest.approx(sum(kl) / 126, rel=1e-4)
    assert found.kl_99 == pytest.approx(float(torch.tensor(kl).quantile(0.99)), rel=1e-4)
    assert found.top1_agreement == pytest.approx(sum(same) / 126)
    with pytest.raises(ValueError, match="same text and window"):
        perplexity(subject, ids, 64, max_windows=3, against=before.trace)


@pytest.mark.parametrize("step_tokens", [10, 2048])
def test_likelihoods_are_those_of_transformers(checkpoint: Path, subject: Subject, step_tokens: int):
    ids, run = ids_of(checkpoint), reference(checkpoint)
    best = int(run(ids[:10])[-1].argmax())
    pairs = [(ids[:5], ids[5:9]), (ids[:100], ids[100:104]), (ids[:10], [best]), (ids[:10], [(best + 1) % 23]),
             (ids[7:8], ids[8:80]), (ids[:200], ids[200:203])]  # the last is longer than the context: its beginning is dropped
    found = likelihoods(subject, pairs, step_tokens=step_tokens)
    for pair, (nats, greedy) in zip(pairs, found):
        wanted = expected(run, *pair)
        assert nats == pytest.approx(wanted[0], abs=1e-3)
        assert greedy == wanted[1]
    assert [greedy for _, greedy in found[2:4]] == [True, False]
    for context, continuation in (([], [1]), ([1], []), ([1], [1] * (LIMIT + 1))):
        with pytest.raises(ValueError, match="request 0"):
            likelihoods(subject, [(context, continuation)])


def test_pairs_are_split_where_the_context_ends(subject: Subject):
    the, cat, sat = (WORDS.index(word) for word in ("the", "cat", "sat"))
    assert subject.encode_pair("the cat ", "sat") == ([the, cat], [sat])
    assert subject.encode_pair("the", " cat sat") == ([the], [cat, sat])
    assert subject.encode_pair("", "cat") == ([0], [cat])  # EOS stands for the beginning where there is no BOS


def test_choices_are_those_of_transformers(checkpoint: Path, subject: Subject, tmp_path: Path):
    random = torch.Generator().manual_seed(3)
    say = lambda n: " ".join(WORDS[i] for i in torch.randint(0, 23, (n,), generator=random))  # noqa: E731
    rows = [{"query": f"Question: {say(4)}\n", "choices": [say(1 + i % 3), say(3)], "gold": i % 2} for i in range(12)]
    (tmp_path / "piqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run, encode = reference(checkpoint), lambda text: [WORDS.index(word) for word in text.split()]
    acc, norm = [], []
    for row in rows:
        context = encode(f"Question: {row['query'].removeprefix('Question: ').strip()} Answer:")
        sums = [expected(run, context, encode(choice))[0] for choice in row["choices"]]
        each = [nats / len(choice) for nats, choice in zip(sums, row["choices"])]
        acc.append(float((sums[1] > sums[0]) == (row["gold"] == 1)))
        norm.append(float((each[1] > each[0]) == (row["gold"] == 1)))
    found = score_task("piqa", read_task("piqa", "", tmp_path), subject)
    assert acc != norm
    assert found.scores == {"acc": tuple(acc), "acc_norm": tuple(norm)}
    assert found.value("acc") == sum(acc) / 12
    assert found.standard_error("acc") == pytest.approx(math.sqrt(found.value("acc") * (1 - found.value("acc")) / 11))


def test_lambada_is_greedy(checkpoint: Path, subject: Subject, tmp_path: Path):
    ids, run = ids_of(checkpoint), reference(checkpoint)
    right, wrong = WORDS[int(run(ids[:9])[-1].argmax())], WORDS[int(run(ids[:9])[-1].argmin())]
    context = " ".join(WORDS[i] for i in ids[:9])
    rows = [{"text": f"{context} {right}"}, {"context": context, "continuation": wrong}]
    (tmp_path / "lambada.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = score_task("lambada", read_task("lambada", tmp_path / "lambada.jsonl", Path()), subject)
    assert found.scores["acc"] == (1.0, 0.0)
    wanted = [-float(run(ids[:9])[-1].max()), -float(run(ids[:9])[-1].min())]
    assert found.scores["nll"] == pytest.approx(wanted, abs=1e-3)
    assert found.value("nll") == pytest.approx(math.exp(sum(wanted) / 2), rel=1e-3)


ARC = {"question": "Why?", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "B"}
HELLA = {"activity_label": "Cooking", "ctx_a": "A man [title] stands.", "ctx_b": "he", "label": 0,
         "endings": ["runs [x] off.", "sits"]}
SHAPES = [  # task, file, row -> first context, continuations, gold: as lm-evaluation-harness prompts
    ("arc_easy", "arc_easy.jsonl", ARC, "Question: Why?\nAnswer:", [" a", " b"], 1),
    ("piqa", "piqa.jsonl", {"goal": "Go", "sol1": "x", "sol2": "y", "label": 1}, "Question: Go\nAnswer:", [" x", " y"], 1),
    ("hellaswag", "hellaswag_val.jsonl", HELLA, "Cooking: A man. stands. He", [" runs off.", " sits"], 0),
    ("winogrande", "winogrande.jsonl", {"sentence": "Al hit Bo as _ was mad.", "option1": "Al", "option2": "Bo", "answer": "2"},
     "Al hit Bo as Al", [" was mad."] * 2, 1),
    ("boolq", "BoolQ/val.jsonl", {"passage": "P.", "question": "is it so", "label": "true"},
     "P.\nQuestion: is it so?\nAnswer:", [" no", " yes"], 1),
    ("cb", "CB/val.jsonl", {"premise": "P", "hypothesis": "H", "label": "neutral"},
     "P\nQuestion: H. True, False, or Neither?\nAnswer:", [" True", " False", " Neither"], 2),
]


@pytest.mark.parametrize(("task", "file", "row", "context", "continuations", "gold"), SHAPES, ids=[s[0] for s in SHAPES])
def test_rows_become_prompts(tmp_path: Path, task: str, file: str, row: dict, context: str, continuations: list, gold: int):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(json.dumps(row) + "\n")
    [item] = read_task(task, "", tmp_path)
    assert (item.pairs[0][0], [c for _, c in item.pairs], item.gold) == (context, continuations, gold)


def test_exams_show_solved_examples(tmp_path: Path):
    for split, line in (("dev", 'One?,a,b,c,d,C\n'), ("test", '\n"Two, or?",e,f,g,h,A\n\n')):  # the original files: no header
        (tmp_path / "mmlu" / split).mkdir(parents=True)
        (tmp_path / "mmlu" / split / f"abstract_algebra_{split}.csv").write_text(line)
    [item] = read_task("mmlu", "", tmp_path, shots=5)
    assert item.pairs[0] == (
        "The following are multiple choice questions (with answers) about abstract algebra.\n\nOne?\nA. a\nB. b\nC. c\nD. d\n"
        "Answer: C\n\nTwo, or?\nA. e\nB. f\nC. g\nD. h\nAnswer:", " A")
    assert item.gold == 0
    (tmp_path / "mmlu" / "dev" / "abstract_algebra_dev.csv").unlink()
    with pytest.raises(FileNotFoundError, match="--shots 0"):
        read_task("mmlu", "", tmp_path)
    assert "One?" not in read_task("mmlu", tmp_path / "mmlu", Path(), shots=0)[0].pairs[0][0]


def test_answers_are_marked_as_the_harness_marks_them():
    assert marks("so 16-3-4=9.\n#### 1,234", " 1234") == (1.0, 1.0)
    assert marks("The answer is $18.", "18") == (0.0, 1.0)
    assert marks("#### 5 and 7", "7") == (0.0, 1.0)
    assert marks("nothing", "7") == (0.0, 0.0)


@pytest.mark.parametrize(("options", "reason"), [
    ({"limit": -1}, "limit = -1: wants 1 or more"), ({"limit": 0}, "limit = 0: wants 1"),
    ({"shots": -1}, "shots = -1: wants 0"), ({"window": 1}, "window = 1: wants 2"),
    ({"max_windows": 0}, "max_windows = 0: wants 1")])
def test_counts_that_make_no_sense(options: dict[str, int], reason: str):
    with pytest.raises(ValueError, match=reason):  # before the model is looked for
        evaluate("nowhere", ["copa"], **options)


def test_the_window_used_is_named(checkpoint: Path, tmp_path: Path):
    found = evaluate(checkpoint, [f"ppl:{checkpoint / 'text.txt'}"], device="cpu")  # 300 tokens, 128 positions
    assert str(found).endswith("ppl:text.txt: 2 windows of 128 tokens, not of 2,048: the model has 128 positions")
    assert comparison(found, found).count("2 windows of 128 tokens, not of 2,048") == 1
    (tmp_path / "short.txt").write_text("the cat sat on the mat")
    found = evaluate(checkpoint, [f"ppl:{tmp_path / 'short.txt'}"], window=64, device="cpu")
    assert found.to_dict()["tasks"][0]["note"] == "1 window of 6 tokens, not of 64: the text has no more"


def test_texts_of_one_name_are_told_apart(checkpoint: Path, quantized: Path, tmp_path: Path):
    """Each is compared with its own trace, and asking twice measures once."""
    texts = [tmp_path / name / "text.txt" for name in ("a", "b")]
    words = (checkpoint / "text.txt").read_text().split()
    for text, some in zip(texts, (words[:64], words[64:128])):
        text.parent.mkdir()
        text.write_text(" ".join(some))
    asked, options = [f"ppl:{text}" for text in texts], {"window": 64, "device": "cpu"}
    before = evaluate(checkpoint, [*asked, f" {asked[0]}"], keep=True, **options)
    assert [result.task for result in before.results] == asked
    both = evaluate(quantized, asked, against=before, **options)
    for task in asked:
        alone = evaluate(checkpoint, [task], keep=True, **options)
        assert both.divergences[task] == evaluate(quantized, [task], against=alone, **options).divergences["ppl:text.txt"]


def test_bad_tasks_say_what_to_do(checkpoint: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="not known; there are ppl:FILE, arc_easy"):
        evaluate(checkpoint, ["arc_eazy"])
    with pytest.raises(ValueError, match="ppl:FILE"):
        evaluate(checkpoint, ["ppl"])
    with pytest.raises(FileNotFoundError, match="hellaswag_val.jsonl: activity_label.*--data"):
        evaluate(checkpoint, ["hellaswag"], tmp_path)
    (tmp_path / "boolq.jsonl").write_text('{"passage": "x"}\n')
    with pytest.raises(ValueError, match="KeyError 'question'. Wanted: .*passage, question, label"):
        evaluate(checkpoint, ["boolq"], tmp_path)
    (tmp_path / "piqa.jsonl").write_text('{"goal": "x", "sol1": "a", "sol2": "b", "label": -1}\n')
    with pytest.raises(ValueError, match="piqa.jsonl: .*none of the choices"):
        evaluate(checkpoint, ["piqa"], tmp_path)
    (tmp_path / "copa.jsonl").write_text("no json\n")
    with pytest.raises(ValueError, match="line 1"):
        evaluate(checkpoint, ["copa"], tmp_path)
    (tmp_path / "RTE").mkdir()
    (tmp_path / "RTE" / "val.jsonl").write_text('{"premise": "It rains.", "hypothesis": "It is wet.", "label": "entailment"}\n')
    for place in ("", tmp_path, tmp_path / "RTE", tmp_path / "RTE" / "val.jsonl"):
        assert [item.gold for item in read_task("rte", place, tmp_path)] == [0]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the task sets are not here")
def test_real_files_are_read():
    counts = {"arc_easy": 2376, "arc_challenge": 1172, "piqa": 1838, "winogrande": 1267, "lambada": 5153, "boolq": 3270,
              "mmlu": 14042, "ceval": 1346, "gsm8k": 1319, "wic": 500, "rte": 277, "cb": 56, "openbook_qa": 500, "copa": 100}
    for task, count in counts.items():
        items = read_task(task, "", SHARED)
        assert len(items) == count, task
        assert all(0 <= item.gold < len(item.pairs) and all(choice.strip() for _, choice in item.pairs) for item in items), task
    assert "#### 18" not in read_task("gsm8k", "", SHARED, limit=1)[0].pairs[0][0]


def test_published_statistics():
    for freedom, wanted in ((1, 12.706), (2, 4.303), (5, 2.571), (19, 2.093), (100, 1.984)):  # tables of Student's t
        assert t_quantile(freedom) == pytest.approx(wanted, abs=6e-4)
    half = 4.3027 * 0.1 / 3**0.5
    assert paired_mean([2.0, 4.0, 6.0], [2.1, 4.2, 6.3]) == pytest.approx((0.2, 0.2 - half, 0.2 + half), abs=1e-4)
    assert paired_mean([1.0], [2.0]) == (1.0, -math.inf, math.inf)
    x = [0.0] * 6 + [1.0] * 1 + [1.0] * 10
    y = [1.0] * 6 + [0.0] * 1 + [1.0] * 10
    assert mcnemar(x, y) == pytest.approx(2 * (1 + 7) / 2**7)  # binomial with 7 discordant pairs, 1 against 6
    assert mcnemar(x, x) == 1.0
    change, low, high = paired_share(x, y)
    assert change == pytest.approx(5 / 17)
    assert (low + high) / 2 == pytest.approx(5 / 19)
    assert (high - low) / 2 == pytest.approx(1.959964 * math.sqrt(6.5 + 1.5 - 25 / 19) / 19)


def test_comparisons_pair_items(checkpoint: Path, quantized: Path):
    def made(name: str, *acc: float) -> Evaluation:
        return Evaluation(name, "16bit", "bf16", "cpu", (TaskResult("copa", "acc", {"acc": acc}, 0.0),), {})

    [delta] = deltas(made("a", 1, 0, 0), made("b", 1, 1, 0))
    assert (delta.before, delta.after, delta.change, delta.p) == pytest.approx((1 / 3, 2 / 3, 1 / 3, 1.0))
    said = comparison(made("a", *[0] * 12), made("b", *[1] * 12))  # 2 / 2^12: not nothing
    assert "<0.001" in said
    with pytest.raises(ValueError, match="do not pair up"):
        deltas(made("a", 1, 0), made("b", 1))
    tasks = [f"ppl:{checkpoint / 'text.txt'}"]
    before = evaluate(checkpoint, tasks, window=64, device="cpu", keep=True)
    after = evaluate(quantized, tasks, window=64, device="cpu", against=before)
    assert (before.kv, after.kv, after.scheme) == ("fp32", "int8", "w4a8_g32")
    alone = perplexity(open_subject(quantized, "int8", "cpu"), ids_of(checkpoint), 64)
    assert after.results[0].scores["nll"] == alone.window_nll
    [delta] = deltas(before, after)
    assert delta.change == pytest.approx(math.log(delta.after / delta.before))
    assert delta.low < delta.change < delta.high
    assert re.search(r"ppl:text.txt: KL\(.*\) 0\.\d+ nats mean", comparison(before, after))


def test_the_harness_adapter(checkpoint: Path):
    model = harness_model(checkpoint, "fp32", "cpu", base=object)
    ids, run = ids_of(checkpoint), reference(checkpoint)
    text = lambda some: " ".join(WORDS[i] for i in some)  # noqa: E731
    ask = lambda *args: SimpleNamespace(args=args)  # noqa: E731
    [(nats, greedy)] = model.loglikelihood([ask(text(ids[:5]), " " + text(ids[5:8]))])
    assert (nats, greedy) == (pytest.approx(expected(run, ids[:5], ids[5:8])[0], abs=1e-3), False)
    # lm-eval: each token once, windows of the context's length, the first behind EOS, the last with all the context there is
    found = model.loglikelihood_rolling([ask(text(ids)), ask(text(ids[:3]))])
    windows = [([0], ids[:128]), (ids[127:128], ids[128:256]), (ids[171:256], ids[256:])]
    assert found[0] == pytest.approx(sum(expected(run, *window)[0] for window in windows), rel=1e-5)
    assert found[1] == pytest.approx(expected(run, [0], ids[:3])[0], rel=1e-5)
    best = int(run(ids[:6])[-1].argmax())
    [answer] = model.generate_until([ask(text(ids[:6]), {"until": ["\n\n"], "max_gen_toks": 1, "do_sample": False})])
    assert answer.strip() == ("" if best == 0 else WORDS[best])
    long = model.generate_until([ask(text(ids[:90]), {"max_gen_toks": most}) for most in (64, LIMIT, 256)])
    assert long[0] == long[1] == long[2] != ""  # never more than half of the context, which leaves room for the prompt


def test_examine_lays_weights_side_by_side(checkpoint: Path, quantized: Path, tmp_path: Path):
    ids = ids_of(checkpoint)[:64]
    found = examine(open_subject(quantized, device="cpu"), ids, open_checkpoint(checkpoint))
    assert [f.kind[:4] for f in found.linears[:7]] == ["q_pr", "k_pr", "v_pr", "o_pr", "gate", "up_p", "down"]
    weights, ours = load_file(checkpoint / "model.safetensors"), open_checkpoint(quantized)
    for facts in found.linears:
        block = "self_attn" if facts.kind[0] in "qkvo" else "mlp"
        name = f"model.layers.{facts.layer}.{block}.{facts.kind}.weight"
        error = (dequantize(ours.get(name)) - weights[name]).norm() / weights[name].norm()
        assert facts.weight_error == pytest.approx(float(error), rel=1e-4)
        assert facts.bits == 4 + 16 / 32
        assert 0.3 * error**2 < facts.output_error < 3 * error**2  # of random inputs the same share is wrong
    linears, others = sum(f.parameters for f in found.linears), 2 * 26 * 64 + 5 * 64
    assert linears == 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    assert (found.bytes_linear, found.bytes_other) == (linears * 4.5 / 8, 4 * others)
    assert found.bytes_before == 4 * (linears + others)
    assert found.kv_bytes_per_token == 2 * 2 * 2 * (16 + 4)
    rotated = tmp_path / "rotated"
    quantize_checkpoint(checkpoint, rotated, Recipe(method="rtn", group=32, transform="rotate"), "int8", device="cpu")
    turned = examine(open_subject(rotated, device="cpu"), ids, open_checkpoint(checkpoint))
    assert max(f.weight_error for f in turned.linears) < 0.2  # in another basis it would be 1.4
    same = examine(open_subject(checkpoint, device="cpu"), ids, open_checkpoint(checkpoint))
    assert {f.output_error for f in same.linears} == {0.0}


class Page(HTMLParser):
    """Collects tags and what would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.links += [str(value) for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]


def test_the_report_is_one_page(checkpoint: Path, quantized: Path):
    page, content = report(quantized, checkpoint, checkpoint / "text.txt", window=64, device="cpu")
    found = Page()
    found.feed(page)
    assert (found.links, found.tags.get("script")) == ([], None)
    assert not re.search(r"url\(|@import|https?://", page)
    assert found.tags["rect"] == 2 * 7 + 2 * 7 + 2 * 4 + 2 * 2 * 2  # formats, errors, outliers, K and V of two heads
    assert found.tags["svg"] == 1 + 7 + 4 + 2
    assert "prefers" in page or "light-dark(" in page
    alone = perplexity(open_subject(quantized, "int8", "cpu"), ids_of(checkpoint), 64)
    assert f"<b>{alone.ppl:.2f}</b>" in page
    assert content["model"]["tasks"][0]["metrics"]["perplexity"] == pytest.approx(alone.ppl)
    assert content["bits_per_weight"] == pytest.approx(4.5)
    json.dumps(content, allow_nan=False)
    alone_page, _ = report(quantized, None, None, window=64, max_windows=1, device="cpu")
    assert "--against" in alone_page
    once, _ = report(quantized, checkpoint, checkpoint / "text.txt", window=64, max_windows=1, device="cpu")
    assert "<small>unknown from one item</small>" in once


def test_the_report_doubts_unrelated_models(checkpoint: Path, tmp_path: Path):
    other, wide = make_model(tmp_path / "other", 7), make_model(tmp_path / "wide", 7, hidden_size=96)
    page, content = report(other, checkpoint, checkpoint / "text.txt", window=64, device="cpu")
    apart = content["model"]["divergences"]["ppl:text.txt"]
    assert apart["top1_agreement"] < 0.5
    assert content["advice"][0].startswith("The two models hardly agree")
    assert f"Is {checkpoint.name} the model that other was made from?" in page
    _, content = report(checkpoint, checkpoint, checkpoint / "text.txt", window=64, device="cpu")
    assert content["advice"][0].startswith("Practically nothing was lost")
    with pytest.raises(ValueError, match=f"wide has hidden_size = 96 and .*{checkpoint.name} has 64"):
        report(wide, checkpoint, checkpoint / "text.txt", device="cpu")


@pytest.mark.parametrize(("change", "kl", "agreement", "said"), [
    (-0.4, 0.002, 0.98, "Practically nothing"), (-0.4, 0.15, 0.8, "A noticeable part"), (0.05, 0.01, 0.9, "A little was lost"),
    (0.0, 0.3, 0.7, "Much was lost"), (0.0, 0.3, 0.45, "hardly agree"), (0.0, 1.2, 0.6, "hardly agree"),
    (float("nan"), float("nan"), 0.6, "Much was lost")])
def test_the_verdict_is_the_worse_of_both(change: float, kl: float, agreement: float, said: str):
    assert said in verdict(change, Divergence(kl, kl, agreement, 100), "mine", "original")


def test_outputs_are_looked_at_before_the_work(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def command(*words: object) -> None:
        app([*map(str, words), "--device", "cpu"], result_action="return_value")

    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):  # and no model was missed before
        command("eval", "nowhere", "--ppl", checkpoint / "text.txt", "--json", tmp_path / "file" / "x.json")
    with pytest.raises(FileExistsError):
        command("report", "nowhere", "-o", tmp_path / "file" / "r.html")
    for name, cure in (("r3.json", "r3.html"), ("", "report.html")):
        with pytest.raises(ValueError, match=f"the JSON goes beside it; try .*{cure}"):
            command("report", "nowhere", "-o", tmp_path / name)
    with monkeypatch.context() as read_only:
        read_only.setattr("os.access", lambda path, mode: path != checkpoint)
        for words in (("report", checkpoint), ("eval", "nowhere", "--ppl", "x", "--json", checkpoint / "x.json")):
            with pytest.raises(PermissionError, match=f"{checkpoint}.* read-only"):
                command(*words)
    out = tmp_path / "new" / "x.json"
    command("eval", checkpoint, "--ppl", checkpoint / "text.txt", "--window", 64, "--max-windows", 1, "--json", out)
    assert json.loads(out.read_text())["model"]["tasks"][0]["items"] == 1


def test_commands(checkpoint: Path, quantized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "found.json"
    arguments = ["--ppl", checkpoint / "text.txt", "--window", 64, "--device", "cpu", "--json", out]
    app([str(a) for a in ("eval", "--compare", checkpoint, quantized, *arguments)], result_action="return_value")
    printed, found = capsys.readouterr().out, json.loads(out.read_text())
    assert found["deltas"][0]["task"] == "ppl:text.txt"
    assert (found["model"]["model"], found["against"]["model"]) == (quantized.name, checkpoint.name)
    assert "95 % interval" in printed
    arguments[2:4] = ["--window", 128, "--max-windows", 1]  # one window has no interval, and JSON no infinity
    app([str(a) for a in ("eval", "--compare", checkpoint, quantized, *arguments)], result_action="return_value")

    def refuse(number: str) -> None:
        raise AssertionError(number)

    [delta] = json.loads(out.read_text(), parse_constant=refuse)["deltas"]
    assert (delta["items"], delta["low"], delta["high"]) == (1, None, None)
    page = tmp_path / "page.html"
    arguments = ["--text", checkpoint / "text.txt", "--device", "cpu", "-o", page]
    app([str(a) for a in ("report", quantized, *arguments)], result_action="return_value")
    assert page.read_text().startswith("<!doctype html>")
    found = json.loads(page.with_suffix(".json").read_text())
    assert found["anatomy"]["linears"]
    said = re.search(r"^Perplexity +([\d.]+) +lower is better$", capsys.readouterr().out, re.MULTILINE)
    assert float(said[1]) == pytest.approx(found["model"]["tasks"][0]["metrics"]["perplexity"], abs=0.005)


def test_the_adapter_is_one_of_the_harness(checkpoint: Path):
    api = pytest.importorskip("lm_eval.api.model")
    assert isinstance(harness_model(checkpoint, device="cpu"), api.LM)


def test_the_demo_compares(checkpoint: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("nybble.evals.demo.demo_model", lambda: checkpoint)
    printed = run_demo(None, tmp_path / "demo", "cpu", lambda what, done: None)
    assert checkpoint_sampling(tmp_path / "demo") == {"temperature": 0.2, "top_p": 0.9}
    assert "14 linears at" in printed
    before, after = map(float, re.search(r"ppl:sample.txt +perplexity +(\d+\.\d+) +(\d+\.\d+) +[+-]\d", printed).groups())
    said = " ".join(printed.strip().splitlines()[-3:])
    assert f"Perplexity went from {before:.2f} to {after:.2f}: " in said
    grew, low, high = (float(text) for text in re.findall(r"([+-][\d.]+)%", said))
    assert grew == pytest.approx(100 * (after / before - 1), abs=0.06)
    assert low < grew < high
    # 26 words, 64 wide: in 16 bits 68,416 values of 2 bytes; K and V of 2 layers and 2 heads of 16: 2 bytes each, or 1 and
    # two numbers of 2 bytes a head.
    size = sum(file.stat().st_size for file in (tmp_path / "demo").glob("*.safetensors"))
    assert "from 0 MB in 16 bits to 0 MB, " in said
    assert 2 * 68_416 / size == pytest.approx(float(re.search(r"MB, ([\d.]+) times", said)[1]), rel=0.2)
    assert "from 0.2 to 0.2 KiB a token, 1.6 times. Worth it? " in said


@pytest.mark.skipif(not SHARED.is_dir(), reason="the task sets are not here")
def test_generated_answers_run(checkpoint: Path):
    found = evaluate(checkpoint, ["gsm8k", "copa"], SHARED, shots=0, limit=2, device="cpu").results
    assert [(r.task, len(r.scores[r.headline])) for r in found] == [("gsm8k", 2), ("copa", 2)]

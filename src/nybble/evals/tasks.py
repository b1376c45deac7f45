"""Tasks from local files: read the rows, make prompts, score answers. Conventions (prompts, which length normalises, the strict
answer pattern) are those of EleutherAI's lm-evaluation-harness, so that figures can be laid beside published ones.

Nothing is downloaded. Its one idea: multiple choice is a list of (context, continuation) pairs, whatever the task was called.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nybble.evals.likelihood import Progress, Subject, likelihoods
from nybble.text import read_text

Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """pairs: (context, continuation), one per choice; gold: which is right."""

    pairs: tuple[tuple[str, str], ...]
    gold: int = 0


@dataclass(frozen=True)
class TaskResult:
    """scores: metric -> one number per item; items (windows of a text) of two models pair up. "nll" is in nats and shown as a
    perplexity, all others are 0 or 1. headline: the metric that the task is usually quoted by. note: on how it was measured."""

    task: str
    headline: str
    scores: dict[str, tuple[float, ...]]
    seconds: float
    note: str = ""

    def value(self, metric: str) -> float:
        mean = sum(self.scores[metric]) / len(self.scores[metric])
        return math.exp(mean) if metric == "nll" else mean

    def standard_error(self, metric: str) -> float:
        """Of the mean (of nats per token, for "nll"); NaN for a single item."""
        values, n = self.scores[metric], len(self.scores[metric])
        return math.sqrt(sum((x - sum(values) / n) ** 2 for x in values) / (n - 1) / n) if n > 1 else math.nan


@dataclass(frozen=True)
class Task:
    """headline: the metric that is usually quoted. wants: where the file comes from, its columns. make: a row -> an item, or
    read: (file, shots) -> items. files: patterns under the data directory (default: NAME.jsonl). kind: "choice", "word" (a
    continuation that greedy decoding should give) or "answer" (generated)."""

    headline: str
    wants: str
    make: Callable[[Row], Item] | None = None
    read: Callable[[Path, int], list[Item]] | None = None
    files: tuple[str, ...] = ()
    kind: str = "choice"


def rows_of(path: Path) -> list[Row]:
    """JSON lines. Raises ValueError naming the line that is not."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}; wants one JSON object a line") from None
    return rows


def _choices(context: str, choices: Sequence[str], gold: int) -> Item:
    return Item(tuple((context, f" {choice}") for choice in choices), gold)


def _plain(row: Row, form: str = "{}") -> Item:
    """Of the shapes in use: query/choices/gold, PIQA's own, ARC's own."""
    if "sol1" in row:
        return _choices(form.format(row["goal"]), [row["sol1"], row["sol2"]], int(row["label"]))
    if "answerKey" in row:
        texts, labels = row["choices"]["text"], row["choices"]["label"]
        return _choices(form.format(row.get("question") or row["question_stem"]), texts, labels.index(row["answerKey"]))
    return _choices(form.format(row["query"].removeprefix("Question:").strip()), row["choices"], row["gold"])


def _question(row: Row) -> Item:
    return _plain(row, "Question: {}\nAnswer:")


def _hellaswag(row: Row) -> Item:
    if "endings" not in row:
        return _plain(row)
    tidy = lambda text: re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")  # noqa: E731
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _choices(tidy(context), [tidy(ending) for ending in row["endings"]], int(row["label"]))


def _either(row: Row) -> Item:
    """Winograd schemas: the context varies, what follows is scored (partial evaluation, arXiv 1806.02847)."""
    if "sentence" in row:
        before, after = row["sentence"].split("_")
        return Item(tuple((before + row[o], f" {after.strip()}") for o in ("option1", "option2")), int(row["answer"]) - 1)
    return Item(tuple((option, f" {row['continuation']}") for option in row["context_options"]), row["gold"])


def _labelled(form: str, choices: Sequence[str], labels: Sequence[str]) -> Callable[[Row], Item]:
    """SuperGLUE: a prompt made of the row's columns, and a label in words."""
    return lambda row: _choices(form.format(**row), choices, labels.index(str(row.get("label", row.get("answer"))).lower()))


def _wic(row: Row) -> Item:
    form = ("Sentence 1: {sentence1}\nSentence 2: {sentence2}\nQuestion: Is the word '{word}' used in the same way in the two "
            "sentences above?\nAnswer:")
    return _labelled(form, *NO_YES)(row | {"word": row["sentence1"][row["start1"] : row["end1"]]})


def _lambada(row: Row) -> Item:
    context, word = row["text"].rsplit(" ", 1) if "text" in row else (row["context"], row["continuation"])
    return Item(((context, f" {word}"),))


def _exam_rows(path: Path) -> list[tuple[str, list[str], int]]:
    """(question, four choices, gold) of a file of MMLU or C-Eval."""
    lines = [line for line in csv.reader(io.StringIO(read_text(path))) if line]
    head = lines.pop(0) if lines and "question" in lines[0] else ["question", *"ABCD", "answer"]  # the original MMLU has none
    rows, names = [dict(zip(head, line)) for line in lines], [name for name in head if name in "ABCD" or name[:6] == "choice"]
    gold = lambda answer: "ABCD".index(answer) if answer in "ABCD" else int(answer)  # noqa: E731
    return [(row["question"].strip(), [row[name] for name in names], gold(row["answer"])) for row in rows]


def _exam(head: Callable[[str, Path], str], ask: str) -> Callable[[Path, int], list[Item]]:
    """One subject: a sentence about it, `shots` solved questions from its development set, the question."""

    def prompt(question: str, choices: Sequence[str]) -> str:
        return "\n".join((question, *(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices)), ask))

    def read(path: Path, shots: int) -> list[Item]:
        subject = path.stem.rpartition("_")[0]
        examples = _exam_rows(_examples(path.parent.parent / "dev" / f"{subject}_dev.csv", shots))[:shots] if shots else []
        start = head(subject, path.parent.parent) + "".join(f"{prompt(q, c)} {'ABCD'[gold]}\n\n" for q, c, gold in examples)
        return [_choices(start + prompt(question, choices), "ABCD", gold) for question, choices, gold in _exam_rows(path)]

    return read


def _mmlu_head(subject: str, root: Path) -> str:
    return f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"


def _ceval_head(subject: str, root: Path) -> str:
    names = json.loads(read_text(root / "mapping.json")) if (root / "mapping.json").is_file() else {}
    return f"以下是中国关于{names.get(subject, {}).get('name', subject)}的单项选择题，请选出其中的正确答案。\n\n"


def _gsm8k(path: Path, shots: int) -> list[Item]:
    ask = lambda row: f"Question: {row['question']}\nAnswer:"  # noqa: E731
    examples = rows_of(_examples(path.with_name("train.jsonl"), shots))[:shots] if shots else []
    start = "".join(f"{ask(row)} {row['answer']}\n\n" for row in examples)
    return [Item(((start + ask(row), row["answer"].split("####")[1]),)) for row in rows_of(path)]


def _examples(path: Path, shots: int) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {shots} examples are taken from it; use --shots 0 to go without")
    return path


CHOICE = "query, choices (a list), gold (an index)"
SCHEMA = "context_options, continuation, gold"
NO_YES = (("no", "yes"), ("false", "true"))
LOCAL = "llm-foundry's scripts/eval/local_data"
ARC = f"allenai/ai2_arc or {LOCAL}: {CHOICE}, or question, choices, answerKey"
TASKS: dict[str, Task] = {
    "arc_easy": Task("acc", ARC, _question),
    "arc_challenge": Task("acc_norm", ARC, _question),
    "piqa": Task("acc", f"PIQA validation or {LOCAL}: {CHOICE}, or goal, sol1, sol2, label", _question),
    "hellaswag": Task("acc_norm", "rowanz/hellaswag, hellaswag_val.jsonl: activity_label, ctx_a, ctx_b, endings, label",
                      _hellaswag, files=("hellaswag_val.jsonl", "hellaswag.jsonl")),
    "openbook_qa": Task("acc_norm", f"{LOCAL}: {CHOICE}", _plain),
    "copa": Task("acc", f"{LOCAL}: {CHOICE}", _plain),
    "agi_eval_sat_en": Task("acc", f"{LOCAL}: {CHOICE}", _plain),
    "agi_eval_lsat_rc": Task("acc", f"{LOCAL}: {CHOICE}", _plain),
    "winogrande": Task("acc", f"WinoGrande XL validation or {LOCAL}: {SCHEMA}, or sentence, option1, option2, answer", _either),
    "winograd_wsc": Task("acc", f"{LOCAL}: {SCHEMA}", _either),
    "boolq": Task("acc", "SuperGLUE's BoolQ/val.jsonl: passage, question, label", files=("BoolQ/val.jsonl", "boolq.jsonl"),
                  make=_labelled("{passage}\nQuestion: {question}?\nAnswer:", *NO_YES)),
    "wic": Task("acc", "SuperGLUE's WiC/val.jsonl: sentence1, sentence2, start1, end1, label", _wic, files=("WiC/val.jsonl",)),
    "rte": Task("acc", "SuperGLUE's RTE/val.jsonl: premise, hypothesis, label", files=("RTE/val.jsonl",),
                make=_labelled("{premise}\nQuestion: {hypothesis} True or False?\nAnswer:", ("True", "False"),
                               ("entailment", "not_entailment"))),
    "cb": Task("acc", "SuperGLUE's CB/val.jsonl: premise, hypothesis, label", files=("CB/val.jsonl",),
               make=_labelled("{premise}\nQuestion: {hypothesis}. True, False, or Neither?\nAnswer:",
                              ("True", "False", "Neither"), ("entailment", "contradiction", "neutral"))),
    "lambada": Task("acc", f"EleutherAI/lambada_openai: text; or {LOCAL}: context, continuation", _lambada, kind="word",
                    files=("lambada_openai.jsonl", "lambada.jsonl")),
    "mmlu": Task("acc", "hendrycks/test: directories test and dev with SUBJECT_test.csv, SUBJECT_dev.csv",
                 read=_exam(_mmlu_head, "Answer:"), files=("mmlu/test/*_test.csv", "test/*_test.csv")),
    "ceval": Task("acc", "hkust-nlp/ceval: directories val and dev with SUBJECT_val.csv, SUBJECT_dev.csv",
                  read=_exam(_ceval_head, "答案："), files=("ceval/val/*_val.csv", "val/*_val.csv")),
    "gsm8k": Task("strict", "openai/grade-school-math: test.jsonl, and train.jsonl for examples: question, answer",
                  read=_gsm8k, files=("gsm8k/test.jsonl", "gsm8k.jsonl"), kind="answer"),
}


def read_task(name: str, given: str | Path, data: Path, shots: int = 5, limit: int | None = None) -> list[Item]:
    """given: a file, or a directory with the task's files; "" looks under `data`, at most one directory down. limit: items of
    each file, the first ones.

    Raises ValueError for an unknown task, a row without its columns or without an answer, FileNotFoundError saying what to get.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not known; there are ppl:FILE, {', '.join(TASKS)}")
    task, root = TASKS[name], Path(given or data)
    patterns = task.files or (f"{name}.jsonl",)
    tries = [sorted(root.glob(f"{below}{pattern}")) for pattern in patterns for below in ("", "*/")]
    tries += [sorted(root.glob(Path(pattern).name)) for pattern in patterns if given]  # named: the innermost directory will do
    files = [root] if root.is_file() else next((found for found in tries if found), [])
    if not files:
        raise FileNotFoundError(f"task {name}: no {' or '.join(patterns)} in {root} or a directory in it. Wanted: "
                                f"{task.wants}. Say where with --data DIR or {name}:PATH")
    items: list[Item] = []
    for path in files:
        try:
            assert task.read or task.make
            found = (task.read(path, shots) if task.read else list(map(task.make, rows_of(path))))[:limit]  # type: ignore[arg-type]
            if not all(0 <= item.gold < len(item.pairs) for item in found):
                raise LookupError("an answer is none of the choices (test sets often come without answers)")
            items += found
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: {type(error).__name__} {error}. Wanted: {task.wants}") from error
    if not items:
        raise ValueError(f"task {name}: no items in {', '.join(map(str, files))}")
    return items


def score_task(name: str, items: Sequence[Item], subject: Subject, progress: Progress | None = None) -> TaskResult:
    """Score a multiple-choice or last-word task by log-likelihood. acc_norm divides by the choice's characters."""
    started, task = time.perf_counter(), TASKS[name]
    found = likelihoods(subject, [subject.encode_pair(*pair) for item in items for pair in item.pairs], progress, name)
    if task.kind == "word":
        scores = {"acc": tuple(float(greedy) for _, greedy in found), "nll": tuple(-nats for nats, _ in found)}
        return TaskResult(name, task.headline, scores, time.perf_counter() - started)
    nats, plain, normed = iter(found), [], []
    for item in items:
        sums = [next(nats)[0] for _ in item.pairs]
        per_letter = [n / max(len(choice[1:]), 1) for n, (_, choice) in zip(sums, item.pairs)]
        plain.append(float(sums.index(max(sums)) == item.gold))
        normed.append(float(per_letter.index(max(per_letter)) == item.gold))
    scores = {"acc": tuple(plain)}
    if task.make in (_question, _plain, _hellaswag):  # elsewhere choices are letters, yes and no, or the same
        scores["acc_norm"] = tuple(normed)
    return TaskResult(name, task.headline, scores, time.perf_counter() - started)


def answer_task(name: str, items: Sequence[Item], path: Path, kv: str, device: str, activations: str | None = None,
                progress: Progress | None = None, tensor_parallel: int = 1) -> TaskResult:
    """Generate greedily with the engine (up to 256 tokens, until the next question) and compare the number.

    strict: the number after the first "####". flexible: the last number anywhere.
    """
    from nybble.engine.messages import SamplingParams
    from nybble.llm import LLM

    started, tokens = time.perf_counter(), 0

    def seen(count: int) -> None:
        nonlocal tokens
        tokens += 1
        if progress is not None and tokens % 64 == 0:
            progress(name, min(tokens / (256 * len(items)), 1.0))

    with LLM(path, kv=kv, device=device, activations=activations, tensor_parallel=tensor_parallel) as llm:
        context = llm.info().max_context
        params = SamplingParams(temperature=0.0, max_tokens=min(256, context // 2), stop=("Question:", "</s>", "<|im_end|>"))
        prompts = [llm.tokenizer.encode(item.pairs[0][0])[-(context - params.max_tokens) :] for item in items]
        texts = [response.text for response in llm.generate(prompts, params, on_token=seen)]
    strict, flexible = zip(*(marks(text, item.pairs[0][1]) for text, item in zip(texts, items)))
    return TaskResult(name, "strict", {"strict": strict, "flexible": flexible}, time.perf_counter() - started)


def marks(text: str, answer: str) -> tuple[float, float]:
    """(strict, flexible) of a generated text, as lm-eval's gsm8k marks it."""
    plain = lambda number: re.sub(r"\.$", "", number.strip().replace(",", "").replace("$", ""))  # noqa: E731
    strict, loose = re.search(r"#### (\-?[0-9\.\,]+)", text), re.findall(r"-?[$0-9.,]{2,}|-?[0-9]+", text)
    found = (strict[1] if strict else "", loose[-1] if loose else "")
    return tuple(float(plain(number) == plain(answer)) for number in found)  # type: ignore[return-value]

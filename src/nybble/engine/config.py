"""What the engine is told, and what it asks of the thing that runs a plan. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from nybble.engine.messages import TokenLogprob
from nybble.engine.scheduler import Plan

DEFAULT_KV = "int8"


@dataclass(frozen=True)
class EngineConfig:
    """Flat, frozen, and every field has a default.

    kv: key of `formats.spec.KV` (None: what the checkpoint asks for, else int8). block_size: tokens per KV block.
    num_blocks: overrides kv_memory. kv_memory: bytes (above 1), a fraction of the device for everything together (up to 1),
    None: what the device can spare. max_batch: requests running at once. max_batched_tokens: tokens in one step (None: 2048,
    256 on a CPU). max_context: tokens of prompt and answer (None: what the model was made for). prefill_interval: steps between
    starts of few prompts while half of max_batch generates (None: max_batch / 16 up to 8 on a GPU, 1 on a CPU). overlap:
    plan a step while the one before it runs (None: on a GPU). graphs: steps as CUDA graphs (None: on a GPU). eos_ids: end every
    request that does not ignore them. model_name, scheme, weights: reported, not used. activations: "int8" for weights made for
    16-bit ones (None: as the checkpoint says); once loaded, what they are in. seed: of requests that bring none; None is a
    different one each start. tensor_parallel: GPUs of this machine (processes, on a CPU) that share the model.
    """

    model_name: str = ""
    scheme: str = ""
    weights: str = ""
    activations: str | None = None
    kv: str | None = None
    block_size: int = 64
    num_blocks: int | None = None
    kv_memory: float | None = None
    max_batch: int = 64
    max_batched_tokens: int | None = None
    max_context: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    prefill_interval: int | None = None
    overlap: bool | None = None
    graphs: bool | None = None
    tensor_parallel: int = 1
    eos_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_batch", "max_batched_tokens", "max_context", "prefill_interval",
                     "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}: wants 1 or more")


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine in its own process: what `python -m nybble.engine.process --config` reads as JSON.

    address: where it listens, ipc:// or tcp://127.0.0.1:port. model: checkpoint. device: "cpu", "cuda", "cuda:1", "auto".
    parent: the process that it must not outlive. factory: "module:function", called with this config, returns the engine.
    silence_limit_s: a client that says nothing for so long has its requests aborted.
    """

    address: str = ""
    model: str = ""
    device: str = "auto"
    engine: EngineConfig = EngineConfig()
    parent: int | None = None
    factory: str = "nybble.engine.process:load"
    silence_limit_s: float = 60.0


class Sampled(NamedTuple):
    """What a step drew, one entry per row in `Plan.samples`. A negative token: the row had no finite logits.

    scored: of prompt rows that want it: the row, a position in the prompt, log-probabilities of the tokens from there on."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None] | None = None
    scored: Sequence[tuple[int, int, list[TokenLogprob]]] = ()


@runtime_checkable
class Runner(Protocol):
    """Runs plans, in order. `launch` may return before the device is done; what it returns waits for the tokens. A runner
    knows by a request's slot what it drew last, so a plan may hold tokens that the host has not seen.

    When a sampled row's request has a grammar, what `launch` returns has not drawn yet: it takes the samples with a grammar and
    their `grammar.Grammars.masks`, is called before the next `launch`, draws, and returns what waits."""

    vocab_size: int
    num_blocks: int
    max_context: int
    max_batched_tokens: int
    bytes_per_token: int
    overlap: bool
    decode_steps: int  # these three: see `messages.Info`
    decode_wall_s: float
    decode_busy_s: float

    def launch(self, plan: Plan) -> Callable[..., Any]: ...

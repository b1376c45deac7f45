"""EleutherAI's lm-evaluation-harness on top of Nybble: its hundreds of tasks, our kernels and KV cache.

    import lm_eval
    from nybble.evals.harness import harness_model
    lm_eval.simple_evaluate(model=harness_model("out/model"), tasks=["hellaswag"])

The harness is imported when a model is made, and comes with `pip install lm-eval`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nybble.evals.likelihood import Ids, Subject, likelihoods, open_subject


def rolling(subject: Subject, text: str) -> list[tuple[Ids, Ids]]:
    """Pairs that together score every token of a text once, each after at least one token (lm-eval's rolling windows)."""
    ids, limit = subject.encode(text), subject.model.config.max_position
    pairs: list[tuple[Ids, Ids]] = [([subject.prefix_id], ids[:limit])] if ids else []
    for start in range(limit, len(ids), limit):
        end = min(start + limit, len(ids))
        pairs.append((ids[max(end - limit - 1, 0) : start], ids[start:end]))
    return pairs


def harness_model(path: str | Path, kv: str = "auto", device: str = "auto", base: type | None = None) -> Any:
    """An `lm_eval.api.model.LM`. base: another class to derive from. Raises ModuleNotFoundError saying what to install."""
    if base is None:
        try:
            from lm_eval.api.model import LM as base  # type: ignore[import-not-found, no-redef]  # noqa: N811
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("the adapter wants EleutherAI's harness: pip install lm-eval") from error

    class NybbleLM(base):  # type: ignore[misc, valid-type]
        """requests: lm-eval `Instance`s, whose `args` are (context, continuation), (text,) or (context, options)."""

        def __init__(self) -> None:
            super().__init__()
            self.subject = open_subject(path, kv, device)

        @property
        def tokenizer_name(self) -> str:
            return str(path).replace("/", "__")

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            return self.subject.tokenizer.chat(chat_history, add_generation_prompt=add_generation_prompt)

        def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return likelihoods(self.subject, [self.subject.encode_pair(*request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
            pairs = [rolling(self.subject, request.args[0]) for request in requests]
            found = iter(likelihoods(self.subject, [pair for some in pairs for pair in some]))
            return [sum(next(found)[0] for _ in some) for some in pairs]

        def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
            from nybble.llm import LLM

            with LLM(path, kv=self.subject.kv_name, device=device) as llm:
                context = llm.info().max_context
                params = [_params(request.args[1], context // 2) for request in requests]
                prompts = [llm.tokenizer.encode(request.args[0])[one.max_tokens - context :]
                           for request, one in zip(requests, params)]
                return [response.text for response in llm.generate(prompts, params)]

    return NybbleLM()


def _params(options: dict[str, Any], most: int) -> Any:
    """lm-eval's generation options as ours. It samples only when told to. most: tokens, so that a prompt has room."""
    from nybble.engine.messages import SamplingParams

    until: Iterable[str] = options.get("until") or ()
    temperature = float(options.get("temperature", 0.0)) if options.get("do_sample", True) else 0.0
    stop = (until,) if isinstance(until, str) else tuple(until)
    return SamplingParams(temperature=temperature, top_p=float(options.get("top_p", 1.0)), stop=stop,
                          max_tokens=min(options.get("max_gen_toks", 256), most))

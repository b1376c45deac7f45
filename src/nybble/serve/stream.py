"""From one prompt's engine deltas to pieces of text: detokenizing, stop strings, and giving the blocks back.

It knows neither HTTP nor the OpenAI shapes. The one idea: text leaves here only when it can no longer change and can no longer
turn out to be the start of a stop string, so what was sent is never taken back, however the tokens were cut into deltas.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from nybble.engine.messages import Delta, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from nybble.engine.client import EngineClient
    from nybble.serve.metrics import Metrics
    from nybble.text import Tokenizer


class EngineFailed(Exception):
    """The engine ended the request without an answer."""


class Piece(NamedTuple):
    """What one delta added to completion `index`. num_tokens counts also the tokens whose text was cut or is held back;
    logprobs, where they are wanted, begin with the prompt's."""

    index: int
    text: str
    logprobs: list[TokenLogprob]
    num_tokens: int
    cached_tokens: int
    finish_reason: str | None


class TextStream:
    """One completion's token ids in, text out, up to the first stop string. prompt: as `Tokenizer.stream` takes it.

    Of several stop strings the one that is complete first wins (of equals the longest), as if tokens had come one by one
    character. Stop strings are not looked for in the text of the first min_tokens - 1 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> None:
        self._detokenizer, self._params = tokenizer.stream(params.skip_special_tokens, prompt), params
        self._held, self._count, self._stopped = "", 0, False

    def take(self, delta: Delta) -> tuple[str, int, str | None]:
        """What a delta adds: text that is final now, how many of its ids were used (fewer than it has when a stop string ended
        the completion), and why the completion ended if it did.

        The id that ended a request (EOS, `stop_token_ids`) counts as used; its text is left out unless stops are included.
        """
        ids, reason, text = delta.token_ids, delta.finish_reason, ""
        spoken = ids[:-1] if reason == "stop" and not self._params.include_stop else ids
        if not self._params.stop:
            text = self._detokenizer.push(spoken)
        else:
            for used, token_id in enumerate(spoken, 1):
                self._count += 1
                text += self._scan(self._detokenizer.push([token_id]))
                if self._stopped:
                    return text, used, "stop"
        if reason is not None:
            text += self._scan(self._detokenizer.flush())
            text += self._held
        return text, len(ids), "stop" if self._stopped else reason

    def _scan(self, new: str) -> str:
        stops = self._params.stop
        if not new or not stops or self._count < self._params.min_tokens:
            return new
        text = self._held + new
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._stopped, self._held = True, ""
            return text[: end if self._params.include_stop else start]
        keep = max(overlap(text, stop) for stop in stops)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of text that is a beginning of stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


async def pieces(client: EngineClient, tokenizer: Tokenizer, token_ids: list[int], params: SamplingParams, metrics: Metrics,
                 first_index: int = 0, continues: bool = False, silent: bool = False) -> AsyncIterator[Piece]:
    """The completions first_index .. first_index + params.n - 1 of one prompt, as they come. continues: their text goes on from
    the prompt's. silent: what was generated is not wanted.

    A stop string aborts its completion in the engine, closing the iterator early all of them. Raises EngineFailed, and whatever
    the client raises when the engine refuses the request or is dead.
    """
    request_id = uuid4().hex
    live = set(range(params.n))
    texts = [TextStream(tokenizer, params, token_ids if continues else ()) for _ in range(params.n)]
    timer = metrics.request(params.n)
    try:
        async with aclosing(client.generate(request_id, token_ids, params)) as deltas:
            async for delta in deltas:
                if delta.index not in live:  # it met a stop string; these were on their way
                    continue
                if delta.finish_reason in ("error", "abort"):
                    raise EngineFailed(delta.error or "the engine ended the request")
                text, used, reason = texts[delta.index].take(delta)
                timer.tokens(delta.index, used, time.perf_counter())
                if reason is not None:
                    live.discard(delta.index)
                    timer.finished(reason)
                    if live and delta.finish_reason is None:  # the last one's `generate` is closed below
                        await client.abort(request_id, delta.index)
                if silent:
                    text, used, reason = "", 0, reason and "length"
                logprobs = [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())[:used]]
                yield Piece(first_index + delta.index, text, logprobs, used, delta.cached_tokens, reason)
                if not live:
                    break
        if live:
            raise EngineFailed("the engine's answer ended early")
    except BaseException as error:  # leaving early is one that is no Exception; a refusal is a ValueError
        timer.failed("refused" if isinstance(error, ValueError) else "error" if isinstance(error, Exception) else "abort")
        raise
    finally:
        timer.close()


async def merged(streams: list[AsyncIterator[Piece]]) -> AsyncIterator[Piece]:
    """All of the streams' pieces as they come; the first error ends all. Closing it closes every stream."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for piece in only:
                yield piece
        return
    queue: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[Piece]) -> None:
        try:
            async with aclosing(stream):
                async for piece in stream:
                    queue.put_nowait(piece)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

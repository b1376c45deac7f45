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
    from nybble.text import Detokenizer, Tokenizer


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
    """Token ids in, text out, up to the first stop string.

    Of several stop strings the one that is complete first wins (of equals the longest), as if tokens had come one by one
    character. Stop strings are not looked for in the text of the first min_tokens - 1 tokens.
    """

    def __init__(self, detokenizer: Detokenizer, stop: tuple[str, ...] = (), include_stop: bool = False,
                 min_tokens: int = 0) -> None:
        self._detokenizer, self._stop, self._include, self._min_tokens = detokenizer, stop, include_stop, min_tokens
        self._held, self._count, self.stopped = "", 0, False

    def push(self, token_ids: list[int], ended_by_id: bool = False) -> tuple[str, int]:
        """Text that is final now, and how many of the ids were used: fewer than given when a stop string ended it.

        ended_by_id: the last id is one that ends requests (EOS, `stop_token_ids`): it counts as used, but its text is left out
        unless stops are included.
        """
        silent = ended_by_id and not self._include
        spoken = token_ids[:-1] if silent else token_ids
        if not self._stop:
            return self._detokenizer.push(spoken), len(token_ids)
        text = ""
        for used, token_id in enumerate(spoken, 1):
            self._count += 1
            text += self._scan(self._detokenizer.push([token_id]))
            if self.stopped:
                return text, used
        return text, len(token_ids)

    def take(self, delta: Delta) -> tuple[str, int, str | None]:
        """What a delta adds: text that is final, how many of its ids were used, and why the completion ended if it did."""
        text, used = self.push(delta.token_ids, delta.finish_reason == "stop")
        if delta.finish_reason is not None:
            text += self.finish()
        return text, used, "stop" if self.stopped else delta.finish_reason

    def finish(self) -> str:
        """The rest, after the last push."""
        if self.stopped:
            return ""
        text = self._scan(self._detokenizer.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _scan(self, new: str) -> str:
        if not new or self._count < self._min_tokens or not self._stop:
            return new
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.stopped, self._held = True, ""
            return text[: end if self._include else start]
        keep = max(overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep]


def text_stream(tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int] = ()) -> TextStream:
    """For one completion. prompt: as `Tokenizer.stream` takes it."""
    detokenizer = tokenizer.stream(params.skip_special_tokens, prompt)
    return TextStream(detokenizer, params.stop, params.include_stop, params.min_tokens)


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
    texts = [text_stream(tokenizer, params, token_ids if continues else ()) for _ in range(params.n)]
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

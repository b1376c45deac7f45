"""From token ids to text as they come. The one idea: only text that no later token can change leaves."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import cache

REPLACEMENT = "�"


@cache
def byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Detokenizer:
    """`push` token ids, take text. All pushes and the `flush` joined are the tokenizer's decode of all ids.

    token_bytes: id -> the bytes it stands for (b"" for a skipped one), where the text is simply their concatenation (byte-level
    vocabularies). Otherwise None, and `decode` (ids -> str) is asked about a short window of ids; `is_byte` (id -> bool) tells
    which are single bytes: a run of them is decoded as a whole, so it is held until it ends. after: ids whose text is out
    already, for decoders that take the space off a text's first word: what is pushed then goes on from theirs.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], token_bytes: Callable[[int], bytes] | None = None,
                 is_byte: Callable[[int], bool] | None = None, after: Sequence[int] = ()) -> None:
        self._decode, self._token_bytes, self._is_byte = decode, token_bytes, is_byte
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = list(after)  # ids whose text is out (`_read` of them), kept as context, then ids whose text is not
        self._read = len(self._window)

    def push(self, ids: list[int]) -> str:
        if self._token_bytes is not None:
            return self._utf8.decode(b"".join(map(self._token_bytes, ids)))
        self._window += ids
        end = len(self._window)
        while self._is_byte is not None and end > self._read and self._is_byte(self._window[end - 1]):
            end -= 1
        text = self._text(end)
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._window, self._read = self._window[self._read:], end - self._read
        return text

    def flush(self) -> str:
        """What was held back; incomplete characters become U+FFFD. The detokenizer is empty afterwards."""
        if self._token_bytes is not None:
            text = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return text
        text = self._text(len(self._window))
        self._window, self._read = [], 0
        return text

    def _text(self, end: int) -> str:
        before = self._decode(self._window[:self._read])
        return self._decode(self._window[:end])[len(before):]

"""A tokenizer from the vocabulary inside a .gguf. Byte-level BPE only ("gpt2"); SentencePiece and the rest are refused.

What the file does not hold is how text is split before merging: `tokenizer.ggml.pre` only names it, and `SPLITS` says what
the name means.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from nybble.text.errors import BrokenFile

# Token types of llama.cpp. Control tokens (and the unknown) are special; user-defined ones are matched but shown.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
SPLIT_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST


def _by_regex(pattern: str) -> PreTokenizer:
    return Sequence([Split(Regex(pattern), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITS = {
    "default": lambda: ByteLevel(add_prefix_space=False),
    "gpt-2": lambda: ByteLevel(add_prefix_space=False),
    "smollm": lambda: Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]),
    "llama-bpe": lambda: _by_regex(SPLIT_LLAMA3),
    "qwen2": lambda: _by_regex(SPLIT_QWEN2),
}


def from_gguf(metadata: dict[str, Any], path: Path) -> tuple[Backend, dict[str, Any]]:
    """The tokenizer and its `tokenizer_config` (special tokens by role, chat template).

    Raises ValueError for a vocabulary that is not byte-level BPE, or split in a way that is not known here.
    """
    get = lambda key, default=None: metadata.get(f"tokenizer.ggml.{key}", default)  # noqa: E731
    tokens, kinds = get("tokens"), get("token_type")
    if not tokens:
        raise ValueError(f"{path} holds no vocabulary (tokenizer.ggml.tokens): use the model's Hugging Face directory")
    if get("model") != "gpt2":
        raise ValueError(f"{path}: tokenizer model {get('model')!r} is not supported, only byte-level BPE ('gpt2') is; "
                         "use the model's Hugging Face directory with its tokenizer.json")
    pre = get("pre", "default")
    if pre not in SPLITS:
        raise ValueError(f"{path}: pre-tokenizer {pre!r} is not known here ({', '.join(SPLITS)} are): the text would be split "
                         "wrongly; use the model's Hugging Face directory with its tokenizer.json")
    kinds = kinds or [1] * len(tokens)
    for role in ("bos", "eos", "unknown", "padding", "eot", "eom"):
        if (found := get(f"{role}_token_id", 0)) >= len(tokens):
            raise BrokenFile(path, f"it has {len(tokens)} tokens, and its {role}_token_id is {found}")
    merges = [tuple(merge.split(" ")) for merge in get("merges", [])]
    try:
        backend = Backend(BPE({token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe"))
    except Exception as error:  # the binding raises bare Exception
        raise BrokenFile(path, f"its vocabulary and merges do not fit together ({error})") from error
    backend.pre_tokenizer, backend.decoder = SPLITS[pre](), ByteLevelDecoder()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.add_tokens([
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, kinds) if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ])
    ids = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    roles = {role: get(f"{name}_token_id") for role, name in ids.items()}
    config: dict[str, Any] = {f"{role}_token": tokens[i] for role, i in roles.items() if i is not None}
    config["eos_ids"] = sorted({i for i in (roles["eos"], get("eot_token_id"), get("eom_token_id")) if i is not None})
    # llama.cpp adds BOS in front of Llama 3 text even where the file does not say so.
    around = [(role, get(f"add_{role}_token", role == "bos" and pre == "llama-bpe")) for role in ("bos", "eos")]
    around = [role for role, wanted in around if wanted and roles[role] is not None]
    if around:
        mark = {role: config[f"{role}_token"] for role in around}
        one = [mark[r] for r in around if r == "bos"] + ["$A"] + [mark[r] for r in around if r == "eos"]
        two = one + [piece.replace("$A", "$B") + ":1" for piece in one]
        backend.post_processor = TemplateProcessing(single=one, pair=two,
                                                    special_tokens=[(mark[role], roles[role]) for role in around])
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return backend, config

"""The tokenizer of a checkpoint: ids, text, chat prompts, and which ids end a turn. Built on `tokenizers` and jinja2.

Not a training tool and no transformers: what is in `tokenizer.json` (or in the .gguf) is what is used.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from nybble.text.chat import render
from nybble.text.detokenizer import REPLACEMENT, Detokenizer, byte_of_char
from nybble.text.errors import BrokenFile, held, read_json, write_json
from nybble.text.gguf import find_gguf, read_gguf
from nybble.text.vocabulary import from_gguf

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """config: `tokenizer_config.json`'s special tokens by role. templates: chat templates by name ("default" and others)."""

    def __init__(self, backend: Backend, config: dict[str, Any], templates: dict[str, str], eos_ids: tuple[int, ...],
                 bos_id: int | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.templates, self.eos_ids, self.bos_id = backend, templates, eos_ids, bos_id
        self.special = {role: _content(config[role]) for role in ROLES if config.get(role)}
        # Models name further tokens for their templates (e.g. image_token); transformers passes these to them too.
        extra = config.get("extra_special_tokens") or config.get("model_specific_special_tokens")
        if isinstance(extra, dict):
            self.special |= {role: _content(token) for role, token in extra.items()}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        decoder = json.loads(backend.to_str())["decoder"] or {}
        self._decoders = {step.get("type") for step in (decoder, *decoder.get("decoders", ()))}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """add_special: put around what the tokenizer puts around a text (usually a BOS); off for rendered chat prompts.

        Raises ValueError for a lone surrogate, which is what Python makes of an argument that is not UTF-8.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("the text is not valid Unicode (it holds a lone surrogate): send UTF-8") from None
        # Of the binding's ways to encode and decode, those of several texts let other threads run meanwhile.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special)[0]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; those of a special token are its name, those of an unknown id are none."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._bytes_of(token_id)
        return self._bytes[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            table = byte_of_char()
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
        if token_id in self._added:
            return token.encode()
        if "ByteFallback" in self._decoders and _is_byte(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def stream(self, skip_special: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for one completion. prompt: the ids that its text goes on from; without, it is a text of its own,
        whose first word has no space before it where the vocabulary (Llama 2's, say) puts one before every text."""
        skipped = self._special_ids if skip_special else set()
        decode = lambda ids: self.decode(ids, skip_special)  # noqa: E731
        if self._byte_level:
            return Detokenizer(decode, lambda i: b"" if i in skipped else self.token_bytes(i))
        shown = [i for i in prompt[-16:] if i not in skipped]
        ends = (shown[-n:] for n in range(1, 5))  # of up to a character of four bytes; half of one is no text to go on from
        after = next((end for end in ends if not decode(end).endswith(REPLACEMENT)), ())
        if "ByteFallback" in self._decoders:
            # A skipped token does not end a run of bytes: the decoder never sees it.
            return Detokenizer(decode, is_byte=lambda i: i in self._byte_ids or i in skipped, after=after)
        return Detokenizer(decode, after=after)

    @cached_property
    def _byte_ids(self) -> set[int]:
        return {i for token, i in self.backend.get_vocab().items() if _is_byte(token) and i not in self._added}

    def special_id(self, text: str) -> int | None:
        """The id of a special token."""
        found = self.backend.token_to_id(text)
        return found if found in self._special_ids else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.templates)

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
             add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt of a conversation ([{"role", "content", ...}]); encode it with add_special=False.

        tools: JSON schemas of functions. kwargs: further variables of the template (e.g. enable_thinking, documents).
        Raises ValueError when there is no template, or it refuses.
        """
        if not self.templates:
            raise ValueError("this model has no chat template: use plain completions, or a checkpoint of an instruct model")
        named = "tool_use" if tools and "tool_use" in self.templates else "default"
        if named not in self.templates:
            raise ValueError(f"this model has several chat templates ({', '.join(self.templates)}) and no default one")
        variables = {"documents": None} | self.special | kwargs
        return render(self.templates[named], **(variables | {"messages": messages, "tools": tools,
                                                              "add_generation_prompt": add_generation_prompt}))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and generation_config.json, as transformers reads them."""
        self.backend.save(str(folder / "tokenizer.json"), pretty=False)
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= {role: token for role, token in self.special.items() if role in ROLES}
        if self.templates:
            named = [{"name": name, "template": text} for name, text in self.templates.items()]
            config["chat_template"] = self.templates["default"] if list(self.templates) == ["default"] else named
        write_json(folder / "tokenizer_config.json", config)
        pad = self.special.get("pad_token")
        ids = {"bos_token_id": self.bos_id, "eos_token_id": self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids),
               "pad_token_id": self.backend.token_to_id(pad) if pad else None}
        write_json(folder / "generation_config.json", {k: v for k, v in ids.items() if v is not None and v != []})


def load_tokenizer(path: str | Path) -> Tokenizer:
    """path: a Hugging Face directory with tokenizer.json, or a .gguf with a byte-level BPE vocabulary.

    Raises FileNotFoundError or ValueError with what was looked for and what would do.
    """
    path = Path(path)
    if file := find_gguf(path):
        backend, config = from_gguf(read_gguf(file).metadata, file)
        eos_ids = tuple(config.pop("eos_ids"))
        template = config.get("chat_template")
        bos = config.get("bos_token")
        return Tokenizer(backend, config, {"default": template} if template else {}, eos_ids,
                         backend.token_to_id(bos) if bos else None)
    if not path.is_dir():
        raise FileNotFoundError(f"no such directory: {path}" if not path.exists() else f"{path} is no model directory or .gguf")
    if not (path / "tokenizer.json").is_file():
        slow = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (path / name).exists()]
        hint = f"it has {slow[0]}: save it once with transformers' AutoTokenizer" if slow else "copy it from the original model"
        raise FileNotFoundError(f"no tokenizer.json in {path}; {hint}")
    try:
        backend = Backend.from_file(str(path / "tokenizer.json"))
    except Exception as error:  # the binding raises bare Exception
        raise BrokenFile(path / "tokenizer.json", str(error)) from error
    config = read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")
    for role in ROLES:
        held(config, role, str, dict, where="tokenizer_config.json")
    generation, model = read_json(path / "generation_config.json"), read_json(path / "config.json")
    token_id = lambda role: backend.token_to_id(_content(config[role])) if config.get(role) else None  # noqa: E731
    first = lambda *values: next((v for v in values if v is not None), None)  # noqa: E731
    return Tokenizer(backend, config, _templates(path, config),
                     _eos_ids(first(generation.get("eos_token_id"), model.get("eos_token_id")), token_id("eos_token")),
                     first(token_id("bos_token"), generation.get("bos_token_id"), model.get("bos_token_id")))


def _eos_ids(listed: int | list[int] | None, token: int | None) -> tuple[int, ...]:
    """Those the configs list, and the tokenizer's own: chat models often end turns with the latter alone."""
    ids = [listed] if isinstance(listed, int) else list(listed or [])
    return tuple(dict.fromkeys([*ids, token] if token is not None else ids))


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name. A chat_template.jinja file wins over tokenizer_config.json, as in transformers."""
    listed, found = held(config, "chat_template", str, list[dict], where="tokenizer_config.json"), {}
    for entry in [{"name": "default", "template": listed}] if isinstance(listed, str) else listed or []:
        name, template = (held(entry, key, str, where="tokenizer_config.json: chat_template") for key in ("name", "template"))
        if name is None or template is None:
            raise ValueError("tokenizer_config.json: chat_template wants a name and a template in each of its objects")
        found[name] = template
    legacy = read_json(path / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        found["default"] = legacy
    if (path / "chat_template.jinja").is_file():
        found["default"] = (path / "chat_template.jinja").read_text(encoding="utf-8")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = file.read_text(encoding="utf-8")
    return found


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")

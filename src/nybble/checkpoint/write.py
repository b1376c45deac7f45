"""Writing checkpoints that others read: compressed-tensors, QQQ, GPTQ or AWQ, tokenizer and chat template included.

Tensors are taken one at a time and leave memory with their shard. The directory appears under its name only when it is
complete: until then it is in .NAME.<random>/ beside it. Files in it that Nybble does not write stay when it is replaced.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from nybble.checkpoint.checkpoint import Checkpoint
from nybble.checkpoint.compressed import TURNED, transform_config
from nybble.checkpoint.kv import role_of
from nybble.checkpoint.store import INDEX
from nybble.checkpoint.writers import WRITERS
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import KV, Scheme
from nybble.text import load_tokenizer
from nybble.text.errors import read_json, write_json
from nybble.text.gguf import find_gguf

SHARD_BYTES = 5_000_000_000
PATIENCE_SECONDS = 10.0  # with other writers, which hold a folder for moments
CARRIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
           "merges.txt", "tokenizer.model", "generation_config.json", "chat_template.jinja", "chat_template.json", "LICENSE*",
           "NOTICE*")
# What is replaced with a checkpoint, whether the new one has it or not. (A licence is replaced by another, not dropped.)
REPLACED = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|additional_chat_templates|config\.json|quantize_config\.json|"
                      + "|".join(map(re.escape, (INDEX, *(name for name in CARRIED if "*" not in name)))))
# What the source says about its own quantization and dtype, and is not true of what is written.
STALE = ("quantization_config", "compression_config", "kv_cache_torch_dtype", "kv_cache_dtype", "nybble", "dtype")


def write_checkpoint(out: str | Path, config: dict[str, Any], tensors: Iterable[tuple[str, Tensor | QTensor]],
                     schemes: Mapping[str, Scheme], kv: str | None, source: Checkpoint, recipe: Mapping[str, Any],
                     shard_bytes: int = SHARD_BYTES, format: str = "compressed-tensors", hadamard: int = 0) -> None:
    """out: a directory, replaced if Nybble wrote it. config: of the source. tensors: (parameter name, value), any order;
    quantized linears as `QTensor`; FP8 KV scales as "...self_attn.k_scale", "...v_scale", one number or one per head, or as
    TGI's "...self_attn.kv_scale", which then stay out of the quantization_config. schemes: by linear module, for what its
    activations are. kv: key of `formats.spec.KV` to serve with. recipe: how it was made, for the record. format: a key of
    `writers.WRITERS`. hadamard: as `Checkpoint.hadamard`, compressed-tensors only; written under a model_type of its own,
    because others may pass over a transform_config without a word.

    Raises FileExistsError for a directory that is not ours, ValueError for what the format cannot say, and leaves nothing
    behind then.
    """
    out = Path(os.path.abspath(out))  # "." has no name that another directory could take
    if kv is not None and kv not in KV:
        raise ValueError(f"KV cache {kv!r} is not known; {', '.join(KV)} are")
    if format not in WRITERS:
        raise ValueError(f"format {format!r} is not written; {', '.join(WRITERS)} are")
    writer, dtype = WRITERS[format], source.dtype
    with staged(out, source.path) as partial:
        described, plain, scales, tgi = {}, [], {}, False
        shards = _Shards(partial, shard_bytes)
        for name, value in tensors:
            module, _, last = name.rpartition(".")
            if isinstance(value, QTensor):
                scheme = schemes.get(module)
                try:
                    described[module] = writer.describe(value, scheme.act if scheme else None)
                    encoded = writer.encode(module, value, described[module], dtype)
                except ValueError as error:
                    named = str(error) if str(error).startswith(module) else f"{module}: {error}"
                    raise ValueError(f"{named} (writing {format})") from error
                for item in encoded.items():
                    shards.add(*item)
                continue
            if last == "weight" and value.dim() == 2 and "embed" not in module:
                plain.append(module)
            if value.dim() == 2 and value.dtype == torch.float32:  # decoded from a GGUF: kept in the model's dtype
                value = value.to(dtype)
            role = role_of(name)
            tgi |= role == "kv"
            if role in ("k", "v"):
                scales[name] = value = value.reshape(1) if value.numel() == 1 else value.reshape(-1, 1, 1)
            shards.add(name, value)
        shards.finish()
        alone = format == "compressed-tensors" and (scales or tgi)  # KV scales alone are worth a checkpoint
        if not described and not alone:
            raise ValueError(f"nothing was quantized: there is nothing to write as {format}")
        if "lm_head" not in described and "lm_head" not in plain:
            plain.append("lm_head")  # tied to the embedding: the module exists without a tensor
        written = {key: value for key, value in config.items() if key not in STALE}
        written["torch_dtype"] = str(dtype).removeprefix("torch.")
        if described or not tgi:
            written["quantization_config"] = writer.block(described, plain)
        if hadamard:
            written["quantization_config"]["transform_config"] = transform_config(hadamard)
            written["model_type"] = str(config.get("model_type")).removesuffix(TURNED) + TURNED
        if tgi:
            written["kv_cache_torch_dtype"] = "float8_e4m3fn"
        elif format == "compressed-tensors":
            written["quantization_config"]["kv_cache_scheme"] = _kv_scheme(kv, scales, source.num_layers)
        written["nybble"] = {"kv_cache": kv, "recipe": dict(recipe)}
        write_json(partial / "config.json", written)
        if format == "gptq":  # where AutoGPTQ looks
            write_json(partial / "quantize_config.json", written["quantization_config"])
        _carry_text(source.path, partial)


@contextmanager
def staged(out: Path, source: Path | None = None) -> Iterator[Path]:
    """A directory that takes the place of `out` when the block ends well, and is gone otherwise. Of several at the same time
    the last to end stays. Raises as `check_target`, before and after."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(out.parent):
        check_target(out, source)
        _sweep(out)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".nybble", dir=out.parent))
        lock = lock_file(aside / "lock")
    try:
        (aside / "new").mkdir()
        yield aside / "new"
        with alone_in(out.parent):
            check_target(out, source)
            _replace_directory(aside / "new", out, aside / "old")
    finally:
        if lock is not None:
            lock.close()
        _remove_aside(aside)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Other writers wait until the block ends, where the file system has locks; not for ever: the lock may be another
    program's, as in `flock FOLDER nybble ...`."""
    descriptor, until = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE_SECONDS
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # no locks here
                break
        yield
    finally:
        os.close(descriptor)


def _kv_scheme(kv: str | None, scales: dict[str, Tensor], layers: int) -> dict[str, Any] | None:
    """What `kv_cache_scheme` can say: fp8 with static scales. Raises ValueError when only some layers have them."""
    if not scales:
        return None
    if kv != "fp8" or len(scales) != 2 * layers:
        raise ValueError(f"{len(scales)} KV scales for {layers} layers and KV cache {kv!r}: an fp8 cache wants a K and a V "
                         "scale for every layer, other caches none")
    if len({scale.numel() for scale in scales.values()}) > 1:
        raise ValueError("some KV scales are per head and some are not: compressed-tensors wants all alike")
    strategy = "attn_head" if next(iter(scales.values())).numel() > 1 else "tensor"
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}


class _Shards:
    """Collects tensors and writes a file whenever the next would not fit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.waiting: dict[str, Tensor] = {}
        self.size = self.total = 0
        self.files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.nbytes
        if name in self.waiting or any(name in names for names in self.files):
            raise ValueError(f"tensor {name!r} was given twice")
        if self.waiting and self.size + size > self.limit:
            self._flush()
        self.waiting[name] = tensor.detach().cpu().contiguous()
        self.size += size
        self.total += size

    def finish(self) -> None:
        """Name the files as transformers expects, with an index when there are several."""
        self._flush()
        count = len(self.files)
        if count == 1:
            (self.folder / "0.tmp").rename(self.folder / "model.safetensors")
            return
        where = {}
        for i, names in enumerate(self.files):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            (self.folder / f"{i}.tmp").rename(self.folder / file)
            where |= dict.fromkeys(names, file)
        write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": where})

    def _flush(self) -> None:
        # A view of a larger storage, or of one that is here already (tied weights), would be refused or written twice: copy it.
        own: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, tensor in self.waiting.items():
            shared = tensor.untyped_storage().nbytes() != tensor.nbytes or (tensor.data_ptr() in seen and tensor.numel())
            own[name] = tensor.clone() if shared else tensor
            seen.add(own[name].data_ptr())
        path = self.folder / f"{len(self.files)}.tmp"
        save_file(own, str(path), metadata={"format": "pt"})
        os.umask(mask := os.umask(0))
        path.chmod(0o666 & ~mask)  # safetensors writes for the owner alone
        self.files.append(list(self.waiting))
        self.waiting, self.size = {}, 0


def _carry_text(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and generation defaults: copied, or made from a GGUF's vocabulary."""
    if find_gguf(source):
        load_tokenizer(source).save(folder)
        return
    for pattern in CARRIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", folder / "additional_chat_templates")


def check_target(out: Path, source: Path | None) -> None:
    """Raises FileExistsError for a directory that is not Nybble's to replace, or is what is being read."""
    if source is not None and out.exists() and out.resolve() == source.resolve():
        raise FileExistsError(f"{out} is the checkpoint that is being read: choose another output directory")
    ours = False
    with suppress(OSError, ValueError):  # nothing there, no directory, one with somebody's broken config.json
        ours = not out.is_symlink() and (not any(out.iterdir()) or "nybble" in read_json(out / "config.json"))
    if os.path.lexists(out) and not ours:
        raise FileExistsError(f"{out} exists and was not written by Nybble, so it is not replaced: choose another directory")


def _replace_directory(partial: Path, out: Path, old: Path) -> None:
    """Put `partial` in the place of `out`, with what `out` held that Nybble does not write. old: a free name for the while."""
    if not out.exists():
        os.replace(partial, out)
        return
    os.replace(out, old)
    try:
        os.replace(partial, out)
    except BaseException:
        os.replace(old, out)
        raise
    for entry in list(old.iterdir()):
        if not REPLACED.fullmatch(entry.name) and not os.path.lexists(out / entry.name):
            os.replace(entry, out / entry.name)
        elif entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        elif entry.name == "additional_chat_templates":
            shutil.rmtree(entry)
    with suppress(OSError):  # a folder under a name we write: stays aside
        old.rmdir()


def _remove_aside(aside: Path) -> None:
    """A finished or dead writer's directory. Not what it may have died over putting back ("old")."""
    shutil.rmtree(aside / "new", ignore_errors=True)
    if not (aside / "old").exists():
        with suppress(OSError):
            (aside / "lock").unlink(missing_ok=True)
            aside.rmdir()


def _sweep(out: Path) -> None:
    """Remove what killed writers of `out` left: their locks are free."""
    for file in out.parent.glob(f".{escape(out.name)}.*.nybble/lock"):
        with suppress(OSError):
            held = lock_file(file)
            if held is not None:
                _remove_aside(file.parent)
                held.close()


def lock_file(path: Path) -> TextIO | None:
    """`path`, opened and locked until it is closed or the process dies; None where the file system has no locks.

    Raises BlockingIOError when another holds it.
    """
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError:
        file.close()
        return None
    return file

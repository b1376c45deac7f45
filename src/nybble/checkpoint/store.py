"""Tensors of a safetensors directory by name: single file or shards, memory-mapped, nothing read before it is asked for.

It knows no format and no model. Pickled weights (.bin, .pt) are never loaded: they can run code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nybble.text.errors import BrokenFile

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class MissingTensor(KeyError, ValueError):
    """A KeyError for code that looks, a ValueError for whoever brought the checkpoint; it prints without KeyError's quotes."""

    __str__ = Exception.__str__


class Store:
    """Raises FileNotFoundError (nothing there, a shard missing), BrokenFile (cut short, damaged, index and files disagree)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file_of: dict[str, Any] = {}
        self._info: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        listed = _index(path)
        for file in _files(path, listed):
            try:
                opened = safe_open(str(file), framework="pt", device="cpu")
                names = opened.keys()
            except (SafetensorError, OSError, ValueError) as error:
                raise BrokenFile(file, str(error)) from error
            for name in names:
                if name in self._file_of:
                    raise BrokenFile(file, f"tensor {name!r} is already in another shard")
                view = opened.get_slice(name)
                kind = view.get_dtype()
                if kind not in DTYPES:
                    raise ValueError(f"{file}: tensor {name!r} has dtype {kind}, which is not supported")
                self._file_of[name] = opened
                self._info[name] = (tuple(view.get_shape()), DTYPES[kind])
        if missing := [name for name in listed if name not in self._file_of]:
            raise BrokenFile(path / INDEX, f"{len(missing)} tensors it lists are in no shard, e.g. {missing[0]!r}")

    def names(self) -> list[str]:
        return list(self._info)

    def has(self, name: str) -> bool:
        return name in self._info

    def shape(self, name: str) -> tuple[int, ...]:
        return self._at(name)[0]

    def dtype(self, name: str) -> torch.dtype:
        return self._at(name)[1]

    def tensor(self, name: str) -> Tensor:
        """Its pages are read from disk when touched. Raises KeyError naming what is missing."""
        self._at(name)
        return self._file_of[name].get_tensor(name)

    def _at(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        if name not in self._info:
            raise MissingTensor(f"{self.path} has no tensor {name!r}{_close(name, self._info)}")
        return self._info[name]


def _close(name: str, names: dict[str, Any]) -> str:
    stem = name.rsplit(".", 1)[0] + "."
    beside = sorted(other for other in names if other.startswith(stem))
    return f"; beside it are {', '.join(beside[:6])}" if beside else ""


def _index(path: Path) -> dict[str, str]:
    """tensor -> file, {} without an index."""
    file = path / INDEX
    if not file.is_file():
        return {}
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenFile(file, f"no weight_map in it ({error!r})") from error
    if not isinstance(listed, dict) or not all(isinstance(v, str) and Path(v).name == v for v in listed.values()):
        raise BrokenFile(file, "its weight_map does not map tensors to files beside it")
    return listed


def _files(path: Path, listed: dict[str, str]) -> list[Path]:
    if listed:
        files = [path / name for name in sorted(set(listed.values()))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        found = sorted(path.glob("*.safetensors"))
        shards = [file for file in found if "-of-" in file.stem]
        files = shards or found
        if shards:
            stem, total = shards[0].stem.rsplit("-of-", 1)
            prefix = stem.rsplit("-", 1)[0]
            width = len(total)
            files = [path / f"{prefix}-{i:0{width}}-of-{total}.safetensors" for i in range(1, int(total) + 1)] \
                if total.isdigit() else shards
        elif len(found) > 1:
            raise ValueError(f"{path} has no model.safetensors but several others ({', '.join(f.name for f in found)}): "
                             "which are the weights cannot be told; add an index or rename one to model.safetensors")
    if not files:
        pickled = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        raise FileNotFoundError(
            f"no safetensors weights in {path}" + (f"; {pickled[0].name} is a pickle, which can run code and is never loaded: "
                                                   "convert it with transformers' save_pretrained" if pickled else ""))
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"shard {file.name} of {path} is missing ({len(files)} belong here): download it again")
    return files

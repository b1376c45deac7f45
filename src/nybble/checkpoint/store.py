"""Tensors of a safetensors directory by name: single file or shards, nothing read before it is asked for.

A tensor is read from its place in the file into memory of its own, never mapped: what was given back does not count against
the process any more, so loading takes what stays plus one tensor. It knows no format and no model. Pickled weights (.bin, .pt)
are never loaded: they can run code.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nybble.text.errors import BrokenFile, read_json

INDEX = "model.safetensors.index.json"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz}
Stamp = tuple[int, int]


class Place(NamedTuple):
    """Where a tensor is. dtype: None for one that torch or Nybble does not have (`kind` names it). read: gives its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: str
    read: Callable[[], Tensor]


class MissingTensor(KeyError, ValueError):
    """A KeyError for code that looks, a ValueError for whoever brought the checkpoint; it prints without KeyError's quotes."""

    __str__ = Exception.__str__


class Store:
    """Tensors by name, of the checkpoint at `path`."""

    def __init__(self, path: Path, places: dict[str, Place]) -> None:
        self.path, self._places = path, places

    def names(self) -> list[str]:
        return list(self._places)

    def has(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._at(name).shape

    def dtype(self, name: str) -> torch.dtype | None:
        return self._at(name).dtype

    def tensor(self, name: str) -> Tensor:
        """Raises KeyError naming what is missing, ValueError for a dtype that is not supported."""
        place = self._at(name)
        if place.dtype is None:
            raise ValueError(f"{self.path}: tensor {name!r} has dtype {place.kind}, which is not supported")
        return place.read()

    def _at(self, name: str) -> Place:
        if name not in self._places:
            stem = name.rsplit(".", 1)[0] + "."
            beside = sorted(other for other in self._places if other.startswith(stem))
            raise MissingTensor(f"{self.path} has no tensor {name!r}" + (f"; beside it are {', '.join(beside[:6])}" if beside
                                                                         else ""))
        return self._places[name]


def open_safetensors(path: Path) -> Store:
    """Raises FileNotFoundError (nothing there, a shard missing), BrokenFile (cut short, damaged, index and files disagree)."""
    places: dict[str, Place] = {}
    listed = _index(path)
    for file in _files(path, listed):
        for name, place in read_header(file).items():
            if name in places:
                raise BrokenFile(file, f"tensor {name!r} is already in another shard")
            places[name] = place
    if missing := [name for name in listed if name not in places]:
        raise BrokenFile(path / INDEX, f"{len(missing)} tensors it lists are in no shard, e.g. {missing[0]!r}")
    return Store(path, places)


def read_header(file: Path) -> dict[str, Place]:
    """The tensors of one safetensors file. Raises BrokenFile for a header that does not describe exactly the bytes after it."""
    try:
        with safe_open(file, "np"), file.open("rb") as opened:  # the first checks that
            length = int.from_bytes(opened.read(8), "little")
            entries = json.loads(opened.read(length), object_pairs_hook=partial(_once, file))
            found = stamp(opened.fileno())
    except SafetensorError as error:
        raise BrokenFile(file, str(error)) from error
    entries.pop("__metadata__", None)
    places = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        kind, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        read = partial(_read, file, found, 8 + length + first, last - first, DTYPES.get(kind), shape)
        places[name] = Place(shape, DTYPES.get(kind), kind, read)
    return places


def _once(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The package takes the last of two tensors of one name."""
    names = sorted(name for name, _ in pairs)
    if twice := [a for a, b in pairwise(names) if a == b]:
        raise BrokenFile(file, f"its header names {twice[0]!r} twice")
    return dict(pairs)


def _read(file: Path, before: Stamp, start: int, size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    with file.open("rb") as opened:
        if stamp(opened.fileno()) != before:
            raise ValueError(f"{file} has changed while it was being read: start again")
        raw = np.fromfile(opened, np.uint8, size, offset=start)
    return torch.from_numpy(raw).view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)  # no view of nothing


def stamp(file: Path | int) -> Stamp | None:
    """What tells that a file (or a descriptor's) is another now; None where there is none any more."""
    with suppress(FileNotFoundError):
        found = os.stat(file)
        return found.st_mtime_ns, found.st_size
    return None


def _index(path: Path) -> dict[str, str]:
    """tensor -> file, {} without an index."""
    file = path / INDEX
    if not file.is_file():
        return {}
    listed = read_json(file).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) and Path(v).name == v for v in listed.values()):
        raise BrokenFile(file, "it has no weight_map from tensors to files beside it")
    return listed


def _files(path: Path, listed: dict[str, str]) -> list[Path]:
    if listed:
        files = [path / name for name in sorted(set(listed.values()))]
    elif (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    else:
        found = sorted(path.glob("*.safetensors"))
        files = [file for file in found if "-of-" in file.stem] or found
        if shard := re.fullmatch(r"(.*-)?[^-]*-of-(\d+)", files[0].stem if files else ""):
            prefix, total = shard.groups("")
            files = [path / f"{prefix}{i:0{len(total)}}-of-{total}.safetensors" for i in range(1, int(total) + 1)]
        elif len(found) > 1 and files is found:
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

"""Tensors of a safetensors directory by name: single file or shards, nothing read before it is asked for.

A tensor is read from its place in the file into memory of its own, never mapped: what was given back does not count against
the process any more, so loading takes what stays plus one tensor. It knows no format and no model. Pickled weights (.bin, .pt)
are never loaded: they can run code.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nybble.text.errors import BrokenFile

INDEX = "model.safetensors.index.json"
LARGEST_HEADER = 100_000_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
          "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}


class Place(NamedTuple):
    """Where a tensor is. dtype: None for one that torch or Nybble does not have (`kind` names it)."""

    file: Path
    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    kind: str


class MissingTensor(KeyError, ValueError):
    """A KeyError for code that looks, a ValueError for whoever brought the checkpoint; it prints without KeyError's quotes."""

    __str__ = Exception.__str__


class Store:
    """Raises FileNotFoundError (nothing there, a shard missing), BrokenFile (cut short, damaged, index and files disagree)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, Place] = {}
        listed = _index(path)
        for file in _files(path, listed):
            for name, place in read_header(file).items():
                if name in self._places:
                    raise BrokenFile(file, f"tensor {name!r} is already in another shard")
                self._places[name] = place
        if missing := [name for name in listed if name not in self._places]:
            raise BrokenFile(path / INDEX, f"{len(missing)} tensors it lists are in no shard, e.g. {missing[0]!r}")

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
            raise ValueError(f"{place.file}: tensor {name!r} has dtype {place.kind}, which is not supported")
        raw = np.fromfile(place.file, np.uint8, place.size, offset=place.offset)
        if raw.size != place.size:
            raise BrokenFile(place.file, f"it ends within tensor {name!r}")
        return torch.from_numpy(raw).view(place.dtype).reshape(place.shape)

    def _at(self, name: str) -> Place:
        if name not in self._places:
            raise MissingTensor(f"{self.path} has no tensor {name!r}{_close(name, self._places)}")
        return self._places[name]


def read_header(file: Path) -> dict[str, Place]:
    """The tensors of one safetensors file. Raises BrokenFile for a header that does not describe exactly the bytes after it."""
    try:
        with file.open("rb") as opened:
            length, size = int.from_bytes(opened.read(8), "little"), file.stat().st_size
            if size < 8 or length > min(size - 8, LARGEST_HEADER):
                raise ValueError(f"its header of {length} bytes does not fit in the file's {size}: it is cut short, or no "
                                 "safetensors file")
            entries = json.loads(opened.read(length).decode("utf-8"), object_pairs_hook=_no_duplicates)
        return _places(file, entries, 8 + length, size)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenFile(file, str(error)) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"its header names {twice!r} twice")
    return found


def _places(file: Path, entries: dict[str, Any], start: int, size: int) -> dict[str, Place]:
    places, end = {}, 0
    entries.pop("__metadata__", None)
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        kind, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        dtype = DTYPES.get(kind)
        if not all(isinstance(side, int) and side >= 0 for side in (*shape, first, last)) or first != end or last < first:
            raise ValueError(f"tensor {name!r}, {kind} {list(shape)}, is said to lie in bytes {first} to {last}, after {end}")
        if dtype is not None and math.prod(shape) * dtype.itemsize != last - first:
            raise ValueError(f"tensor {name!r}, {kind} {list(shape)}, cannot take {last - first} bytes")
        places[name] = Place(file, start + first, last - first, shape, dtype, kind)
        end = last
    if start + end != size:
        raise ValueError(f"its tensors end at byte {start + end}, the file at {size}: it is cut short or damaged")
    return places


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

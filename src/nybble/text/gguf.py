"""The GGUF container: header, metadata and where each tensor's bytes lie. Not what the bytes mean (checkpoint/gguf.py).

The one idea: one pass over the header with `struct`, because a vocabulary has a hundred thousand entries and the reader of
the `gguf` package makes several arrays of each (seconds, where this takes a tenth). Layout: ggml-org/ggml docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from nybble.text.errors import BrokenFile

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class TensorInfo:
    """shape: rows first, [N, K], as torch has it. kind: ggml type number. offset: bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GGUF:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def find_gguf(path: str | Path) -> Path | None:
    """The .gguf that `path` means: itself, or the only one in a directory without config.json. None when it is neither.

    Raises ValueError when a directory has several.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ValueError(f"{path} holds {len(files)} .gguf files: name one, e.g. {files[0]}")
    return files[0] if files else None


def read_gguf(path: str | Path) -> GGUF:
    """Header of a little-endian GGUF of version 2 or 3.

    Raises FileNotFoundError, BrokenFile (a ValueError) for a file that is cut short or not GGUF, ValueError for a split one.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    size = path.stat().st_size
    if size < 24:
        raise BrokenFile(path, f"{size} bytes cannot hold a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(data)
        magic, version = cursor.take(4), cursor.scalar("I")
        if magic != b"GGUF":
            raise BrokenFile(path, f"starts with {magic!r}, not with b'GGUF'")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} (or big-endian); versions 2 and 3, little-endian, can be read")
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        try:
            metadata = {}
            for _ in range(num_entries):
                key = cursor.string()
                metadata[key] = cursor.value(cursor.scalar("I"))
            infos = [cursor.tensor() for _ in range(num_tensors)]
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError, OverflowError) as error:
            raise BrokenFile(path, f"its header ends early or is damaged ({error})") from error
        if metadata.get("split.count", 1) > 1:
            raise ValueError(f"{path} is one of {metadata['split.count']} parts; join them with llama.cpp's gguf-split --merge")
        align = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        start = -(-cursor.at // align) * align
        tensors = {name: TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in infos}
    if len(tensors) != num_tensors:
        raise BrokenFile(path, "a tensor's name appears twice")
    return GGUF(path, metadata, tensors)


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise struct.error(f"wants {count} bytes at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count:self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            code = f"<{count}{SCALARS[inner]}"
            return list(struct.unpack(code, self.take(struct.calcsize(code))))
        return [self.value(inner) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self.string(), self.scalar("I")
        if dims > 4:
            raise struct.error(f"tensor {name!r} of {dims} dimensions")
        shape = struct.unpack(f"<{dims}Q", self.take(8 * dims))
        if prod(shape) > 1 << 48:
            raise struct.error(f"tensor {name!r} of shape {shape}")
        return name, tuple(reversed(shape)), self.scalar("I"), self.scalar("Q")

"""What a killed run leaves behind, so that the next one with the same recipe goes on after the last layer it finished.

Not the checkpoint: a directory beside it, OUT.resume, deleted when the checkpoint is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from nybble.formats.qtensor import QTensor
from nybble.formats.spec import Scheme

Tensors = list[tuple[str, Tensor | QTensor]]
SHARE = 0.1  # of the time may go into saving the stream


class Saved:
    """folder: where. key: of everything that decides the bytes; what another key left behind is deleted."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.due, self.finished = folder, 0.0, 0
        marker = folder / "key.json"
        if marker.is_file() and marker.read_text() == key:
            self.finished = int(self._meta("stream")["finished"]) if (folder / "stream").is_file() else 0
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        marker.write_text(key)

    def note(self, name: str, value: object) -> None:
        (self.folder / f"{name}.json").write_text(json.dumps(value))

    def noted(self, name: str) -> object | None:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def load_layer(self, index: int, schemes: Mapping[str, Scheme]) -> tuple[Tensors, dict[str, float | None]]:
        """The layer's tensors and its linears' errors, as saved."""
        tensors: Tensors = []
        meta = self._meta(f"layer{index}")
        with safe_open(self.folder / f"layer{index}", "pt") as file:
            for name in json.loads(meta["names"]):
                spec = schemes[name.removesuffix(".weight")].weight if f"{name}/codes" in file.keys() else None  # noqa: SIM118
                if spec is None:
                    tensors.append((name, file.get_tensor(name)))
                    continue
                codes, scale = (file.get_tensor(f"{name}/{part}") for part in ("codes", "scale"))
                over = file.get_tensor(f"{name}/over") if spec.over is not None else None
                tensors.append((name, QTensor(spec, codes, scale, over=over)))
        return tensors, json.loads(meta["errors"])

    def load_stream(self) -> list[list[Tensor]]:
        """The streams' chunks after the last finished layer."""
        streams: dict[str, list[Tensor]] = {}
        with safe_open(self.folder / "stream", "pt") as file:
            for name in sorted(file.keys()):
                streams.setdefault(name.split("/")[0], []).append(file.get_tensor(name))
        return list(streams.values())

    def save(self, index: int, tensors: Tensors, errors: Mapping[str, float | None],
             streams: Sequence[Sequence[Tensor]]) -> None:
        """A finished layer, and, as often as it is worth the time, the streams after it."""
        flat: dict[str, Tensor] = {}
        for name, value in tensors:
            if isinstance(value, QTensor):
                flat |= {f"{name}/codes": value.codes, f"{name}/scale": value.scale}
                flat |= {} if value.over is None else {f"{name}/over": value.over}
            else:
                flat[name] = value
        names = [name for name, _ in tensors]
        self._write(f"layer{index}", flat, {"names": json.dumps(names), "errors": json.dumps(dict(errors))})
        started = time.monotonic()
        if started >= self.due:
            chunks = {f"{s}/{i:05}": chunk for s, stream in enumerate(streams) for i, chunk in enumerate(stream)}
            self._write("stream", chunks or {"0/0": torch.zeros(1)}, {"finished": str(index + 1)})
            self.due = time.monotonic() + (time.monotonic() - started) / SHARE

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _meta(self, name: str) -> dict[str, str]:
        with safe_open(self.folder / name, "pt") as file:
            return file.metadata()

    def _write(self, name: str, tensors: Mapping[str, Tensor], meta: dict[str, str]) -> None:
        own = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
        save_file(own, str(self.folder / f"{name}.tmp"), metadata=meta)
        os.replace(self.folder / f"{name}.tmp", self.folder / name)

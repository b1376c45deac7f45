"""What a killed run leaves behind, so that the next one with the same recipe goes on after the last layer it finished.

Not the checkpoint: a directory beside it, OUT.resume, deleted when the checkpoint is complete.
"""

from __future__ import annotations

import json
import os
import re
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from nybble.checkpoint.write import alone_in, lock_file
from nybble.formats.qtensor import QTensor
from nybble.formats.spec import Scheme

Tensors = list[tuple[str, Tensor | QTensor]]
SHARE = 0.1  # of the time may go into saving the stream
NOTES = ("measured", "unlearned")
OURS = re.compile(rf"lock|(key|{'|'.join(NOTES)})\.json|(stream|layer\d+)(\.tmp)?")  # the only names written, and so removed


class Saved:
    """folder: where. key: of everything that decides the bytes, a JSON list; what another key left behind is deleted, and what
    is damaged, with a warning. Files of other names stay.

    Raises ValueError when `folder` is somebody else's, or another run is at work in it.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.due, self.finished = folder, 0.0, 0
        marker = folder / "key.json"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with alone_in(folder.parent):
            continued = marker.is_file() and marker.read_bytes() == key.encode()
            ours = folder.is_dir() and (continued or (folder / "lock").exists() or not any(folder.iterdir()))
            if os.path.lexists(folder) and not ours:
                raise ValueError(f"{folder} exists and was not written by Nybble, which keeps unfinished work under that name, "
                                 "with a file called lock in it: move it away, or choose another output directory")
            folder.mkdir(exist_ok=True)
            try:
                self.lock = lock_file(folder / "lock")
            except BlockingIOError:
                raise ValueError(f"another run is writing to {folder.with_suffix('')}: wait for it, or choose another output "
                                 "directory") from None
        try:
            if marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == json.loads(key):
                self.finished = self._check()
                return
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            reason = str(error).partition("\n")[0]
            warnings.warn(f"{folder}, an earlier run's unfinished work, is damaged ({reason}): starting over", stacklevel=3)
        self._clear()
        marker.write_text(key, encoding="utf-8")

    def _check(self) -> int:
        """How many layers are finished; raises what reading a damaged file raises."""
        for name in NOTES:
            self.noted(name)
        if not (self.folder / "stream").is_file():
            return 0
        with safe_open(self.folder / "stream", "pt") as file:
            finished = int(file.metadata()["finished"])
        for index in range(finished):
            with safe_open(self.folder / f"layer{index}", "pt") as file:
                meta, held = file.metadata(), set(file.keys())
            json.loads(meta["errors"])
            if missing := [name for name in json.loads(meta["names"]) if not {name, f"{name}/codes"} & held]:
                raise ValueError(f"layer{index} lacks {missing[0]}")
        return finished

    def _clear(self) -> None:
        for file in list(self.folder.iterdir()):
            if OURS.fullmatch(file.name) and file.name != "lock" and not file.is_dir():
                file.unlink()

    def close(self) -> None:
        """Let other runs at it."""
        if self.lock is not None:
            self.lock.close()

    def note(self, name: str, value: object) -> None:
        """Something else to go on with. name: of `NOTES`."""
        (self.folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")

    def noted(self, name: str) -> object | None:
        file = self.folder / f"{name}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None

    def load_layer(self, index: int, schemes: Mapping[str, Scheme]) -> tuple[Tensors, dict[str, float | None]]:
        """The layer's tensors and its linears' errors, as saved."""
        tensors: Tensors = []
        with safe_open(self.folder / f"layer{index}", "pt") as file:
            meta = file.metadata()
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
        with suppress(OSError), alone_in(self.folder.parent):  # not empty: somebody else's files stay
            self._clear()
            (self.folder / "lock").unlink()
            self.folder.rmdir()

    def _write(self, name: str, tensors: Mapping[str, Tensor], meta: dict[str, str]) -> None:
        own = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
        save_file(own, str(self.folder / f"{name}.tmp"), metadata=meta)
        os.replace(self.folder / f"{name}.tmp", self.folder / name)

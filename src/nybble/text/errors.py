"""What readers of files share: the error for a damaged one, and reading text that somebody else wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin


class BrokenFile(ValueError):
    """A file is there but cannot be what its name says: cut short, damaged, or another format."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}; download or convert it again")


def present(model: Path) -> Path:
    """The same. Raises FileNotFoundError where nothing is, saying what would do."""
    if model.exists():
        return model
    problem = f"no such checkpoint: {model}: give a Hugging Face directory or a .gguf file"
    if len(model.parts) == 2 and not model.parent.exists():  # as the hub names models
        problem += f". Nybble downloads nothing: a model of the hub comes by `hf download {model} --local-dir {model.name}`"
    raise FileNotFoundError(problem)


WANTS = {dict: "an object", str: "a string", int: "a whole number", bool: "true or false",
         list[str]: "a list of strings", list[int]: "a list of whole numbers", list[dict]: "a list of objects"}


def held(config: Mapping[str, Any], key: str, *kinds: Any, where: str = "config.json") -> Any:
    """config[key], None when it is absent or null. kinds: of `WANTS`. Raises ValueError naming the key, what it holds and
    what it wants."""
    found = config.get(key)
    for kind in kinds:
        items = found if isinstance(found, list) else ()
        if isinstance(found, get_origin(kind) or kind) and all(isinstance(item, get_args(kind)) for item in items):
            return found
    if found is not None:
        raise ValueError(f"{where}: {key} = {found!r}; wants {' or '.join(WANTS[kind] for kind in kinds)}")
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} when the file is not there. Raises BrokenFile when it is none."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BrokenFile(path, str(error)) from error
    if not isinstance(value, dict):
        raise BrokenFile(path, "it holds no JSON object")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_text(path: str | Path) -> str:
    """A text file's UTF-8. Raises ValueError naming the file and the place when it is not, OSError as `open` does."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); convert it, for "
                         "example with iconv") from None

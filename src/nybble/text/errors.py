"""What readers of files share: the error for a damaged one, and reading text that somebody else wrote."""

from __future__ import annotations

from pathlib import Path


class BrokenFile(ValueError):
    """A file is there but cannot be what its name says: cut short, damaged, or another format."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}; download or convert it again")


def read_text(path: str | Path) -> str:
    """A text file's UTF-8. Raises ValueError naming the file and the place when it is not, OSError as `open` does."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x}); convert it, for "
                         "example with iconv") from None

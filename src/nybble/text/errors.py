"""The one error that readers of files share."""

from __future__ import annotations

from pathlib import Path


class BrokenFile(ValueError):
    """A file is there but cannot be what its name says: cut short, damaged, or another format."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(f"{path} is damaged: {why}; download or convert it again")

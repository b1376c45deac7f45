"""Which version this is, and the environment, read in one place: where caches live. Nothing else in the package looks at
environment variables."""

from __future__ import annotations

import os
from pathlib import Path

VERSION = "0.1.0"  # pyproject.toml reads it here: package metadata is not there where the source alone is


def cache_dir() -> Path:
    """Where compiled CPU kernels are kept: $XDG_CACHE_HOME/nybble, or ~/.cache/nybble."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "nybble"

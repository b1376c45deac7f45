"""What this machine can do: which device a model goes to and how to name it. Torch is loaded on first use."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def pick_device(name: str | None = None) -> torch.device:
    """The device asked for, else the first GPU, else the CPU; a GPU becomes the process's current one. Raises ValueError when
    the one asked for is not there."""
    import torch

    if name is None or name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device = {name!r}: wants auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device = {name!r}: Nybble runs on cpu and cuda (NVIDIA, and AMD through ROCm's cuda name)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {name!r}, but torch {torch.__version__} sees no GPU; leave --device out to run on the CPU")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device = {name!r}, but there are {torch.cuda.device_count()} GPUs (counted from 0)")
        torch.cuda.set_device(device)  # Triton and the driver launch on the current one
    return device


def describe(device: torch.device) -> str:
    """One line for banners and benchmark records."""
    import torch

    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor}), torch {torch.__version__}"
    return f"CPU, {torch.get_num_threads()} of {os.cpu_count()} threads, torch {torch.__version__}"

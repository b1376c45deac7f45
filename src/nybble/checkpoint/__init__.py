"""Checkpoints: bytes to tensors and back. Reads Hugging Face, GGUF and other tools' formats; writes compressed-tensors."""

from nybble.checkpoint.checkpoint import Checkpoint, open_checkpoint
from nybble.checkpoint.write import write_checkpoint

__all__ = ["Checkpoint", "open_checkpoint", "write_checkpoint"]

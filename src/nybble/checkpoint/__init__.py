"""Checkpoints: bytes to tensors and back. Reads Hugging Face, GGUF and other tools' formats; writes compressed-tensors, QQQ,
GPTQ and AWQ, and converts between them."""

from nybble.checkpoint.checkpoint import Checkpoint, open_checkpoint
from nybble.checkpoint.convert import convert_checkpoint
from nybble.checkpoint.write import write_checkpoint

__all__ = ["Checkpoint", "convert_checkpoint", "open_checkpoint", "write_checkpoint"]

"""Quantization: pure functions of a weight and its input's statistics, and the loop that runs them over a checkpoint."""

from nybble.quantize.recipe import Recipe
from nybble.quantize.run import Report, quantize_checkpoint

__all__ = ["Recipe", "Report", "quantize_checkpoint"]

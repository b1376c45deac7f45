"""Quantization: pure functions of a weight and its input's statistics, and the loop that runs them over a checkpoint."""

from nybble.quantize.kv import add_kv_scales, calibrate_kv
from nybble.quantize.recipe import Recipe
from nybble.quantize.run import Report, quantize_checkpoint

__all__ = ["Recipe", "Report", "add_kv_scales", "calibrate_kv", "quantize_checkpoint"]

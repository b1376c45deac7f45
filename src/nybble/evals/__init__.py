"""Evaluation: what quantization cost, measured through the kernels that serve."""

from nybble.evals.compare import Comparison, Measured, compare, measure
from nybble.evals.perplexity import Perplexity, evaluate_perplexity, perplexity

__all__ = ["Comparison", "Measured", "Perplexity", "compare", "evaluate_perplexity", "measure", "perplexity"]

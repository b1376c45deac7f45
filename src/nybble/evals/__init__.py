"""Evaluation: what quantization cost, measured through the kernels that serve."""

from nybble.evals.evaluate import Delta, Evaluation, comparison, deltas, evaluate, jsonable
from nybble.evals.perplexity import Divergence, Perplexity, perplexity
from nybble.evals.tasks import TASKS, TaskResult

__all__ = ["TASKS", "Delta", "Divergence", "Evaluation", "Perplexity", "TaskResult", "comparison", "deltas", "evaluate",
           "jsonable", "perplexity"]

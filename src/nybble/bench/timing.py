"""How a kernel is timed: one harness for every benchmark, so that two numbers in one table mean the same thing.

Inputs rotate through enough copies that none is still in L2 (or they would be timed at a speed no model sees), calls run
from a CUDA graph, candidates are replayed in turns so that clocks and neighbours hit all alike, and the answer is a median
with its spread. Ratios within one table are the result; absolute times from different runs are not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Microseconds per call. `spread` is (90th - 10th percentile) / median over the replays, of fewer than ten all."""

    us: float
    us_min: float
    spread: float


def copies_beyond_cache(bytes_each: int, device: torch.device) -> int:
    """How many copies of an input make a rotation that is 5x the L2 cache; 2 to 64."""
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, min(64, -(-5 * cache // max(bytes_each, 1))))


def capture(calls: Sequence[Call], least_calls: int = 1) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of all calls in order, the round repeated until it holds `least_calls`. -> (graph, calls in it)."""
    for call in calls:
        call()  # compile, and reserve what the first call reserves
    torch.cuda.synchronize()
    rounds = -(-least_calls // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * len(calls)


def replay_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def interleave(candidates: Mapping[str, Sequence[Call]], replays: int = 9, least_us: float = 1500.0) -> dict[str, Timing]:
    """Time every candidate (its calls are the rotation), replaying them in turns. A replay holds >= `least_us` of work.

    Raises whatever a candidate raises: catch per candidate before calling, or time it alone.
    """
    graphs = {}
    for name, calls in candidates.items():
        graph, count = capture(calls)
        once = replay_us(graph)
        if once < least_us:
            graph, count = capture(calls, count * -(-int(least_us) // max(1, int(once))))
        graphs[name] = (graph, count)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(replays):
        for name, (graph, count) in graphs.items():
            samples[name].append(replay_us(graph) / count)
    return {name: summarize(values) for name, values in samples.items()}


def summarize(values: Sequence[float]) -> Timing:
    ordered = sorted(values)
    tenth = len(ordered) // 10
    middle = statistics.median(ordered)
    return Timing(middle, ordered[0], (ordered[-1 - tenth] - ordered[tenth]) / middle)

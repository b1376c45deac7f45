"""What /metrics says: requests and latencies as the server sees them, and the engine's own counters at the time of the scrape.

Not a global: every app has its own registry. The one idea: the engine counts for itself (`Info`), the server adds only what a
client feels. Where vLLM has the figure it has vLLM's name, with `nybble_` for `vllm:`, so its dashboards need one change.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from nybble.engine.messages import Info

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """One server's figures. Plain counts, the server's own view of its load: `active` prompts being answered, `queued`
    completions without a first token."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._info: Info | None = None
        self.queued = self.active = 0
        kept = {"registry": self._registry}
        self.responses = Counter("nybble_http_responses", "Answers by path and status.", ["path", "status"], **kept)
        self._finished = Counter("nybble_request_success", "Ended completions by reason: stop, length, abort, error, refused.",
                                 ["finished_reason"], **kept)
        self._first = Histogram("nybble_time_to_first_token_seconds", "From the request to its first token.",
                                buckets=SECONDS, **kept)
        self._between = Histogram("nybble_inter_token_latency_seconds", "Between tokens of one completion.",
                                  buckets=SECONDS_PER_TOKEN, **kept)
        self._whole = Histogram("nybble_e2e_request_latency_seconds", "From the request to its last token.",
                                buckets=SECONDS, **kept)
        Gauge("nybble_server_requests_active", "Prompts being answered, as the server counts.", **kept).set_function(
            lambda: self.active)
        self._registry.register(self)

    def request(self, n: int) -> RequestTimer:
        """Start the clock of one prompt with n completions."""
        return RequestTimer(self, n)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The engine's figures, for the registry."""
        info = self._info
        if info is None:
            return
        used = info.num_blocks - info.free_blocks - info.cached_blocks
        for name, text, value in (
            ("num_requests_running", "Requests in the batch.", info.running),
            ("num_requests_waiting", "Requests waiting for their turn.", info.waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.", used / max(info.num_blocks, 1)),
            ("kv_cache_blocks", "KV cache blocks.", info.num_blocks),
            ("kv_cache_free_blocks", "KV cache blocks that hold nothing.", info.free_blocks),
            ("kv_cache_prefix_blocks", "KV cache blocks that nobody uses, kept for their prefix.", info.cached_blocks),
            ("kv_cache_bytes_per_token", "Bytes of KV cache per token.", info.bytes_per_token),
        ):
            yield GaugeMetricFamily(f"nybble_{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens taken in.", info.prompt_tokens),
            ("generation_tokens", "Tokens generated.", info.generated_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", info.prefix_queries),
            ("prefix_cache_hits", "Prompt tokens found there.", info.prefix_hits),
            ("num_preemptions", "Requests put back for lack of blocks.", info.preemptions),
            ("engine_steps", "Forward passes.", info.steps),
            ("engine_host_seconds", "Of all steps, without waiting for the device.", info.host_s),
            ("decode_steps", "Steps in which every request only generated, and that were timed.", info.decode_steps),
            ("decode_wall_seconds", "Of those steps, each from the end of the step before it to its own.", info.decode_wall_s),
            ("decode_busy_seconds", "Of that, what the device worked.", info.decode_busy_s),
        ):
            yield CounterMetricFamily(f"nybble_{name}", text, value)

    def render(self, info: Info | None) -> bytes:
        """Prometheus text format. info: None keeps the engine's last known figures."""
        self._info = info or self._info
        return generate_latest(self._registry)


class RequestTimer:
    """The clock of one prompt, from its start to `close`."""

    def __init__(self, metrics: Metrics, n: int) -> None:
        self._metrics, self._started, self._last = metrics, perf_counter(), [0.0] * n
        self._open = n
        metrics.active += 1
        metrics.queued += n

    def tokens(self, index: int, count: int, now: float) -> None:
        if not count:
            return
        if not any(self._last):
            self._metrics._first.observe(now - self._started)
        if not self._last[index]:
            self._metrics.queued -= 1
        else:
            for _ in range(count):
                self._metrics._between.observe((now - self._last[index]) / count)
        self._last[index] = now

    def finished(self, reason: str) -> None:
        self._open -= 1
        self._metrics._finished.labels(reason).inc()
        if not self._open:
            self._metrics._whole.observe(max(self._last) - self._started)

    def failed(self, reason: str) -> None:
        if self._open:
            self._metrics._finished.labels(reason).inc(self._open)

    def close(self) -> None:
        self._metrics.active -= 1
        self._metrics.queued -= self._last.count(0.0)

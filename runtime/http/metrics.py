"""Prometheus metrics of one server, in a registry of their own.

Engine numbers are read from the newest `EngineStats` when somebody asks; request numbers are counted where
the requests are answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.runtime.messages import EngineStats

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)

_GAUGES = (
    ("running", "requests_running", "Sequences in the running batch"),
    ("waiting", "requests_waiting", "Sequences in the queue"),
    ("blocks_used", "kv_blocks_used", "KV blocks held by sequences"),
    ("blocks_cached", "kv_blocks_cached", "KV blocks without a user that the prefix cache keeps"),
    ("blocks_committed", "kv_blocks_committed", "KV blocks with physical memory"),
    ("blocks_capacity", "kv_blocks_capacity", "KV blocks that fit into the address range"),
    ("kv_bytes_committed", "kv_committed_bytes", "Physical KV memory"),
    ("asleep", "asleep", "Level of sleep; 0: awake"),
)
_COUNTERS = (
    ("steps", "engine_steps", "Engine steps"),
    ("graph_replays", "graph_replays", "Steps that were a captured CUDA graph"),
    ("preemptions", "preemptions", "Sequences set back to waiting because blocks ran out"),
    ("prompt_tokens", "prompt_tokens", "Prompt tokens computed or taken from the prefix cache"),
    ("generated_tokens", "generated_tokens", "Generated tokens"),
    ("prefix_queries", "prefix_cache_queries_tokens", "Prompt tokens looked up in the prefix cache"),
    ("prefix_hits", "prefix_cache_hits_tokens", "Prompt tokens found there"),
)


class ServerMetrics:
    """All metrics of one server. `stats` and `stalled_s` are asked at each scrape."""

    def __init__(self, stats: Callable[[], EngineStats], stalled_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineNumbers(stats, stalled_s))
        self._outcomes = Counter(
            "ostinato_requests",
            "Generated sequences by how they ended (stop, length, abort, error, cancelled, refused)",
            ["outcome"],
            registry=self.registry,
        )
        self._http = Counter(
            "ostinato_http_responses",
            "HTTP answers by route and status",
            ["route", "status"],
            registry=self.registry,
        )
        self.first_token_s = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token of a sequence"
        )
        self.between_tokens_s = self._histogram(
            "inter_token_latency_seconds", "Time from one token to the next"
        )
        self.whole_s = self._histogram("request_seconds", "Arrival to last token of a sequence")

    def clock(self) -> SequenceClock:
        """Start timing one sequence."""
        return SequenceClock(self)

    def ended(self, outcome: str) -> None:
        """Count one sequence's end."""
        self._outcomes.labels(outcome).inc()

    def answered(self, route: str, status: int) -> None:
        """Count one HTTP answer. `route` is the pattern, never the path: labels stay few."""
        self._http.labels(route, str(status)).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(f"ostinato_{name}", description, buckets=_LATENCY_S, registry=self.registry)


class SequenceClock:
    """Times of one sequence: call `tokens` for each event and `end` once."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self._started = time.monotonic()
        self._last: float | None = None

    def tokens(self, count: int) -> None:
        """`count` tokens have come now. Tokens that come together count as one gap."""
        if not count:
            return
        now = time.monotonic()
        if self._last is None:
            self._metrics.first_token_s.observe(now - self._started)
        else:
            self._metrics.between_tokens_s.observe((now - self._last) / count)
        self._last = now

    def end(self, outcome: str) -> None:
        """The sequence is over."""
        self._metrics.whole_s.observe(time.monotonic() - self._started)
        self._metrics.ended(outcome)


class _EngineNumbers(Collector):
    def __init__(self, stats: Callable[[], EngineStats], stalled_s: Callable[[], float]) -> None:
        self._stats = stats
        self._stalled_s = stalled_s

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for field, name, description in _GAUGES:
            yield GaugeMetricFamily(f"ostinato_{name}", description, value=getattr(stats, field))
        for field, name, description in _COUNTERS:
            yield CounterMetricFamily(f"ostinato_{name}", description, value=getattr(stats, field))
        eager = CounterMetricFamily(
            "ostinato_eager_steps", "Steps of a GPU without a captured graph, by reason", labels=["reason"]
        )
        for reason, count in stats.eager_steps.items():
            eager.add_metric([reason], count)
        yield eager
        yield GaugeMetricFamily(
            "ostinato_stalled_seconds", "Time without a step while there is work", value=self._stalled_s()
        )

    def describe(self) -> Iterable[Metric]:
        return []

"""Prometheus metrics of one server, in a registry of their own.

Engine numbers are read from the newest `EngineStats` when somebody asks; request numbers are counted where
the requests are answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.runtime.http.body_room import BodyRoom
from ostinato.runtime.http.http_connection import Connections
from ostinato.runtime.http.request_record import CURRENT, RequestRecord
from ostinato.runtime.http.token_histogram import TokenHistogram
from ostinato.runtime.messages import EngineStats

_LENGTHS = tuple(float(4**power) for power in range(11))  # tokens, up to a million
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
        self.between_tokens_s = TokenHistogram(
            "ostinato_inter_token_latency_seconds", "Time from one token to the next", _LATENCY_S
        )
        self.registry.register(self.between_tokens_s)
        self.whole_s = self._histogram("request_seconds", "Arrival to last token of a sequence")
        self.queued_s = self._histogram("queue_seconds", "Arrival to the first step of a sequence")
        self.prefill_s = self._histogram("prefill_seconds", "First step to first token of a sequence")
        self.decode_s = self._histogram("decode_seconds", "First to last token of a sequence")
        self.per_token_s = self._histogram(
            "time_per_output_token_seconds", "Mean time per token behind the first, of a sequence"
        )
        self.prompt_length = self._lengths("prompt_length_tokens", "Prompt tokens of a sequence")
        self.answer_length = self._lengths("answer_length_tokens", "Generated tokens of a sequence")
        self._http_s = Histogram(
            "ostinato_http_request_seconds",
            "Arrival of an HTTP request to the end of its answer, by route",
            ["route"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self._info = Gauge(
            "ostinato_info", "What is served", ["model", "version", "dtype"], registry=self.registry
        )
        self._of_key = Counter(
            "ostinato_key_responses",
            "HTTP answers by name of the API key and status",
            ["key", "status"],
            registry=self.registry,
        )
        self._key_tokens = Counter(
            "ostinato_key_tokens",
            "Prompt and generated tokens by name of the API key",
            ["key", "kind"],
            registry=self.registry,
        )
        self._limited = Counter(
            "ostinato_rate_limited",
            "Requests refused by a limit of their API key",
            ["key", "limit"],
            registry=self.registry,
        )

    def watch(self, connections: Connections, bodies: BodyRoom) -> None:
        """Show these at each scrape."""
        self.registry.register(_ConnectionNumbers(connections, bodies))

    def describe_server(self, model: str, version: str, dtype: str) -> None:
        """Say what is served, once it is known."""
        self._info.labels(model, version, dtype).set(1)

    def clock(self, prompt_tokens: int) -> SequenceClock:
        """Start timing one sequence, for the HTTP request that is being answered if there is one."""
        self.prompt_length.observe(prompt_tokens)
        return SequenceClock(self, prompt_tokens)

    def ended(self, outcome: str) -> None:
        """Count one sequence's end."""
        self._outcomes.labels(outcome).inc()

    def answered(self, route: str, status: int, record: RequestRecord) -> None:
        """Count one HTTP answer. `route` is the pattern, never the path: labels stay few."""
        self._http.labels(route, str(status)).inc()
        self._http_s.labels(route).observe(time.monotonic() - record.started)
        if record.caller is not None:
            self._of_key.labels(record.caller.name, str(status)).inc()

    def limited(self, key: str, limit: str) -> None:
        """Count one refusal by a limit of a key."""
        self._limited.labels(key, limit).inc()

    def spent(self, record: RequestRecord, prompt: int, generated: int) -> None:
        """Count tokens of the caller of `record`."""
        if record.caller is not None:
            for kind, count in (("prompt", prompt), ("generated", generated)):
                if count:
                    self._key_tokens.labels(record.caller.name, kind).inc(count)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, description: str) -> Histogram:
        return Histogram(f"ostinato_{name}", description, buckets=_LATENCY_S, registry=self.registry)

    def _lengths(self, name: str, description: str) -> Histogram:
        return Histogram(f"ostinato_{name}", description, buckets=_LENGTHS, registry=self.registry)


class SequenceClock:
    """Times and tokens of one sequence: call `tokens` for each event and `end` once."""

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._record = CURRENT.get() or RequestRecord("")
        self.times = self._record.begin(prompt_tokens)
        metrics.spent(self._record, prompt_tokens, 0)

    def tokens(self, count: int) -> None:
        """`count` tokens have come now. Tokens that come together count as one gap."""
        if not count:
            return
        times, now = self.times, time.monotonic()
        if times.last_token is None:
            times.first_token = now
            self._metrics.first_token_s.observe(now - times.started)
        else:
            self._metrics.between_tokens_s.observe((now - times.last_token) / count)
        times.last_token = now
        self._record.tokens(times, count)

    def queued(self, seconds: float) -> None:
        """The engine says how long the sequence waited for its first step."""
        self.times.queued_s = seconds
        self._metrics.queued_s.observe(seconds)

    def end(self, outcome: str) -> None:
        """The sequence is over."""
        times = self.times
        times.ended, times.outcome = time.monotonic(), outcome
        self._metrics.whole_s.observe(times.ended - times.started)
        if times.first_token is not None and times.last_token is not None:
            first, took = times.first_token - times.started, times.last_token - times.first_token
            self._metrics.prefill_s.observe(first - (times.queued_s or 0.0))
            self._metrics.decode_s.observe(took)
            if times.generated_tokens > 1:
                self._metrics.per_token_s.observe(took / (times.generated_tokens - 1))
        self._metrics.answer_length.observe(times.generated_tokens)
        self._metrics.spent(self._record, 0, times.generated_tokens)
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


class _ConnectionNumbers(Collector):
    def __init__(self, connections: Connections, bodies: BodyRoom) -> None:
        self._connections = connections
        self._bodies = bodies

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("ostinato_connections", "Open connections", value=self._connections.open)
        yield GaugeMetricFamily(
            "ostinato_bodies_bytes", "Request bodies that are being read", value=self._bodies.held_bytes
        )
        dropped = CounterMetricFamily(
            "ostinato_connections_dropped", "Connections closed by a limit, by reason", labels=["reason"]
        )
        for reason, count in self._connections.dropped.items():
            dropped.add_metric([reason], count)
        yield dropped

    def describe(self) -> Iterable[Metric]:
        return []

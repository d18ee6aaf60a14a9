"""OpenTelemetry traces, told when a request is over: nothing is done while tokens flow.

Per request one span, and per sequence one with the parts `queue` (until the engine's first step with it),
`prefill` (until the first token) and `decode`.  A `traceparent` header makes them part of the caller's trace.
The library is an optional dependency (`pip install ostinato[tracing]`); spans carry numbers and the names of
route and key, never text.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ostinato.errors import ConfigError
from ostinato.runtime.http.request_record import RequestRecord, SequenceTimes

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

_TRACES = "/v1/traces"  # of OTLP over HTTP
_PARENT = "traceparent"


class Tracing:
    """Sends spans in batches from a thread of its own; a collector that does not answer costs spans only."""

    def __init__(self, endpoint: str, exporter: SpanExporter | None = None) -> None:
        """`endpoint`: base URL of an OTLP/HTTP collector; `exporter` in its place for tests.

        ConfigError when the library is not there or the URL is none.
        """
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"server.trace_endpoint={endpoint}: must begin with http:// or https://")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(
                f"server.trace_endpoint needs OpenTelemetry: `pip install ostinato[tracing]` ({error.name})"
            ) from None
        url = endpoint if endpoint.endswith(_TRACES) else endpoint.rstrip("/") + _TRACES
        self._provider = TracerProvider(resource=Resource.create({"service.name": "ostinato"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("ostinato")
        self._extract = TraceContextTextMapPropagator().extract
        self._inside = set_span_in_context
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    def tell(self, record: RequestRecord, headers: Mapping[str, str], *, name: str, status: int) -> None:
        """The spans of a request that is over."""
        now, zero_ns = time.monotonic(), time.time_ns() - time.monotonic_ns()
        carrier = {_PARENT: headers[_PARENT]} if _PARENT in headers else {}
        attributes: dict[str, Any] = {  # Any: what OpenTelemetry takes
            "http.response.status_code": status,
            "ostinato.request_id": record.id,
            "ostinato.key": record.caller.name if record.caller is not None else "",
        }
        span = self._tracer.start_span(
            name,
            self._extract(carrier),
            self._server,
            attributes,
            start_time=zero_ns + _ns(record.started),
        )
        if status >= 500:
            span.set_status(self._error)
        for times in record.sequences:
            self._sequence(times, self._inside(span), zero_ns, now)
        span.end(zero_ns + _ns(now))

    def close(self) -> None:
        """Send what is left, for some seconds at most."""
        self._provider.shutdown()

    def _sequence(self, times: SequenceTimes, parent: Context, zero_ns: int, now: float) -> None:
        ended = times.ended or now
        span = self._span("sequence", parent, zero_ns, times.started)
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": times.prompt_tokens,
                "gen_ai.usage.output_tokens": times.generated_tokens,
                "ostinato.cached_tokens": times.cached_tokens,
                "gen_ai.response.finish_reasons": [times.outcome],
            }
        )
        inside = self._inside(span)
        first = times.first_token or ended
        planned = min(first, times.started + times.queued_s) if times.queued_s is not None else None
        parts = [("prefill", times.started, first)]
        if planned is not None:
            parts = [("queue", times.started, planned), ("prefill", planned, first)]
        if times.first_token is not None:
            parts.append(("decode", first, ended))
        for name, begin, end in parts:
            self._span(name, inside, zero_ns, begin).end(zero_ns + _ns(end))
        span.end(zero_ns + _ns(ended))

    def _span(self, name: str, parent: Context, zero_ns: int, begin: float) -> Span:
        return self._tracer.start_span(name, parent, start_time=zero_ns + _ns(begin))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

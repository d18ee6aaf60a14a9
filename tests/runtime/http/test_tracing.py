"""Spans of a request: their names, times and parents; the library is optional."""

import sys

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.http.tracing import Tracing
from tests.support.fake_engine import say
from tests.support.serving import serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASK = {"prompt": [5, 6, 7], "max_tokens": 4}


async def test_a_request_is_a_span_with_its_sequences_in_the_callers_trace():
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs opentelemetry-sdk"
    )
    exporter = memory.InMemorySpanExporter()
    async with serving(say([10] * 4)) as served:
        served.state.tracing = Tracing("http://127.0.0.1:1", exporter)
        parent = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "my-id"}
        assert (await served.post("/v1/completions", {**ASK, "n": 2}, **parent))[0] == 200
        assert (await served.post("/v1/completions", {**ASK, "n": 0}, traceparent="rubbish"))[0] == 400
    spans = exporter.get_finished_spans()
    (request,) = [
        s for s in spans if s.kind.name == "SERVER" and s.attributes["ostinato.request_id"] == "my-id"
    ]
    assert (request.name, request.attributes["http.response.status_code"]) == ("POST /v1/completions", 200)
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    sequences = [s for s in spans if s.name == "sequence"]
    assert [s.parent.span_id for s in sequences] == [request.context.span_id] * 2
    assert sequences[0].attributes["gen_ai.usage.input_tokens"] == 3
    assert sequences[0].attributes["gen_ai.usage.output_tokens"] == 4
    parts = [s for s in spans if s.parent and s.parent.span_id == sequences[0].context.span_id]
    assert [s.name for s in parts] == ["queue", "prefill", "decode"]
    assert request.start_time <= parts[0].start_time
    assert [part.end_time for part in parts[:2]] == [part.start_time for part in parts[1:]]
    assert parts[2].end_time <= sequences[0].end_time <= request.end_time
    (refused,) = [s for s in spans if s.kind.name == "SERVER" and s.parent is None]
    assert refused.attributes["http.response.status_code"] == 400


def test_without_the_library_the_setting_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install ostinato\[tracing\]"):
        Tracing("http://127.0.0.1:4318")


def test_an_endpoint_that_is_no_url_is_refused():
    with pytest.raises(ConfigError, match=r"server\.trace_endpoint=localhost:4318: must begin with http"):
        Tracing("localhost:4318")

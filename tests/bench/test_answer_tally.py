"""Case B03: which event of a stream is a token, and the times that follow from it."""

import json

import pytest

from ostinato.bench.answer_tally import AnswerTally
from ostinato.bench.request_record import RequestRecord, load_record
from ostinato.bench.sse import EventReader
from tests.support.scripted_http import chat, used


def tally(*timed, close=0.7):
    record = RequestRecord(0)
    reader = AnswerTally(record, keeps_text=True)
    for at, value in timed:
        reader.push(at, value if isinstance(value, bytes) else json.dumps(value).encode())
    reader.close(close)
    return record


B03 = (
    (0.005, chat(role="assistant", content="")),
    (0.200, chat(reasoning="a")),
    (0.300, chat(reasoning="b")),
    (0.500, chat(content="c")),
    (0.600, chat("stop", content="")),
    (0.601, used(3)),
    (0.602, b"[DONE]"),
)


def test_the_first_token_of_any_channel_counts_and_role_usage_and_finish_do_not():
    record = tally(*B03)
    assert record.ok
    assert (record.first_token_at, record.first_content_at, record.end_at) == (0.200, 0.500, 0.600)
    assert record.itl_s == pytest.approx([0.1, 0.2])
    assert (record.output_tokens, record.output_tokens_from, record.prompt_tokens) == (3, "usage", 7)
    assert record.tpot_s == pytest.approx(0.2)  # (0.600 - 0.200) / (3 - 1)


@pytest.mark.parametrize("channel", ["reasoning", "reasoning_content", "refusal"])
def test_content_null_beside_another_channel(channel):
    record = tally(
        (0.1, chat(role="assistant", content=None)),
        (0.2, chat(content=None, **{channel: "a"})),
        (0.3, chat("stop", content=None)),
    )
    assert (record.first_token_at, record.first_content_at, record.end_at) == (0.2, None, 0.3)
    assert record.output_tokens == 1


def call(**function):
    return {"tool_calls": [{"index": 0, "function": function}]}


def test_only_tool_calls():
    record = tally(
        (0.1, chat(role="assistant", content=None)),
        (0.2, chat(**call(name="f", arguments=""))),
        (0.3, chat(**call(arguments="{"))),
        (0.4, chat(**call(arguments=""))),  # nothing in it
        (0.5, chat(**call(arguments="}"))),
        (0.6, chat("tool_calls")),
        (0.6, used(5)),
    )
    assert (record.first_token_at, record.first_content_at) == (0.2, None)
    assert record.itl_s == pytest.approx([0.1, 0.2])
    assert record.tpot_s == pytest.approx(0.1)


def test_several_tokens_in_a_chunk_are_counted_by_usage_or_ids():
    chunks = ((0.2, chat(content="abc")), (0.6, chat("length", content="def")))
    assert tally(*chunks, (0.6, used(9))).tpot_s == pytest.approx(0.05)
    with_ids = []
    for at, chunk in chunks:
        chunk = json.loads(json.dumps(chunk))
        chunk["choices"][0]["token_ids"] = [1, 2, 3]
        with_ids.append((at, chunk))
    record = tally(*with_ids)
    assert (record.output_tokens, record.output_tokens_from) == (6, "token_ids")
    assert record.tpot_s == pytest.approx(0.08)
    record = tally(*chunks)
    assert (record.output_tokens, record.output_tokens_from) == (2, "chunks")


def test_a_token_without_text_is_a_token_when_its_id_says_so():
    chunk = chat(content="")
    chunk["choices"][0]["token_ids"] = [5]
    record = tally((0.2, chunk), (0.4, chat("stop", content="ü")))
    assert record.first_token_at == 0.2
    assert record.first_content_at == 0.4


def test_the_completions_route_with_usage_on_the_last_chunk():
    def text(piece, reason=None, **more):
        return {"choices": [{"index": 0, "text": piece, "finish_reason": reason}], **more}

    record = tally(
        (0.1, text("")),
        (0.2, text("a", usage=None)),
        (0.4, text("b", "length", usage={"prompt_tokens": 3, "completion_tokens": 2})),
        (0.5, b"[DONE]"),
    )
    assert (record.first_token_at, record.end_at, record.output_tokens) == (0.2, 0.4, 2)
    assert record.tpot_s == pytest.approx(0.2)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_division_by_zero_for_answers_of_no_or_one_token(tokens):
    events = [(0.2, chat(content="a"))] * tokens + [(0.3, chat("stop")), (0.3, used(tokens))]
    record = tally(*events)
    assert record.ok
    assert (record.tpot_s, record.itl_s, record.output_tokens) == (None, [], tokens)
    assert record.first_token_at == (0.2 if tokens else None)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([(0.2, chat(content="a"))], "the stream ended without a finish_reason"),
        ([], "the stream ended without a finish_reason"),
        ([(0.2, chat(content="a")), (0.3, {"error": {"message": "it broke"}})], "error event: it broke"),
        ([(0.2, b"<html>")], "an event is not a JSON object: b'<html>'"),
        ([(0.2, b"[1]")], "an event is not a JSON object: b'[1]'"),
        ([(0.2, b"[" * 100_000)], f"an event is not a JSON object: {b'[' * 80!r}"),
    ],
)
def test_an_answer_that_is_cut_off_or_broken_has_failed(events, error):
    record = tally(*events)
    assert not record.ok
    assert record.error == error
    assert record.end_at == 0.7


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": [None]},
        {"choices": 5},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"tool_calls": [5]}}]},
        {"choices": [{"text": ["x"]}]},
        {"choices": [{"text": "x", "token_ids": 7}]},
        {"choices": [], "usage": "many"},
        {"choices": [], "usage": {"completion_tokens": -5}},
        {"choices": [], "usage": {"completion_tokens": True}},
        {"choices": [], "usage": {"prompt_tokens": 10**400}},
        {"choices": [], "usage": {"prompt_tokens_details": 7}},
    ],
    ids=str,
)
def test_a_chunk_of_another_shape_fails_its_answer_and_nothing_else(chunk):
    record = tally((0.1, chunk), (0.2, chat("stop", content="a")))
    assert not record.ok
    assert record.error.startswith("an event has another shape than OpenAI's: b'{")


def test_a_record_survives_json():
    record = tally(*B03)
    again = load_record(json.loads(json.dumps(record.dump(with_text=False))))
    assert again == record
    assert again.itl_s == record.itl_s


STREAM = (
    b": keep-alive\n\ndata: one\r\n\r\nevent: x\nid: 3\ndata:two\n\n:\n\n"
    b'data: three\ndata: lines\n\nretry: 5\n\ndata: {"a": "\xc3\xbc"}\n\ndata: cut'
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_whatever_the_pieces(size):
    reader = EventReader()
    events = [e for at in range(0, len(STREAM), size) for e in reader.feed(STREAM[at : at + size])]
    assert events == [b"one", b"two", b"three\nlines", b'{"a": "\xc3\xbc"}']


@pytest.mark.parametrize("piece", [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"])
def test_an_event_that_never_ends_is_not_kept(monkeypatch, piece):
    monkeypatch.setattr("ostinato.bench.sse.MAX_EVENT_BYTES", 10_000)
    reader = EventReader()
    with pytest.raises(ValueError, match="an event is over 10000 bytes"):
        [reader.feed(piece) for _ in range(100)]

"""Tokens of a model that thinks and calls tools: one list of events for every way of cutting, with stops."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from ostinato.runtime.choice_output import ChoiceOutput, Delta
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.messages import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from ostinato.runtime.output.events import CallEnd, CallStart, Event, join
from tests.support.parsed_text import calls, content, parser, thoughts
from tests.support.toy_text import tokenizer

TOKENIZER = tokenizer()
TOKENIZER.add_tokens([AddedToken(text, special=True) for text in ("<|tool_call>", "<tool_call|>", '<|"|>')])
CODEC = TokenCodec(TOKENIZER)
EOS = 1
CALL = '<tool_call>{"name": "f", "arguments": {"city": "Köln 😀"}}</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def run(
    text: str,
    *,
    sizes: list[int] | None = None,
    reason: FinishReason = "stop",
    one_call: bool = False,
    form: str = "hermes",
    **sampling: object,
) -> tuple[list[Event], list[Delta], ChoiceOutput]:
    """Events of `text` given in steps of `sizes` tokens, the rest in one; EOS is the last token."""
    output = ChoiceOutput(
        CODEC,
        SamplingParams(**sampling),
        parser("qwen3", form, prompt_end="<think>\n"),
        shown_special=CODEC.special_ids_of({"<|tool_call>", "<tool_call|>", '<|"|>'}),
        one_call=one_call,
    )
    tokens = [*ids(text), EOS]
    parts, at = [], 0
    for size in sizes if sizes is not None else [1] * len(tokens):
        parts.append(tokens[at : at + size])
        at += size
    parts = [part for part in [*parts, tokens[at:]] if part]
    deltas = []
    for which, part in enumerate(parts):
        last = which == len(parts) - 1
        event = TokenEvent(
            request_id="r",
            token_ids=tuple(part),
            logprobs=tuple(TokenLogprob(token_id=i, logprob=-1.0, rank=1) for i in part),
            finish_reason=reason if last else None,
            stop_token_id=EOS if last and reason == "stop" else None,
        )
        deltas.append(output.push(event))
        if output.finished:
            break
    events = join(part for delta in deltas for part in delta.parts)
    assert "".join(delta.text for delta in deltas) == content(events)
    return events, deltas, output


def told(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    return thoughts(events), content(events), calls(events)


@pytest.mark.parametrize("sizes", [None, [1000]])
def test_a_stop_that_never_comes_changes_nothing(sizes: list[int] | None):
    for stop in ((), ("XYZ",)):
        events, _, output = run("think</think>answer", sizes=sizes, stop=stop)
        assert told(events) == ("think", "answer", [])
        assert output.num_reasoning_tokens == len(ids("think</think>"))


@pytest.mark.parametrize("sizes", [None, [1000]])
def test_stops_are_looked_for_in_content_alone(sizes: list[int] | None):
    events, deltas, _ = run("9.11 vs 9.8 hm</think>ok 9.8 no", sizes=sizes, stop=("9.8",))
    assert told(events) == ("9.11 vs 9.8 hm", "ok ", [])
    assert deltas[-1].finish_reason == "stop"
    inside = CALL.replace("Köln", "9.8")
    events, _, output = run(f"</think>{inside} go 9.8", sizes=sizes, stop=("9.8",))
    assert told(events) == ("", " go ", [("f", '{"city":"9.8 😀"}')])
    assert output.stop_string == "9.8"


@pytest.mark.parametrize("sizes", [None, [1000]])
def test_what_a_format_holds_back_is_not_lost_at_a_stop(sizes: list[int] | None):
    events, _, _ = run("</think>value: <toolEND more", sizes=sizes, stop=("END",))
    assert content(events) == "value: <tool"
    for stop in ("<tool", "<tool_call>", "ool_", "</tool_call>"):
        events, _, _ = run(f"</think>value: {CALL}", sizes=sizes, stop=(stop,))
        assert told(events) == ("", "value:", [("f", '{"city":"Köln 😀"}')])
    events, _, _ = run("</think>value: <tool box", sizes=sizes, stop=("<tool",))
    assert content(events) == "value: "


def test_special_tokens_of_the_format_are_read_and_others_are_not_shown():
    text = '</think>ok<|im_start|> <|tool_call>call:f{city:<|"|>Köln 😀<|"|>}<tool_call|>'
    assert told(run(text, form="gemma4")[0]) == ("", "ok", [("f", '{"city":"Köln 😀"}')])


@pytest.mark.parametrize("sizes", [None, [2] * 99, [5] * 99, [1000]])
def test_a_marker_of_ordinary_tokens_does_not_leak_and_its_look_alike_is_text(sizes: list[int] | None):
    """Case B23: the toy tokenizer spells DeepSeek's markers in a dozen tokens."""
    begin, sep, end = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    fenced = '\n```json\n{"city": "a <｜tool▁calls▁end｜> b"}\n```'
    call = f"{begin}function{sep}get_weather{fenced}{end}<｜tool▁calls▁end｜>"
    assert len(ids(begin)) > 10
    found = told(run(f"</think>{call}", form="deepseek_v3", sizes=sizes)[0])
    assert found == ("", "", [("get_weather", '{"city":"a <｜tool▁calls▁end｜> b"}')])
    for text in ("<｜tool▁box then plain text", "price <", "a <｜tool▁calls▁begin"):
        assert told(run(f"</think>{text}", form="deepseek_v3", sizes=sizes)[0]) == ("", text, [])


@pytest.mark.parametrize("sizes", [None, [10_000], [3] * 9, [5] * 9])
def test_thoughts_before_text_that_a_stop_cuts_whole_keep_their_tokens(sizes: list[int] | None):
    _, deltas, output = run("hm</think>END", sizes=sizes, stop=("END",), logprobs=0)
    assert [token.token_id for delta in deltas for token in delta.tokens] == ids("hm")
    assert output.num_reasoning_tokens == len(ids("hm</think>"))


def test_an_answer_of_one_call_ends_behind_it():
    events, deltas, output = run(f"</think>{CALL}{CALL} more", one_call=True)
    assert told(events) == ("", "", [("f", '{"city":"Köln 😀"}')])
    assert (deltas[-1].finish_reason, output.finished) == ("stop", True)
    assert output.num_tokens < len(ids(f"</think>{CALL}{CALL}"))


@pytest.mark.parametrize("sizes", [None, [10_000]])
def test_a_call_that_is_cut_is_no_end_of_an_answer_of_one_call(sizes: list[int] | None):
    cut = CALL[: CALL.index("Köln") + 2]
    events, deltas, _ = run(f"</think>{cut}", one_call=True, reason="length", sizes=sizes)
    assert (deltas[-1].finish_reason, events[-1]) == ("length", CallEnd(0, whole=False))


@settings(max_examples=60, deadline=None)
@given(
    scraps=st.lists(
        st.sampled_from(["hm", "</think>", "yes ", CALL, "END", "😀", "<tool", "\n", "E", "<think>", '{"a"']),
        max_size=7,
    ),
    sizes=st.lists(st.integers(1, 9), max_size=20),
    stop=st.sampled_from([(), ("END",), ("ND", "yes <"), ("\n",)]),
    min_tokens=st.sampled_from([0, 5]),
    reason=st.sampled_from(["stop", "length"]),
    one_call=st.booleans(),
)
def test_events_tokens_and_counts_are_the_same_for_every_cut(
    scraps: list[str],
    sizes: list[int],
    stop: tuple[str, ...],
    min_tokens: int,
    reason: FinishReason,
    one_call: bool,
):
    text = "".join(scraps)
    seen = []
    for cut in (None, [10_000], sizes):
        for logprobs in (None, 0):
            events, deltas, output = run(
                text, sizes=cut, reason=reason, stop=stop, min_tokens=min_tokens, logprobs=logprobs,
                one_call=one_call,
            )  # fmt: skip
            listed = [token.token_id for delta in deltas for token in delta.tokens]
            events = [one if not isinstance(one, CallStart) else (one.index, one.name) for one in events]
            seen.append((events, deltas[-1].finish_reason, output.num_tokens, output.num_reasoning_tokens))
            if logprobs is not None:
                seen[-1] += (listed,)
    assert seen[0] == seen[2] == seen[4]
    assert seen[1] == seen[3] == seen[5]
    assert seen[1][:4] == seen[0]

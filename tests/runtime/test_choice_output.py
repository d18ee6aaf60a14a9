"""From token events to text: one result for every way of cutting the events."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.choice_output import ChoiceOutput, Delta
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.messages import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from tests.support.toy_text import tokenizer

TOKENIZER = tokenizer()
CODEC = TokenCodec(TOKENIZER)
EOS = 1


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def events(
    token_ids: list[int], sizes: list[int], *, reason: FinishReason = "length", stop_id: int | None = None
) -> list[TokenEvent]:
    """`token_ids` cut into events of `sizes` (the last takes the rest); the last has the reason."""
    parts, at = [], 0
    for size in sizes:
        parts.append(token_ids[at : at + size])
        at += size
    parts.append(token_ids[at:])
    while len(parts) > 1 and not parts[-1]:
        parts.pop()  # the stop token is always in the last event
    return [
        TokenEvent(
            request_id="r",
            token_ids=tuple(part),
            logprobs=tuple(TokenLogprob(token_id=i, logprob=-1.0, rank=1) for i in part),
            finish_reason=reason if which == len(parts) - 1 else None,
            stop_token_id=stop_id if which == len(parts) - 1 else None,
        )
        for which, part in enumerate(parts)
    ]


def run(sampling: SamplingParams, news: list[TokenEvent]) -> tuple[ChoiceOutput, list[Delta]]:
    output, deltas = ChoiceOutput(CODEC, sampling), []
    for event in news:
        deltas.append(output.push(event))
        if output.finished:
            break
    return output, deltas


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.parametrize("shown", [True, False])
def test_stop_token_counts_and_is_shown_only_when_asked_for(shown: bool):
    stop_id = ids("dog")[-1]
    sampling = SamplingParams(include_stop_str_in_output=shown, logprobs=0)
    output, deltas = run(sampling, events([*ids("the "), stop_id], [], reason="stop", stop_id=stop_id))
    assert text_of(deltas) == ("the " + CODEC.token_text(stop_id) if shown else "the ")
    assert output.num_tokens == len(ids("the ")) + 1
    assert [token.token_id for delta in deltas for token in delta.tokens][-1] == (
        stop_id if shown else ids("the ")[-1]
    )


def test_stop_string_ends_the_choice_before_the_engine_does():
    output, deltas = run(
        SamplingParams(stop=("fox",)), events(ids("the quick brown fox jumps over"), [1] * 20)
    )
    assert text_of(deltas) == "the quick brown "
    assert deltas[-1].finish_reason == "stop"
    assert output.num_tokens < len(ids("the quick brown fox jumps over"))


def test_stop_string_inside_the_first_min_tokens_does_not_stop():
    token_ids = ids("dog dog dog")
    _, deltas = run(SamplingParams(stop=("dog",), min_tokens=len(ids("dog dog"))), events(token_ids, []))
    assert text_of(deltas) == "dog dog "
    assert deltas[-1].finish_reason == "stop"


def test_beginning_of_a_stop_string_comes_out_at_the_end():
    _, deltas = run(SamplingParams(stop=("dogs",)), events(ids("lazy dog"), [1] * 20))
    assert text_of(deltas) == "lazy dog"
    assert deltas[-1].finish_reason == "length"


def test_half_a_character_at_the_end_is_one_replacement_character():
    _, deltas = run(SamplingParams(), events(ids("a😀")[:-2], []))
    assert text_of(deltas) == "a�"


def test_tokens_of_a_character_come_out_together():
    _, deltas = run(SamplingParams(logprobs=0), events(ids("a😀"), [1] * 20))
    listed = [(delta.text, [token.token_id for token in delta.tokens]) for delta in deltas]
    a, *emoji = ids("a😀")
    assert [entry for entry in listed if entry != ("", [])] == [("a", [a]), ("😀", emoji)]


def test_no_delta_lists_tokens_without_text_before_the_end():
    _, deltas = run(
        SamplingParams(logprobs=0, stop=("over the moon",)), events(ids("fox over the lazy"), [1] * 20)
    )
    assert all(delta.text for delta in deltas if delta.tokens and delta.finish_reason is None)


@pytest.mark.parametrize(
    ("text", "shown"),
    [("ABCDEFGHIJ", "ABC"), ("ABCDEX", "ABCDEX"), ("ABCDEFG", "ABCDEFG"), ("DEFGDEFGH", "DEFG")],
)
def test_every_cut_around_a_stop_string_shows_the_same_text_and_nothing_of_it(text: str, shown: str):
    """Case B43."""
    tokens = ids(text)
    assert len(tokens) == len(text)
    for cuts in range(2 ** (len(tokens) - 1)):
        edges = [0, *(at for at in range(1, len(tokens)) if cuts >> (at - 1) & 1), len(tokens)]
        sizes = [b - a for a, b in pairwise(edges)][:-1]
        _, deltas = run(SamplingParams(stop=("DEFGH",)), events(tokens, sizes, reason="stop"))
        assert text_of(deltas) == shown
        for at in range(len(deltas)):
            assert shown.startswith(text_of(deltas[: at + 1]))


SAMPLINGS = st.builds(
    SamplingParams,
    stop=st.sampled_from([(), ("fox",), ("o", "quick b"), ("😀 d", "lazy dog."), ("ü",)]),
    min_tokens=st.integers(0, 6),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.sampled_from([None, 0]),
)


@given(
    SAMPLINGS,
    st.sampled_from(["the quick brown fox", "grüße 😀 dog", "lazy 😀😀 dogs over", "ü"]),
    st.lists(st.integers(0, 3), max_size=12),
    st.booleans(),
)
def test_events_cut_anywhere_give_the_same_choice(sampling, text, sizes, ends_in_eos):
    token_ids = ids(text) + [EOS] * ends_in_eos
    kwargs = {"reason": "stop" if ends_in_eos else "length", "stop_id": EOS if ends_in_eos else None}
    whole, whole_deltas = run(sampling, events(token_ids, [], **kwargs))
    cut, cut_deltas = run(sampling, events(token_ids, sizes, **kwargs))
    assert text_of(cut_deltas) == text_of(whole_deltas)
    assert cut.num_tokens == whole.num_tokens
    assert cut_deltas[-1].finish_reason == whole_deltas[-1].finish_reason
    tokens = [token for delta in cut_deltas for token in delta.tokens]
    assert tokens == [token for delta in whole_deltas for token in delta.tokens]
    assert [token.offset for token in tokens] == sorted(token.offset for token in tokens)


@pytest.mark.parametrize("sizes", [[], [1] * 20])
def test_parts_of_a_character_that_a_stop_string_cuts_are_not_listed(sizes: list[int]):
    _, deltas = run(SamplingParams(stop=("😀 dog",), logprobs=0), events(ids("fox 😀 dog"), sizes))
    assert text_of(deltas) == "fox "
    assert [token.token_id for delta in deltas for token in delta.tokens] == ids("fox ")

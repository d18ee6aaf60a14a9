"""The state machine of a thinking budget against a reader of the whole text; what it may decide ahead."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.runtime.messages import ThoughtBlock, Thoughts
from ostinato.runtime.output import reasoning_formats
from ostinato.runtime.output.formats import ReasoningFormat
from ostinato.runtime.output.output_parser import OutputParser
from ostinato.runtime.thinking.thinking_state import ThinkingState
from tests.support.thinking_runs import Story

TEXTS = ["<", "t", ">", "</", "<t>", "</t>", "a", " ", "\n", "t>a", "a<t", "</t><t>", "so", ":", "", "><t>b"]


def bytes_of(token: int) -> bytes:
    return TEXTS[token].encode()


def block(start: str, closing: tuple[int, ...], mark: int) -> ThoughtBlock:
    return ThoughtBlock(start=start, closing=closing, mark=mark)


CLOSINGS = [block("<t>", (5,), 0), block("<t>", (3, 1, 2), 0), block("<t>", (12, 13, 3, 1, 2), 2)]
GIVEN = st.builds(
    Thoughts,
    budget=st.integers(0, 6),
    blocks=st.sampled_from(CLOSINGS).map(lambda one: (one,)),
    ends=st.just(("</t>",)),
    anywhere=st.booleans(),
    begun=st.sampled_from([None, 0]),
)
WORDS = st.lists(st.integers(0, len(TEXTS) - 1), max_size=40)


def written(thoughts: Thoughts, words: list[int], *, barred: frozenset[int]) -> list[int]:
    """The tokens of a model that wants `words`, as far as it may have its will."""
    state, tokens = ThinkingState(thoughts, bytes_of), list[int]()
    for word in words:
        forced = state.forced()
        if forced is None and state.is_barred() and word in barred:
            continue
        tokens.append(word if forced is None else forced)
        state.take(tokens[-1])
    return tokens


@settings(max_examples=400, deadline=None)
@given(GIVEN, WORDS)
def test_every_token_is_decided_as_by_a_reader_of_the_whole_text(thoughts: Thoughts, words: list[int]):
    barred = frozenset(at for at, text in enumerate(TEXTS) if "<t>" in text)
    tokens = written(thoughts, words, barred=barred)
    state = ThinkingState(thoughts, bytes_of)
    for at in range(len(tokens) + 1):
        story = Story(thoughts, tokens[:at], bytes_of)
        assert state.forced() == (story.forced[0] if story.forced else None)
        assert thoughts.budget - state.left == story.spent <= thoughts.budget
        assert state.is_barred() == (thoughts.anywhere and not story.inside and state.left == 0)
        if at < len(tokens):
            state.take(tokens[at])


@settings(max_examples=400, deadline=None)
@given(GIVEN, WORDS)
def test_what_is_decided_ahead_holds_whatever_comes_first(thoughts: Thoughts, words: list[int]):
    barred = frozenset(at for at, text in enumerate(TEXTS) if "<t>" in text)
    tokens = written(thoughts, words, barred=barred)
    state = ThinkingState(thoughts, bytes_of)
    for at in range(len(tokens)):
        if state.knows_next:
            forced = state.forced()
            free = [t for t in range(len(TEXTS)) if not (state.is_barred() and t in barred)]
            for first in free if forced is None else [forced]:
                after = ThinkingState(thoughts, bytes_of)
                for token in (*tokens[:at], first):
                    after.take(token)
                assert (after.forced(), after.is_barred()) == (state.forced(1), state.is_barred(1))
        state.take(tokens[at])


def test_an_end_that_the_model_has_begun_is_not_said_again():
    thoughts = Thoughts(budget=3, blocks=(CLOSINGS[2],), ends=("</t>",), begun=0)

    def forced(*tokens: int) -> list[int]:
        state, said = ThinkingState(thoughts, bytes_of), []
        for token in tokens:
            state.take(token)
        while (token := state.forced()) is not None:
            said.append(token)
            state.take(token)
        return said

    assert forced(6, 6, 6) == [12, 13, 3, 1, 2]  # so : </ t >
    assert forced(6, 3, 1) == [2]  # the model was about to end by itself: no words
    assert forced(6, 6, 12) == [13, 3, 1, 2]  # it had begun to say the words
    assert forced(6, 12, 13) == [3, 1, 2]


def test_the_budget_is_that_of_all_blocks_together():
    thoughts = Thoughts(budget=5, blocks=(CLOSINGS[0],), ends=("</t>",), anywhere=True)
    state = ThinkingState(thoughts, bytes_of)
    for token in (4, 6, 6, 5, 6, 6, 4, 6, 6):  # <t>aa</t>aa<t>aa
        state.take(token)
        assert state.forced() is None
    state.take(6)
    assert (state.left, state.forced()) == (0, 5)
    state.take(5)
    assert state.is_barred()


def test_a_mark_in_the_answer_is_text_where_thoughts_stand_in_front():
    thoughts = Thoughts(budget=0, blocks=(CLOSINGS[0],), ends=("</t>",))
    state = ThinkingState(thoughts, bytes_of)
    for token in (7, 8, 6):  # " \na"
        state.take(token)
    assert state.is_over
    state.take(4)
    assert state.forced() is None


@pytest.mark.parametrize("kind", [reasoning_formats.ThinkTags(), reasoning_formats.MistralThoughts()])
@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.sampled_from(["S", "E", "a", " ", "\n", "<", "</", "x y"]), max_size=25))
def test_blocks_are_those_that_the_output_parser_finds(kind: ReasoningFormat, pieces: list[str]):
    ((start, end),) = kind.spans
    texts = [one.replace("S", start).replace("E", end) for one in pieces]
    parser = OutputParser(kind, None)
    thoughts = Thoughts(
        budget=999,
        blocks=(block(start, (0,), 0),),
        ends=kind.span_ends,
        anywhere=kind.is_special,
    )
    state = ThinkingState(thoughts, lambda at: texts[at].encode())
    for at, text in enumerate(texts):
        parser.push(text)
        state.take(at)
        assert (state._open is not None) == parser.is_thinking, texts[: at + 1]

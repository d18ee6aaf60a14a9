"""One answer's place in its grammar: masks, the end, EOS and stop tokens, the free part, taking back."""

from typing import Any

import numpy as np
import pytest

from ostinato.runtime.grammar.grammar_compiler import GrammarCompiler
from ostinato.runtime.grammar.grammar_spec import GrammarSpec
from ostinato.runtime.grammar.grammar_state import DEAD_END, GrammarState, barred_tokens
from ostinato.runtime.messages import SamplingParams
from tests.support.grammar_runs import ids_of, toy_compiler
from tests.support.toy_model import EOS, VOCAB

STOP = 45


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return toy_compiler(tmp_path_factory.mktemp("toy"))


def started(
    compiler: GrammarCompiler,
    regex: str,
    *,
    eos: frozenset[int] = frozenset({EOS}),
    vocab: int = VOCAB,
    **sampling: Any,
) -> GrammarState:
    matcher = compiler.compile(GrammarSpec("regex", regex))
    state = GrammarState(
        matcher,
        SamplingParams.model_validate(sampling),
        vocab,
        eos,
        full_words=compiler.mask_words,
        end_token=compiler.end_token,
        token_bytes=compiler.token_bytes,
    )
    if state.is_active:
        state.refresh()
    return state


def allowed(state: GrammarState, vocab: int = VOCAB) -> set[int]:
    return set(np.nonzero(~barred_tokens(state.mask, vocab))[0].tolist())


def take(state: GrammarState, text: str) -> None:
    for token in ids_of(text):
        if state.take(token):
            state.refresh()


def letters(text: str) -> set[int]:
    return {ids_of(letter)[0] for letter in text}


def test_eos_and_stop_tokens_come_with_the_places_where_the_grammar_may_end(compiler: GrammarCompiler):
    state = started(compiler, "[xyz]{2,3}", stop_token_ids=(STOP,))
    assert allowed(state) == letters("xyz")
    take(state, "x")
    assert allowed(state) == letters("xyz")
    take(state, "y")
    assert allowed(state) == {*letters("xyz"), EOS, STOP}
    assert not state.ended
    take(state, "z")
    assert (state.ended, state.error) == (True, None)


@pytest.mark.parametrize("token", [EOS, STOP])
def test_an_eos_or_stop_token_ends_it(compiler: GrammarCompiler, token: int):
    state = started(compiler, "x+", stop_token_ids=(STOP,))
    take(state, "x")
    assert state.take(token) is False
    assert (state.ended, state.error) == (True, None)


def test_with_ignore_eos_it_goes_on_as_long_as_it_can(compiler: GrammarCompiler):
    state = started(compiler, "x{1,2}", ignore_eos=True)
    take(state, "x")
    assert allowed(state) == letters("x")
    take(state, "x")
    assert state.ended


def test_every_eos_of_the_model_ends_a_grammar_and_none_is_allowed_elsewhere(compiler: GrammarCompiler):
    state = started(compiler, "x+", eos=frozenset({EOS, 0, VOCAB + 5}))
    assert allowed(state) == letters("x")
    take(state, "x")
    assert allowed(state) == {*letters("x"), EOS, 0}


def test_a_token_outside_the_grammar_is_an_error_and_stays_one(compiler: GrammarCompiler):
    state = started(compiler, "x+")
    take(state, "q")
    assert state.error is not None
    assert state.error.startswith("the answer left its grammar")
    assert state.take(ids_of("x")[0]) is False


def test_the_grammar_begins_behind_the_end_of_the_thought(compiler: GrammarCompiler):
    end = tuple(ids_of("</"))
    assert len(end) == 2
    state = started(compiler, "xy", grammar_after=end)
    for text in ("free text", "<", "xy", "<"):
        take(state, text)
        assert not state.is_active
    state.take(end[0])  # "<<": the end is found where its first token stands twice
    assert state.take(end[1])
    state.refresh()
    assert state.is_active
    assert allowed(state) == letters("x")
    take(state, "xy")
    assert state.ended


def test_an_end_that_shares_tokens_with_what_stands_around_it_is_found(compiler: GrammarCompiler):
    for said, end in ((" brown", "row"), ("the quick", "he q"), ("<>", ">")):
        state = started(compiler, "xy", grammar_after=tuple(ids_of(end)))
        assert ids_of(said) != ids_of(end)
        take(state, said)
        assert (state.is_active, allowed(state)) == (True, letters("x")), said


def test_where_thinking_is_free_to_begin_the_first_token_decides(compiler: GrammarCompiler):
    (start,), (end,) = ids_of("<"), ids_of(">")
    thinks = started(compiler, "xy", grammar_after=(end,), grammar_unless=(start,))
    assert allowed(thinks) == {*letters("x"), start}
    take(thinks, "<")
    assert not thinks.is_active
    take(thinks, "free <xy")
    take(thinks, ">")
    assert (thinks.is_active, allowed(thinks)) == (True, letters("x"))
    take(thinks, "xy")
    assert thinks.ended
    does_not = started(compiler, "xy", grammar_after=(end,), grammar_unless=(start,))
    take(does_not, "x")
    assert (does_not.is_active, allowed(does_not)) == (True, letters("y"))
    take(does_not, "y")
    assert does_not.ended


def test_logits_may_be_fewer_than_the_tokenizers_tokens(compiler: GrammarCompiler):
    vocab = 100
    state = started(compiler, "[a-zé]+", vocab=vocab)
    assert len(state.mask) == 4
    assert not np.unpackbits(state.mask.view(np.uint8), bitorder="little")[vocab:].any()
    assert letters("abz") <= allowed(state, vocab)


def test_a_grammar_that_no_token_can_continue_is_a_dead_end(compiler: GrammarCompiler):
    far = max(ids_of("é"))
    state = started(compiler, "é", vocab=far - 1, eos=frozenset())
    for token in ids_of("é")[:-1]:
        if state.take(token):
            state.refresh()
    assert state.error == DEAD_END

"""Words that an answer may not have, as tokens: an engine knows no text."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.errors import InvalidRequest
from ostinato.runtime.llm_arguments import checked_text
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.text import TextFrontEnd


def with_word_ids(text: TextFrontEnd, sampling: SamplingParams) -> SamplingParams:
    """The same parameters with the tokens of `bad_words` added to `bad_word_ids`."""
    if not sampling.bad_words:
        return sampling
    words = (*sampling.bad_word_ids, *word_ids(text, sampling.bad_words))
    return sampling.model_copy(update={"bad_word_ids": tuple(dict.fromkeys(words))})


def word_ids(text: TextFrontEnd, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens that spell each word, alone and behind a space.

    InvalidRequest: a word that is no text, or that the tokenizer has no tokens for.
    """
    found: list[tuple[int, ...]] = []
    for at, word in enumerate(words):
        param = f"bad_words[{at}]"
        own = tuple(text.encode(checked_text(word, param, param), add_special_tokens=False))
        if not own:
            raise InvalidRequest(f"{param}: the tokenizer has no tokens for {word!r:.60}", param=param)
        spaced = tuple(text.encode(f" {word.lstrip()}", add_special_tokens=False))
        found += [own, spaced] if spaced else [own]
    return list(dict.fromkeys(found))

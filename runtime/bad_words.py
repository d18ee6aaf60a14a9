"""Words that an answer may not have, as tokens: an engine knows no text."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.text import TextFrontEnd


def with_word_ids(text: TextFrontEnd, sampling: SamplingParams) -> SamplingParams:
    """The same parameters with the tokens of `bad_words` added to `bad_word_ids`."""
    if not sampling.bad_words:
        return sampling
    words = (*sampling.bad_word_ids, *word_ids(text, sampling.bad_words))
    return sampling.model_copy(update={"bad_word_ids": tuple(dict.fromkeys(words))})


def word_ids(text: TextFrontEnd, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens that spell each word, alone and behind a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        for spelling in (word, f" {word.lstrip()}"):
            found.append(tuple(text.encode(spelling, add_special_tokens=False)))
    return [word for word in dict.fromkeys(found) if word]

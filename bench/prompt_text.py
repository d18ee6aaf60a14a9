"""Texts of a given number of tokens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ostinato.bench.sonnets import LINES
from ostinato.errors import ConfigError

_TRIES = 8  # a cut seldom needs more than two


class PromptText:
    """Draws words. With a tokenizer a text has exactly the tokens asked for; without one, that many words.

    The words are common ones, a token or two each; what a prompt really had is in the server's usage.
    """

    def __init__(self, tokenizer: Path | None = None) -> None:
        self._tokenizer = None if tokenizer is None else _load(tokenizer)
        words = {word.lower() for line in LINES for word in re.findall(r"[A-Za-z]{2,}", line)}
        self._words = np.array(sorted(words))

    def count(self, text: str) -> int:
        """Tokens of a text; words if there is no tokenizer."""
        if self._tokenizer is None:
            return len(text.split())
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def draw(self, length: int, rng: np.random.Generator) -> str:
        """A text of `length` tokens of random words."""
        if length <= 0:
            return ""
        words = " ".join(rng.choice(self._words, size=length))
        return words if self._tokenizer is None else self.cut(words, length)

    def cut(self, text: str, length: int) -> str:
        """The beginning of `text` that has `length` tokens: a word at the end may be cut or exchanged."""
        if self._tokenizer is None:
            return " ".join(text.split()[:length])
        # Decoding and encoding again may join what was cut, so the cut is tried until it holds.
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        for missing in range(_TRIES):
            part = str(self._tokenizer.decode(ids[: length - missing]))
            while self.count(part) < length and missing:
                part += " a"
            if self.count(part) == length:
                return part
        return part


def _load(path: Path) -> Tokenizer:
    file = (
        path
        if path.is_file()
        else next(
            (
                one
                for one in (path / "tokenizer.json", path / "tokenizer" / "tokenizer.json")
                if one.is_file()
            ),
            None,
        )
    )
    if file is None:
        raise ConfigError(f"--tokenizer {path}: no tokenizer.json there; give one or its folder")
    try:
        made = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"--tokenizer {file}: not a readable tokenizer: {error}") from None
    made.no_truncation()
    made.no_padding()
    return made

"""Changes of one request's logits before tokens are drawn: bias, barred tokens, penalties. vLLM's meaning.

Order: logit_bias, EOS and stop tokens barred for the first `min_tokens`, allowed_token_ids, bad words, then
the penalties.
    logit_bias    -100 forbids a token; 100 leaves only the tokens with 100 (unless all of them are barred);
                  anything between is added
    allowed_token_ids  forbids every other token, also one with a bias of 100
    bad_word_ids  forbid the last token of a word where the answer ends with the tokens before it
    repetition    over prompt and answer: positive logits divided, others multiplied
    frequency     over the answer: minus penalty * count
    presence      over the answer: minus penalty, where count > 0
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostinato.runtime.messages import SamplingParams


class BadWords:
    """Token sequences of which none may be completed. Only tokens of the answer count as its beginning."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.words = words
        self.always = sorted({word[0] for word in words if len(word) == 1})
        self.longer = [word for word in words if len(word) > 1]

    def barred(self, tokens: Sequence[int], start: int, end: int) -> list[int]:
        """Tokens that may not follow the answer `tokens[start:end]`."""
        barred = set(self.always)
        for word in self.longer:
            begin = end - len(word) + 1
            if begin >= start and all(tokens[begin + at] == word[at] for at in range(len(word) - 1)):
                barred.add(word[-1])
        return sorted(barred)


def _keep_only(logits_V: Tensor, tokens: Sequence[int]) -> None:
    ids = torch.tensor(tokens, device=logits_V.device)
    kept = logits_V[ids]
    logits_V.fill_(-torch.inf)
    logits_V[ids] = kept


class LogitAdjuster:
    """State of one request. `tokens` (prompt and answer) is referred to and may only be appended to."""

    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_tokens: int,
        *,
        eos_token_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self.params = params
        self.tokens = tokens
        self._prompt_tokens = prompt_tokens
        self._has_penalties = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self._bias = {t: b if b > -100 else -torch.inf for t, b in params.logit_bias.items()}
        self._forced = [token for token, bias in params.logit_bias.items() if bias >= 100]
        barred = eos_token_ids.union(params.stop_token_ids) if params.min_tokens > 0 else ()
        self._barred = sorted(token for token in barred if token < vocab_size)
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else sorted({t for t in allowed if t < vocab_size})
        self._bad_words = BadWords(params.bad_word_ids)
        self._slot_of: dict[int, int] = {}  # token -> place in the two arrays below
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)  # in the answer
        self._seen = 0  # tokens counted so far
        self._vocab_size = vocab_size

    def is_idle(self, position: int) -> bool:
        """Logits of generated token `position` stay as they are."""
        return not (
            self._bias
            or self._has_penalties
            or self._allowed is not None
            or self._bad_words.words
            or (self._barred and position < self.params.min_tokens)
        )

    def adjust(self, logits_V: Tensor, position: int) -> None:
        """Change float32 logits in place. Cost: linear in the distinct tokens seen, not in the vocabulary."""
        device = logits_V.device
        if self._bias:
            ids = torch.tensor(list(self._bias), device=device)
            logits_V[ids] += torch.tensor(list(self._bias.values()), dtype=torch.float32, device=device)
        barred = self._barred if position < self.params.min_tokens else []
        if barred:
            logits_V[torch.tensor(barred, device=device)] = -torch.inf
        forced = [token for token in self._forced if token not in barred]
        if forced:
            _keep_only(logits_V, forced)
        if self._allowed is not None:
            _keep_only(logits_V, self._allowed)
        answer_end = self._prompt_tokens + position
        if bad := self._bad_words.barred(self.tokens, self._prompt_tokens, answer_end):
            logits_V[torch.tensor(bad, device=device)] = -torch.inf
        if self._has_penalties:
            self._penalise(logits_V, answer_end)

    def _penalise(self, logits_V: Tensor, num_tokens: int) -> None:
        self._count(num_tokens)
        used = len(self._slot_of)
        if not used:
            return
        params = self.params
        ids = torch.from_numpy(self._ids[:used]).to(logits_V.device)
        counts = torch.from_numpy(self._counts[:used]).to(logits_V.device)
        values = logits_V[ids]
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            values = torch.where(values > 0, values / penalty, values * penalty)
        values = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        logits_V[ids] = values

    def _count(self, num_tokens: int) -> None:
        for at in range(self._seen, num_tokens):
            token = self.tokens[at]
            if token >= self._vocab_size:
                continue  # a prompt token that has an embedding but no logit
            slot = self._slot_of.setdefault(token, len(self._slot_of))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token
            self._counts[slot] += at >= self._prompt_tokens
        self._seen = num_tokens

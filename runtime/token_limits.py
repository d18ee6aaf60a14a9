"""What a row of logits may become: tokens of a mask, or one token that is settled. V vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ostinato.runtime.grammar.grammar_state import Mask, mask_words

Limit = Mask | int
"""A mask, besides all that the request says; or a token that is drawn whatever the request says."""

NO_LIMITS: Mapping[str, Limit] = {}


def mask_of_one(token: int, vocab_size: int) -> Mask:
    """Nothing but this token."""
    mask: Mask = np.zeros(mask_words(vocab_size), np.int32)
    mask.view(np.uint32)[token >> 5] = np.uint32(1 << (token & 31))
    return mask


def mask_without(tokens: Sequence[int], vocab_size: int) -> Mask:
    """All tokens but these."""
    bits = np.zeros(32 * mask_words(vocab_size), np.uint8)
    bits[:vocab_size] = 1
    bits[list(tokens)] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)

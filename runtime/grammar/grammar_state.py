"""One request's place in its grammar: which tokens may come next, and when the answer is complete.

V vocabulary.  A mask is int32 [ceil(V / 32), rounded up to 4]: bit t % 32 of word t // 32 allows token t.

Rules, together with `ignore_eos`, `min_tokens` and stop tokens:
    - a token that ends answers may also be part of a grammar (gpt-oss' end of a call): it ends the answer;
    - where the grammar may end, EOS and the request's stop tokens are allowed, besides what goes on;
      `min_tokens` bars them as ever, and with ignore_eos EOS is not allowed at all;
    - where nothing can go on, the answer ends with `stop` at once, whatever min_tokens and ignore_eos say:
      no token comes behind a complete grammar.
A thinking model is free first: the grammar begins behind the token that completes the text of
`grammar_after`, whatever the tokens in which it is said. Where it may think or not, it is free if its first
token is one of `grammar_unless`, which are allowed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ostinato.runtime.messages import OwnFault, SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.int32]
_WORDS = 4  # a mask's length is a multiple: 16 bytes, as kernels load them
DEAD_END = OwnFault("the grammar allows no token of this model here; change it")


def mask_words(vocab_size: int) -> int:
    """Length of a mask."""
    return -(-vocab_size // (32 * _WORDS)) * _WORDS


def barred_tokens(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    """bool [V]: tokens that a mask does not allow."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    return bits == 0


class GrammarState:
    """Follows the tokens of one answer."""

    def __init__(
        self,
        matcher: LLMatcher,
        sampling: SamplingParams,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        *,
        full_words: int,
        end_token: int,
        token_bytes: Callable[[int], bytes],
    ) -> None:
        """`full_words`: length of what the matcher writes, which may know more tokens than there are logits;
        `end_token`: what it takes for the end; `token_bytes`: a token's share of the text.

        `mask` is not valid before `refresh`.
        """
        self.matcher = matcher
        self.mask: Mask = np.zeros(mask_words(vocab_size), np.int32)
        self.ended = False
        self.error: OwnFault | None = None
        self._full: Mask = np.zeros(full_words, np.int32)
        self._num_words = min(full_words, -(-vocab_size // 32))
        self._vocab_size = vocab_size
        self._ends = tuple(t for t in eos_token_ids if t < vocab_size)
        self._end_token = (end_token,) if end_token < vocab_size else ()
        self._closing = tuple({*(() if sampling.ignore_eos else self._ends), *sampling.stop_token_ids})
        self._token_bytes = token_bytes
        self._after = b"".join([token_bytes(token) for token in sampling.grammar_after])
        self._newest = b""  # text in which the end of the free part may have begun
        self._unless = sampling.grammar_unless if self._after else ()
        self._at_start = bool(self._unless)
        self.is_active = not self._after or self._at_start

    @property
    def full_mask(self) -> Mask:
        """Where a mask is computed to, before `settle`."""
        return self._full

    def take(self, token: int) -> bool:
        """The answer goes on with `token`. True: a new mask is needed (`refresh`, or fill and `settle`)."""
        if self.ended or self.error is not None:
            return False
        if not self.is_active:
            text = self._newest + self._token_bytes(token)
            self.is_active = self._after in text
            self._newest = text[1 - len(self._after) :] if len(self._after) > 1 else b""
            return self.is_active
        if self._at_start:
            self._at_start = False
            if token in self._unless:
                self.is_active = False
                return False
        if token in self._ends or token in self._closing:
            self.ended = True  # by the scheduler's rules it ends the answer
            return False
        if not self.matcher.consume_token(token):
            self.error = OwnFault(f"the answer left its grammar at token {token}: {self._why()}")
            return False
        return True

    def refresh(self) -> None:
        """Compute the mask of the next token."""
        full = self._full
        self.matcher.unsafe_compute_mask_ptr(full.ctypes.data, full.nbytes)
        self.settle()

    def settle(self) -> None:
        """Make `mask` of the full one: EOS by our rules; see whether the answer is complete or lost."""
        if self.matcher.is_error():
            self.error = OwnFault(f"the grammar is too complex to go on: {self._why()}")
            return
        mask, count = self.mask, self._num_words
        mask[:count] = self._full[:count]
        bits: NDArray[np.uint32] = mask.view(np.uint32)
        if tail := self._vocab_size % 32:
            bits[self._vocab_size // 32] &= (1 << tail) - 1
        _clear(bits, self._end_token)  # another EOS is allowed only where the grammar names it
        may_end = self.matcher.is_accepting()
        if not bits.any():
            self.ended = may_end
            self.error = None if may_end else DEAD_END
        elif may_end:
            _set(bits, self._closing)
        if self._at_start:
            _set(bits, self._unless)

    def _why(self) -> str:
        return (
            " ".join(self.matcher.get_error().replace("<non-verbose/>", "").split())[:200]
            or "no reason is given"
        )


def _set(bits: NDArray[np.uint32], tokens: Sequence[int]) -> None:
    for token in tokens:
        bits[token >> 5] |= np.uint32(1 << (token & 31))


def _clear(bits: NDArray[np.uint32], tokens: Sequence[int]) -> None:
    for token in tokens:
        bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)

"""Budgets for thinking on the toy model, and what they must come to, told from the text alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ostinato.runtime.messages import GenerateRequest, ThoughtBlock, Thoughts
from ostinato.runtime.sampling.sampler import Sampler, SampleRow
from ostinato.runtime.token_limits import Limit, mask_without
from tests.support.grammar_runs import TEXT, ids_of
from tests.support.toy_model import EOS, VOCAB, ToyModel


def thoughts(
    budget: int,
    *,
    start: str = "q",
    end: str = "z",
    words: str = "",
    begun: bool = False,
    anywhere: bool = True,
) -> Thoughts:
    """A budget with one kind of block."""
    said = ids_of(words) if words else []
    block = ThoughtBlock(start=start, closing=(*said, *ids_of(end)), mark=len(said))
    return Thoughts(
        budget=budget,
        blocks=(block,),
        ends=(end,),
        begun=0 if begun else None,
        anywhere=anywhere,
    )


class _Holding(dict[str, list[int]]):
    def __missing__(self, start: str) -> list[int]:
        codec = TEXT.codec
        return [token for token in range(VOCAB) if start.encode() in codec.token_bytes(token)]


HOLDING = _Holding()  # tokens in which a start stands whole


class Story:
    """An answer read from its beginning, character by character."""

    def __init__(
        self,
        given: Thoughts,
        tokens: Sequence[int],
        bytes_of: Callable[[int], bytes] = TEXT.codec.token_bytes,
    ) -> None:
        (self._block,), self._given = given.blocks, given
        self._bytes_of = bytes_of
        self.inside, self.spent, self.counted = given.begun is not None, 0, int(given.begun is not None)
        self.is_open = True  # thoughts may still begin
        self._seen = b""
        self._own: list[int] = []  # tokens of the open block
        self.forced: list[int] = []  # still to come
        for token in tokens:
            self._take(token)
        self._force()

    def _force(self) -> None:
        if not (self.inside and self.spent >= self._given.budget and not self.forced):
            return
        closing, mark = list(self._block.closing), self._block.mark
        done = 0
        for first, last in ((mark, len(closing)), (0, len(closing))):
            fitting = [at for at in range(first + 1, last) if self._own[first - at :] == closing[first:at]]
            if fitting:
                done = max(fitting)
                break
        self.forced = closing[done:]

    def _is_in_front(self, start: bytes, ends: list[bytes]) -> bool:
        """All text so far is white space, ends without a start, and the beginning of a mark."""
        seen = self._seen.lstrip()
        if not self.counted and seen in ends:
            seen = self._seen = b""
        return any(mark.startswith(seen) for mark in (start, *([] if self.counted else ends)))

    def _take(self, token: int) -> None:
        self._force()
        if self.forced:
            assert token == self.forced.pop(0), "what is forced is said"
            if not self.forced:
                self.inside, self._seen, self._own = False, b"", []
            return
        was_inside, blocks = self.inside, self.counted
        start, ends = self._block.start.encode(), [end.encode() for end in self._given.ends]
        for byte in self._bytes_of(token):
            self._seen += bytes([byte])
            if self.inside:
                if self._seen.endswith(tuple(ends)):
                    self.inside, self._seen = False, b""
                continue
            begins = self._seen.endswith(start) if self._given.anywhere else self._seen.lstrip() == start
            if begins and self.is_open:
                self.inside, self._seen, self._own = True, b"", []
                self.counted += 1
            elif not self._given.anywhere and not self._is_in_front(start, ends):
                self.is_open = False
        if was_inside and self.inside and self.counted == blocks:
            self.spent += 1
            self._own.append(token)


def expected(request: GenerateRequest, *, model: ToyModel | None = None) -> list[int]:
    """The answer, one token at a time, by the whole text, without KV, batches or any state."""
    given, params = request.sampling.thoughts, request.sampling
    assert given is not None
    model = model or ToyModel()
    sampler, tokens = Sampler(VOCAB, frozenset((EOS,))), list(request.prompt_token_ids)
    start = len(tokens)
    for position in range(params.max_tokens or 0):
        story = Story(given, tokens[start:])
        limit: Limit | None = story.forced[0] if story.forced else None
        if limit is None and given.anywhere and not story.inside and story.spent >= given.budget:
            limit = mask_without(HOLDING[given.blocks[0].start], VOCAB)
        row = SampleRow("r", params, params.seed or 0, position, tokens, start, limit)
        logits = model.dense_logits(tokens)[-1:]
        tokens.append(sampler.sample(torch.as_tensor(logits), [row]).tokens["r"])
        if tokens[-1] == EOS and position + 1 > params.min_tokens and not params.ignore_eos:
            break
    return tokens[start:]

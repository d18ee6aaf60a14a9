"""Token events of one sequence become text: detokenizer, then stop strings, then what may be shown.

Both renderings of an answer, streamed or whole, are made from the deltas that come out here.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.messages import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from ostinato.runtime.stop_strings import StopScanner


class ShownToken(NamedTuple):
    """A token whose text is shown, with its log-probabilities.

    `offset` counts characters of the whole text.
    """

    token_id: int
    offset: int
    logprob: TokenLogprob | None


class Delta(NamedTuple):
    """What one event adds. With `finish_reason` set nothing follows."""

    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: FinishReason | None = None


class ChoiceOutput:
    """Output of one sequence.

    A token comes out with the text that it completes: half a character and the beginning of a stop string
    wait. Tokens are listed only when log-probabilities were asked for.  The token or string that stops the
    sequence is not shown unless `include_stop_str_in_output`; it counts in `num_tokens`, as do tokens cut by
    a stop string.
    """

    def __init__(self, codec: TokenCodec, sampling: SamplingParams) -> None:
        self.num_tokens = 0
        self.finished = False
        self._detokenizer = codec.detokenizer(skip_special=sampling.skip_special_tokens)
        self._scanner = (
            StopScanner(sampling.stop, include=sampling.include_stop_str_in_output) if sampling.stop else None
        )
        self._shows_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._lists_tokens = sampling.logprobs is not None
        self._decoded = 0  # characters decoded, shown or not
        self._shown = 0
        self._waiting: deque[tuple[ShownToken, int]] = deque()  # with the offset of its end

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._scanner is None else self._scanner.matched

    def push(self, event: TokenEvent) -> Delta:
        """Take an event's tokens. After a stop string matched `finished` is set, whatever the engine says."""
        reason = event.finish_reason
        ids = event.token_ids
        if reason is None and self._scanner is None and not self._lists_tokens:  # the middle of most answers
            self.num_tokens += len(ids)
            return Delta(self._detokenizer.push_all(ids))
        text = ""
        for at, token_id in enumerate(ids):
            self.num_tokens += 1
            hidden = event.stop_token_id is not None and at == len(ids) - 1 and not self._shows_stop
            if hidden:
                break
            piece = self._detokenizer.push(token_id)
            if self._lists_tokens:
                self._list(token_id, len(piece), event.logprobs[at] if at < len(event.logprobs) else None)
            text += self._scan(piece)
            if self._scanner is not None and self._scanner.matched is not None:
                return self._end(text, "stop", cut=True)
        if reason is not None:
            text += self._scan(self._detokenizer.finish())
            if self._scanner is not None:
                if self._scanner.matched is not None:
                    return self._end(text, "stop", cut=True)
                text += self._scanner.finish()
            return self._end(text, reason)
        return Delta(text, self._release(len(text)))

    def _scan(self, piece: str) -> str:
        if not piece or self._scanner is None or self.num_tokens <= self._min_tokens:
            return piece
        return self._scanner.push(piece)

    def _list(self, token_id: int, length: int, logprob: TokenLogprob | None) -> None:
        self._waiting.append((ShownToken(token_id, self._decoded, logprob), self._decoded + length))
        self._decoded += length

    def _release(self, length: int) -> tuple[ShownToken, ...]:
        self._shown += length
        if not length or not self._waiting:
            return ()
        out = []
        while self._waiting:
            token, end = self._waiting[0]
            # A token without width at the very end waits too: it may belong to text that a stop string cuts.
            if end > self._shown or token.offset == self._shown:
                break
            out.append(token)
            self._waiting.popleft()
        return tuple(out)

    def _end(self, text: str, reason: FinishReason, *, cut: bool = False) -> Delta:
        """`cut`: a stop string matched, so tokens that begin behind it are not shown."""
        self.finished = True
        shown = self._release(len(text))
        rest = tuple(token for token, _ in self._waiting if not cut or token.offset < self._shown)
        return Delta(text, shown + rest, reason)

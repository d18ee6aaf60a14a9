"""Token events of one sequence become an answer: detokenizer, formats (reasoning, calls), stop strings.

Both renderings of an answer, streamed or whole, are made from the deltas that come out here.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.messages import FinishReason, SamplingParams, TokenEvent, TokenLogprob
from ostinato.runtime.output.events import CallEnd, Content, Event, join
from ostinato.runtime.output.output_parser import OutputParser
from ostinato.runtime.stop_strings import StopScanner


class ShownToken(NamedTuple):
    """A token whose text is shown, with its log-probabilities.

    `offset` counts characters of the whole text.
    """

    token_id: int
    offset: int
    logprob: TokenLogprob | None


class Delta(NamedTuple):
    """What one event adds. With `finish_reason` set nothing follows.

    `text` is content. With a parser `parts` has it too, in its place among reasoning and calls.
    """

    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish_reason: FinishReason | None = None
    parts: tuple[Event, ...] = ()


class ChoiceOutput:
    """Output of one sequence.

    A token comes out with the text that it completes: half a character and the beginning of a stop string
    wait. Tokens are listed only when log-probabilities were asked for.  The token or string that stops the
    sequence is not shown unless `include_stop_str_in_output`; it counts in `num_tokens`, as do tokens cut by
    a stop string.

    With a parser, stop strings are looked for in content alone, not among thoughts and not in calls; tokens
    of thoughts and calls are listed like those of content.
    """

    def __init__(
        self,
        codec: TokenCodec,
        sampling: SamplingParams,
        parser: OutputParser | None = None,
        *,
        shown_special: frozenset[int] = frozenset(),
        one_call: bool = False,
        lists_stop: bool = False,
    ) -> None:
        """`shown_special`: special tokens that `parser` reads.  `one_call`: end behind the first call.

        `lists_stop`: the stop token is listed, without width, though the text does not show it.
        """
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # of them, those of thoughts and of their markers
        self.finished = False
        self.stop_token_id: int | None = None  # the token that ended it, if one did
        self._detokenizer = codec.detokenizer(skip_special=sampling.skip_special_tokens, keep=shown_special)
        self._scanner = (
            StopScanner(sampling.stop, include=sampling.include_stop_str_in_output) if sampling.stop else None
        )
        self._parser = parser
        self._one_call = one_call
        self._lists_stop = lists_stop
        self._shows_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._lists_tokens = sampling.logprobs is not None
        self._decoded = 0  # characters of content (without a parser: of text), shown or not
        self._shown = 0
        self._waiting: deque[tuple[ShownToken, int]] = deque()  # with the offset of its end
        self._settled = 0  # of those that wait, the first ones that no stop string can cut any more

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return 0 if self._parser is None else self._parser.num_calls

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._scanner is None else self._scanner.matched

    @property
    def _stopped(self) -> bool:
        return self._scanner is not None and self._scanner.matched is not None

    def push(self, event: TokenEvent) -> Delta:
        """Take an event's tokens. After a stop string matched `finished` is set, whatever the engine says."""
        reason = event.finish_reason
        ids = event.token_ids
        if reason is None and self._scanner is None and not self._lists_tokens and not self._one_call:
            self.num_tokens += len(ids)  # the middle of most answers
            if self._parser is None:
                return Delta(self._detokenizer.push_all(ids))
            return _delta([one for i in ids for one in self._parsed(self._parser, i)], parsed=True)
        told: list[Event] = []
        for at, token_id in enumerate(ids):
            self.num_tokens += 1
            hidden = event.stop_token_id is not None and at == len(ids) - 1 and not self._shows_stop
            logprob = event.logprobs[at] if at < len(event.logprobs) else None
            if hidden:
                if self._lists_tokens and self._lists_stop:
                    self._list(token_id, [], logprob)
                break
            events = self._read(token_id)
            if self._lists_tokens:
                self._list(token_id, events, logprob)
            if self._tell(events, told):
                return self._end(told, "stop", cut=self._stopped)
        if reason is None:
            return self._made(told)
        self.stop_token_id = event.stop_token_id
        last = self._detokenizer.finish()
        if self._parser is not None:
            events = self._parser.push(last) + self._parser.finish(by_itself=reason == "stop")
        else:
            events = [Content(last)] if last else []
        if self._tell(events, told) and not _is_cut(told):
            return self._end(told, "stop", cut=self._stopped)
        if self._scanner is not None and (held := self._scanner.finish()):
            told.append(Content(held))
        return self._end(told, reason)

    def _read(self, token_id: int) -> list[Event]:
        if self._parser is not None:
            return self._parsed(self._parser, token_id)
        text = self._detokenizer.push(token_id)
        return [Content(text)] if text else []

    def _parsed(self, parser: OutputParser, token_id: int) -> list[Event]:
        thought = parser.is_thinking
        events = parser.push(self._detokenizer.push(token_id))
        self.num_reasoning_tokens += thought or parser.is_thinking
        return events

    def _tell(self, events: list[Event], told: list[Event]) -> bool:
        """Add what may be shown to `told`; True when the answer ends with it."""
        for one in events:
            if isinstance(one, Content):
                if text := self._scan(one.text):
                    told.append(Content(text))
                if self._stopped:
                    return True
                continue
            told.append(one)
            if self._one_call and isinstance(one, CallEnd):
                return True
        return False

    def _scan(self, piece: str) -> str:
        if self._scanner is None or self.num_tokens <= self._min_tokens:
            return piece
        return self._scanner.push(piece)

    def _list(self, token_id: int, events: list[Event], logprob: TokenLogprob | None) -> None:
        length = sum(len(one.text) for one in events if isinstance(one, Content))
        self._waiting.append((ShownToken(token_id, self._decoded, logprob), self._decoded + length))
        self._decoded += length
        if events and not isinstance(events[-1], Content):
            self._settled = len(self._waiting)  # nothing of them is held that could be content yet

    def _release(self, length: int) -> tuple[ShownToken, ...]:
        self._shown += length
        out: list[ShownToken] = []
        while self._waiting:
            token, end = self._waiting[0]
            # A token without width at the very end waits too: it may belong to text that a stop string cuts.
            if end > self._shown or (token.offset == self._shown and len(out) >= self._settled):
                break
            out.append(token)
            self._waiting.popleft()
        self._settled = max(0, self._settled - len(out))
        return tuple(out)

    def _made(self, told: list[Event], reason: FinishReason | None = None) -> Delta:
        delta = _delta(told, parsed=self._parser is not None)
        return delta._replace(tokens=self._release(len(delta.text)), finish_reason=reason)

    def _end(self, told: list[Event], reason: FinishReason, *, cut: bool = False) -> Delta:
        """`cut`: a stop string matched, so tokens that begin behind it are not shown."""
        self.finished = True
        delta = self._made(told, reason)
        rest = tuple(token for token, _ in self._waiting if not cut or token.offset < self._shown)
        return delta._replace(tokens=delta.tokens + rest)


def _is_cut(told: list[Event]) -> bool:
    """Whether the last is the end of a call that came because the answer ended."""
    return bool(told) and isinstance(told[-1], CallEnd) and not told[-1].whole


def _delta(events: list[Event], *, parsed: bool) -> Delta:
    if len(events) == 1:
        only = events[0]
        return Delta(only.text if isinstance(only, Content) else "", parts=(only,) if parsed else ())
    text = "".join([one.text for one in events if isinstance(one, Content)])
    return Delta(text, parts=tuple(join(events)) if parsed else ())

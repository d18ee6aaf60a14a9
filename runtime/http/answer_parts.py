"""Pieces that chat and text completions have in common: ids, usage, log-probabilities, tokens as JSON."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ostinato.runtime.choice_output import Delta, ShownToken
from ostinato.runtime.detokenizer import TokenCodec
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.messages import TokenLogprob
from ostinato.runtime.output.events import Event

LOWEST_LOGPROB = -9999.0  # what OpenAI gives for an impossible token; JSON has no minus infinity

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode  # json.dumps makes one per call


def new_id(prefix: str) -> str:
    """`chatcmpl-` and the like."""
    return f"{prefix}-{uuid.uuid4().hex}"


def dump(value: object) -> str:
    """Compact ASCII JSON: no character in it can end a line for any client."""
    return _encode(value)


def token_namer(codec: TokenCodec, *, as_ids: bool | None) -> Callable[[int], str]:
    """What log-probabilities call a token: its text, or `token_id:15`."""
    return (lambda token_id: f"token_id:{token_id}") if as_ids else codec.token_text


def stop_reason(choice: Choice) -> int | str | None:
    """The stop string, or the one of `stop_token_ids`, that ended a choice; None: nothing that was asked."""
    if (text := choice.output.stop_string) is not None:
        return text
    token = choice.output.stop_token_id
    return token if token in choice.request.sampling.stop_token_ids else None


UNFINISHED = '"finish_reason":null'  # in every chunk that does not end its choice


def finished(reason: str | None, stopped_by: int | str | None) -> str:
    """What stands there in the chunk that ends it."""
    return f'"finish_reason":{dump(reason)},"stop_reason":{dump(stopped_by)}'


def finite(logprob: float) -> float:
    """JSON has no infinities."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def usage(choices: Iterable[Choice], n: int) -> dict[str, object]:
    """OpenAI's usage object. The prompt of `n` choices counts once."""
    choices = list(choices)
    prompt = sum(len(choice.request.prompt_token_ids) for choice in choices[::n])
    completion = sum(choice.output.num_tokens for choice in choices)
    thoughts = sum(choice.output.num_reasoning_tokens for choice in choices)
    details = {"completion_tokens_details": {"reasoning_tokens": thoughts}} if thoughts else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in choices[::n])},
        **details,
    }


def prompt_records(codec: TokenCodec, choice: Choice, most: int | None) -> list[object] | None:
    """`prompt_logprobs` as vLLM writes them: null, or token id -> log-probability, rank and text."""
    if most is None:
        return None
    records: list[object] = []
    for record in choice.prompt_logprobs or [None] * len(choice.request.prompt_token_ids):
        if record is None:
            records.append(None)
            continue
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(alternatives(record, most), 1)]
        if all(i != record.token_id for i, _, _ in ranked):
            ranked.append((record.token_id, finite(record.logprob), record.rank))
        records.append(
            {
                str(i): {"logprob": value, "rank": rank, "decoded_token": codec.token_text(i)}
                for i, value, rank in ranked
            }
        )
    return records


@dataclass
class Collected:
    """All deltas of one choice, for an answer that is sent whole."""

    texts: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None
    parts: list[Event] = field(default_factory=list)  # of a choice that is parsed

    def add(self, delta: Delta) -> None:
        """Append one delta."""
        self.texts.append(delta.text)
        self.tokens.extend(delta.tokens)
        self.parts.extend(delta.parts)
        self.finish_reason = delta.finish_reason or self.finish_reason


def alternatives(logprob: TokenLogprob | None, limit: int) -> list[tuple[int, float]]:
    """The best `limit` alternatives, best first."""
    return [] if logprob is None else [(i, finite(value)) for i, value in logprob.top[:limit]]

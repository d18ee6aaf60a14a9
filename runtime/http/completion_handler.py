"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web

from ostinato.errors import InvalidRequest
from ostinato.runtime.choice_output import Delta, ShownToken
from ostinato.runtime.http.answer_parts import (
    UNFINISHED,
    Collected,
    alternatives,
    dump,
    finished,
    finite,
    prompt_records,
    stop_reason,
    token_namer,
    usage,
)
from ostinato.runtime.http.api_schema import CompletionRequest
from ostinato.runtime.http.choices import Choice
from ostinato.runtime.http.client_watch import cancelled_when_client_leaves
from ostinato.runtime.http.request_rules import (
    MAX_CHOICES,
    answer_id,
    check_prompt,
    fit,
    read_request,
    sampling_params,
)
from ostinato.runtime.http.send_answer import send_answer
from ostinato.runtime.http.server_state import STATE, ServerState
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.prompt_room import kept_tokens, room_left
from ostinato.runtime.text import SHORT
from ostinato.runtime.thinking.thought_marks import with_thoughts

DEFAULT_MAX_TOKENS = 16  # OpenAI's and vLLM's default for this route


async def completions(request: web.Request) -> web.StreamResponse:
    """A continuation of text or token ids, whole or streamed."""
    state = request.app[STATE]
    fields = await read_request(request, CompletionRequest)
    state.check_open()
    with cancelled_when_client_leaves(request):
        limit = (
            max(DEFAULT_MAX_TOKENS, fields.min_tokens or 0)
            if fields.max_tokens is None
            else fields.max_tokens
        )
        # An engine generates at least one token; with max_tokens=0 the answer does not show it.
        sampling = sampling_params(state, fields, limit=max(1, limit), logprobs=fields.logprobs)
        if limit == 0 and fields.min_tokens:
            raise InvalidRequest(f"min_tokens: {fields.min_tokens} is over max_tokens=0", param="min_tokens")
        sampling = sampling.model_copy(update=_asked_besides(fields))
        prompts = await _prompts(state, fields, limit)
        n = fields.sequences
        if len(prompts) * n > MAX_CHOICES:
            param = "n" if n == (fields.n or 1) else "best_of"
            raise InvalidRequest(
                f"{param}: {len(prompts)} prompts x {param}={n} is over {MAX_CHOICES} sequences; send fewer "
                "at once",
                param=param,
            )
        window = state.engine.info.max_model_len
        answer = CompletionAnswer(state, fields, [text for text, _ in prompts])
        all_ids = [ids for _, ids in prompts]
        several = [fit(sampling, ids, window, param="prompt") for ids in all_ids]
        if fields.thinking_token_budget is not None:
            several = await state.text.off_loop(lambda: _with_thoughts(state, several, all_ids))
        return await send_answer(request, fields, answer, all_ids, several)


def _with_thoughts(
    state: ServerState, several: Sequence[SamplingParams], all_ids: Sequence[list[int]]
) -> list[SamplingParams]:
    """The marks of thoughts for each prompt, which may end inside some."""
    marks, codec = state.thought_marks, state.text.codec
    return [
        with_thoughts(
            sampling,
            marks,
            begun=None if marks is None else marks.begun_in(codec.decode(ids, skip_special=False)),
        )
        for sampling, ids in zip(several, all_ids, strict=True)
    ]


def _asked_besides(fields: CompletionRequest) -> dict[str, int]:
    """Log-probabilities that other fields need: those of an echoed prompt, and what ranks `best_of`."""
    needs: dict[str, int] = {}
    if fields.echo and fields.logprobs is not None:
        needs["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    if fields.sequences > (fields.n or 1) and fields.logprobs is None:
        needs["logprobs"] = 0
    return needs


async def _prompts(
    state: ServerState, fields: CompletionRequest, limit: int
) -> list[tuple[str | None, list[int]]]:
    """Text (None when the client sent ids, or when it was cut) and token ids of each prompt."""
    kept = kept_tokens(fields.truncate_prompt_tokens, limit, state.engine.info.max_model_len)
    prompt, text, info = fields.prompt, state.text, state.engine.info
    special = fields.add_special_tokens is not False
    named = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)

    def param(at: int) -> str:
        return f"prompt[{at}]" if named else "prompt"

    def encode(texts: list[str]) -> list[tuple[str | None, list[int]]]:
        if kept is not None:
            return [(one, text.encode(one, add_special_tokens=special)) for one in texts]
        return [
            (one, text.encode_within(info.max_model_len, one, param=param(at), add_special_tokens=special))
            for at, one in enumerate(texts)
        ]

    result: list[tuple[str | None, list[int]]]
    if isinstance(prompt, str):
        result = await text.off_loop(lambda: encode([prompt]), is_short=len(prompt) <= SHORT)
    elif prompt and isinstance(prompt[0], str):
        texts = [one for one in prompt if isinstance(one, str)]
        result = await text.off_loop(lambda: encode(texts))
    elif prompt and isinstance(prompt[0], list):
        result = [(None, one) for one in prompt if isinstance(one, list)]
    else:
        result = [(None, [one for one in prompt if isinstance(one, int)])]
    for at, (one, ids) in enumerate(result):
        # An empty text is refused though BOS would make it one token: nobody means it.
        check_prompt([] if one == "" else ids, info.vocab_size, param(at))
        if kept is not None and len(ids) > kept:
            one, ids = None, ids[-kept:]
            result[at] = one, ids
        room_left(len(ids), info.max_model_len, param=param(at))
    return result


class CompletionAnswer:
    """Renders deltas as chunks, or all of them as one body. What never changes is rendered once."""

    def __init__(self, state: ServerState, fields: CompletionRequest, texts: Sequence[str | None]) -> None:
        self.id = answer_id(state, "cmpl", fields.request_id)
        self._head = {
            "id": self.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": state.model,
        }
        self._text = state.text
        self._codec = state.text.codec
        self._named = token_namer(self._codec, as_ids=fields.return_tokens_as_token_ids)
        self._n = fields.n or 1
        self._sequences = fields.sequences
        self._prompt_alone = fields.max_tokens == 0
        self._prompt_top = fields.prompt_logprobs
        self._ids = bool(fields.return_token_ids)
        self._repeats = fields.repeats_usage
        self._top = len(fields.logprob_token_ids or ()) or fields.logprobs
        self._echo = bool(fields.echo)
        self._texts = texts
        self._usage = fields.includes_usage
        self._echoed: dict[int, int] = {}  # choice -> characters of prompt in front of its text
        self._prefix = f"data: {dump(self._head)[:-1]},"
        self._suffix = ',"usage":null}\n\n' if self._usage else "}\n\n"

    def events(self, choice: Choice, delta: Delta) -> bytes:
        """The chunk of one delta; the reason comes with the last text."""
        delta = self._shown(delta)
        more = self._more(choice)
        text, logprobs = self._begin(choice)
        self._add(logprobs, choice, delta.tokens)
        text += delta.text
        is_empty = not text and not more.get("token_ids") and not (logprobs and logprobs["tokens"])
        if is_empty and delta.finish_reason is None:
            return b""
        end = UNFINISHED
        if delta.finish_reason is not None:
            end = finished(delta.finish_reason, self._stopped_by(choice))
        detail = "null" if logprobs is None else dump(logprobs)
        suffix = f',"usage":{dump(self._used([choice], 1))}}}\n\n' if self._repeats else self._suffix
        own = f",{dump(more)[1:-1]}" if more else ""
        return (
            f'{self._prefix}"choices":[{{"index":{choice.index},"text":{dump(text)},'
            f'"logprobs":{detail},{end}{own}}}]{suffix}'
        ).encode()

    def closing(self, choices: list[Choice]) -> bytes:
        """The usage chunk, when asked for."""
        if not self._usage:
            return b""
        used = self._used(choices, self._sequences)
        return f'{self._prefix}"choices":[],"usage":{dump(used)}}}\n\n'.encode()

    def body(self, choices: list[Choice], whole: list[Collected]) -> str:
        """The answer in one piece."""
        rendered = []
        for index, choice in enumerate(self._best(choices)):
            got = whole[choice.index]
            delta = self._shown(Delta("".join(got.texts), tuple(got.tokens)))
            more = self._more(choice)
            text, logprobs = self._begin(choice)
            self._add(logprobs, choice, delta.tokens)
            rendered.append(
                {
                    "index": index,
                    "text": text + delta.text,
                    "logprobs": logprobs,
                    "finish_reason": "length" if self._prompt_alone else got.finish_reason,
                    "stop_reason": self._stopped_by(choice),
                    **more,
                }
            )
        return dump({**self._head, "choices": rendered, "usage": self._used(choices, self._sequences)})

    def _best(self, choices: list[Choice]) -> list[Choice]:
        """The sequences that come back: with `best_of` over `n` the likeliest of each prompt, best first."""
        if self._sequences == self._n:
            return choices
        best: list[Choice] = []
        for at in range(0, len(choices), self._sequences):
            ranked = sorted(
                choices[at : at + self._sequences],
                key=lambda one: -one.logprob / max(1, one.output.num_tokens),
            )
            best += ranked[: self._n]
        return best

    def _shown(self, delta: Delta) -> Delta:
        if not self._prompt_alone:
            return delta
        return Delta("", (), None if delta.finish_reason is None else "length")

    def _stopped_by(self, choice: Choice) -> int | str | None:
        return None if self._prompt_alone else stop_reason(choice)

    def _used(self, choices: list[Choice], sequences: int) -> dict[str, object]:
        used = usage(choices, sequences)
        if self._prompt_alone:
            used |= {"completion_tokens": 0, "total_tokens": used["prompt_tokens"]}
        return used

    def _more(self, choice: Choice) -> dict[str, object]:
        """Fields of a choice that were asked for: of the prompt once, its new tokens each time."""
        is_first = choice.index not in self._echoed
        told: dict[str, object] = {}
        if self._prompt_top is not None:
            told["prompt_logprobs"] = (
                prompt_records(self._codec, choice, self._prompt_top) if is_first else None
            )
        if self._ids:
            ids = choice.take_ids()
            told["token_ids"] = [] if self._prompt_alone else ids
            told["prompt_token_ids"] = choice.request.prompt_token_ids if is_first else None
        return told

    def _begin(self, choice: Choice) -> tuple[str, dict[str, list[object]] | None]:
        """Text and log-probabilities in front of the next delta: those of the echoed prompt, once."""
        logprobs: dict[str, list[object]] | None = None
        if self._top is not None:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if choice.index in self._echoed:
            return "", logprobs
        text = self._echo_prompt(choice, logprobs) if self._echo else ""
        self._echoed[choice.index] = len(text)
        return text, logprobs

    def _echo_prompt(self, choice: Choice, logprobs: dict[str, list[object]] | None) -> str:
        """The prompt as the client gave it, or decoded. Special tokens that the text lacks have no width."""
        ids = choice.request.prompt_token_ids
        given = self._texts[choice.index // self._sequences]
        skip = choice.request.sampling.skip_special_tokens if given is None else self._hides_bos(given, ids)
        if logprobs is not None:
            known = choice.prompt_logprobs or (None,) * len(ids)
            detokenizer = self._codec.detokenizer(skip_special=skip, at_start=True)
            offset = 0
            for token_id, logprob in zip(ids, known, strict=True):
                self._append(logprobs, token_id, offset, None if logprob is None else logprob.logprob)
                top = {} if logprob is None else self._top_of(ShownToken(token_id, offset, logprob))
                logprobs["top_logprobs"].append(top or None)
                offset += len(detokenizer.push(token_id))
        return self._text.decode(ids, skip_special=skip) if given is None else given

    def _hides_bos(self, given: str, ids: Sequence[int]) -> bool:
        first = self._codec.token_text(ids[0])
        return ids[0] in self._codec.special_ids and not given.startswith(first)

    def _add(
        self,
        logprobs: dict[str, list[object]] | None,
        choice: Choice,
        tokens: Sequence[ShownToken],
    ) -> None:
        if logprobs is None:
            return
        base = self._echoed[choice.index]
        for token in tokens:
            value = 0.0 if token.logprob is None else token.logprob.logprob
            self._append(logprobs, token.token_id, base + token.offset, value)
            logprobs["top_logprobs"].append(self._top_of(token))

    def _append(
        self, logprobs: dict[str, list[object]], token_id: int, offset: int, value: float | None
    ) -> None:
        logprobs["tokens"].append(self._named(token_id))
        logprobs["token_logprobs"].append(None if value is None else finite(value))
        logprobs["text_offset"].append(offset)

    def _top_of(self, token: ShownToken) -> dict[str, float]:
        """Token text -> log-probability, the chosen token always among them, as OpenAI does it."""
        best: dict[str, float] = {}
        if token.logprob is None:
            return best
        chosen = (token.token_id, finite(token.logprob.logprob))
        for token_id, value in (*alternatives(token.logprob, self._top or 0), chosen):
            name = self._named(token_id)
            best[name] = max(value, best.get(name, value))
        return best

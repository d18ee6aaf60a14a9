"""Fields of a request that both completion routes have."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from ostinato.graph.facts import Task
from ostinato.runtime.http.grammar_schema import GrammarRequest
from ostinato.runtime.http.prompt_schema import Kept
from ostinato.runtime.http.wire import STRICT, TokenId, Whole, optional

MAX_STOPS = 32
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_NAMED_TOKENS = 128  # `logprob_token_ids`

_CONFIG = "generation_config.json"  # the model's; its value is the default


def _token_keys(value: object) -> object:
    """JSON keys are strings; token ids are not."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "too_many", f"at most {MAX_LOGIT_BIAS} tokens can have a bias; got {len(value)}"
        )
    result: dict[object, object] = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 12):
            said = f'keys must be token ids, as in {{"42": -5}}; got {key!r:.40}'
            raise PydanticCustomError("token_key", "{said}", {"said": said})
        if int(key) in result:
            raise PydanticCustomError("token_twice", f"token id {int(key)} is given twice; give it once")
        result[int(key)] = bias
    return result


def _text_or_list(value: object) -> str | None:
    return "#text" if isinstance(value, str) else "#texts" if isinstance(value, list) else None


StopText = Annotated[str, Field(min_length=1, max_length=1024)]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]],
    BeforeValidator(_token_keys),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^[0-9]{1,11}$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]
Stop = Annotated[
    Annotated[StopText, Tag("#text")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("#texts")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_kind",
        custom_error_message="must be a string or a list of strings",
    ),
]


class StreamOptions(BaseModel):
    """`stream_options`."""

    model_config = STRICT

    include_usage: bool | None = optional(
        'one more chunk with `usage` and empty `choices` before `[DONE]`, and `"usage": null` in the others',
        "false",
    )
    continuous_usage_stats: bool | None = optional(
        "every chunk has `usage`: the prompt of its choice and the tokens of that choice so far; needs "
        "`include_usage`",
        "false",
    )
    include_obfuscation: bool | None = optional("only false: nothing is padded", "false")

    @model_validator(mode="after")
    def _fields_agree(self) -> StreamOptions:
        if self.include_obfuscation:
            raise PydanticCustomError(
                "unsupported", "must be false: nothing is padded here", {"at": "include_obfuscation"}
            )
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError(
                "needs_usage", "needs include_usage=true", {"at": "continuous_usage_stats"}
            )
        return self


class SamplingRequest(GrammarRequest):
    """What both completion routes take. Ranges are those of `SamplingParams`; a test compares them."""

    task: ClassVar[Task | None] = "generate"

    max_tokens: Annotated[Whole, Field(ge=1)] | None = optional(
        "1 or more. An upper bound, not a reservation: it is cut to what the window leaves behind the "
        "prompt, and the answer then ends with `length`. A prompt of the whole window or more is refused",
        "what the window leaves",
    )
    min_tokens: Annotated[Whole, Field(ge=0)] | None = optional(
        "no EOS, stop token or stop string before this many tokens; at most `max_tokens`", "0"
    )
    n: Annotated[Whole, Field(ge=1, le=128)] | None = optional(
        "1 to `server.max_n`; prompts times `n` at most 1024. Choice i uses `seed + i`. All choices share "
        "one fate: an error in one ends all",
        "1",
    )
    temperature: float | None = optional(
        "0 to 100; 0 is greedy", f"{_CONFIG}, else 1", ge=0, le=100, allow_inf_nan=False
    )
    top_p: float | None = optional("over 0, to 1", f"{_CONFIG}, else 1", gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[Whole, Field(ge=-1)] | None = optional("-1 and 0: off", f"{_CONFIG}, else off")
    min_p: float | None = optional("0 to 1", f"{_CONFIG}, else 0", ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = optional(
        "0.01 to 100; prompt and answer count", f"{_CONFIG}, else 1", ge=0.01, le=100, allow_inf_nan=False
    )
    presence_penalty: float | None = optional(
        "-2 to 2; the answer counts", "0", ge=-2, le=2, allow_inf_nan=False
    )
    frequency_penalty: float | None = optional(
        "-2 to 2; the answer counts", "0", ge=-2, le=2, allow_inf_nan=False
    )
    logit_bias: LogitBias | None = optional(
        f"token id (as a JSON key) to -100..100; at most {MAX_LOGIT_BIAS}. -100 forbids a token, 100 leaves "
        "only the tokens with 100"
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = optional(
        "no other token is generated, whatever `logit_bias` says; EOS only if it is among them. Refused if "
        "`logit_bias` or `bad_words` leave none of them"
    )
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=256)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = optional(
        f"up to {MAX_BAD_WORDS} strings of 1 to 256 characters. Barred are the tokens that spell one, alone "
        "and behind a space: the last of them where the answer ends with the others. So longer words that "
        "begin with these tokens go too, and the same text spelt by other tokens does not. On a GPU a word "
        "of several tokens costs its request about ten small kernels per step"
    )
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = optional(
        "-2^63 to 2^63 - 1; equal seeds draw equal numbers whatever else is running. Where a batch of "
        "another size rounds logits otherwise, they give another token only where the first two candidates "
        "are as close as that: in float32 once in 10 000 tokens or less",
        "drawn",
    )
    stop: Stop | None = optional(
        f"a string or up to {MAX_STOPS} strings of 1 to 1024 characters. The one whose end comes first stops "
        "the answer, of several that end together the longest. Text that may still become a stop string is "
        "held back, nothing else is"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = optional(
        "up to 256 ids, besides the model's own EOS ids (all of generation_config.json and config.json)"
    )
    include_stop_str_in_output: bool | None = optional(
        "show the stop string or stop token in the text", "false"
    )
    ignore_eos: bool | None = optional("go on after EOS", "false")
    thinking_token_budget: Annotated[Whole, Field(ge=0)] | None = optional(
        "most tokens of thoughts, over all their blocks; then they are ended: see *Thinking budget*. 0: they "
        "end at once. Refused if it is not known how the model marks its thoughts"
    )
    logprob_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_NAMED_TOKENS, fail_fast=True)] | None
    ) = optional(
        f"1 to {MAX_NAMED_TOKENS} ids that take the place of the likeliest alternatives, in this order; an "
        "impossible one has -9999. Needs `logprobs`: true and no `top_logprobs` in chat, 0 in completions"
    )
    prompt_logprobs: Annotated[Whole, Field(ge=0)] | None = optional(
        "0 to `server.max_logprobs`: for each prompt token null (the first) or an object of token id to "
        "`logprob`, `rank` and `decoded_token`, with the token itself and so many of the likeliest. In chat "
        "a field of the answer, in completions of each choice; streamed with the first chunk"
    )
    skip_special_tokens: bool | None = optional("leave special tokens out of the text", "true")
    spaces_between_special_tokens: bool | None = optional(
        "both values give the same text: tokenizers of tokenizer.json put no spaces there", "true"
    )
    add_special_tokens: bool | None = optional(
        "let the tokenizer add BOS. The chat template writes BOS itself. BOS is never doubled",
        "completions true, chat false",
    )
    truncate_prompt_tokens: Kept | None = optional(
        "1 or more: of a longer prompt the last so many tokens are used (BOS goes with the others). -1: as "
        "many as leave room for `max_tokens`, or for one token. The text is tokenised whole, so its length "
        "is bounded by `server.max_body_mib` alone"
    )
    return_tokens_as_token_ids: bool | None = optional(
        "in log-probabilities tokens are named `token_id:15` instead of by their text; `bytes` of chat stay "
        "those of the text",
        "false",
    )
    return_token_ids: bool | None = optional(
        "`token_ids` of each choice, those of the stop and of cut text too, and `prompt_token_ids` (in chat "
        "a field of the answer, in completions of each choice). Streamed: the ids since the chunk before, "
        "those of the prompt in the first chunk",
        "false",
    )
    stream: bool | None = optional("server-sent events", "false")
    stream_options: StreamOptions | None = optional("needs `stream`; its fields are below")
    priority: Annotated[Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = optional(
        "lower runs first, and takes the place of a running one of worse priority, which goes on later where "
        "it was. There is no ageing: while better ones keep the server full, worse ones wait",
        "0",
    )
    request_id: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,128}$")] | None = optional(
        "1 to 128 printable ASCII characters without spaces; the answer's `id` is `chatcmpl-` or `cmpl-` and "
        "this. Refused while a request with it is running. `X-Request-Id` is another thing: it names the "
        "HTTP exchange",
        "drawn",
    )
    cache_salt: Annotated[str, Field(max_length=1024)] | None = optional(
        "prefixes are shared only between requests of equal salt", '""'
    )

    @model_validator(mode="after")
    def _sampling_fields_agree(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("needs_stream", "needs stream=true", {"at": "stream_options"})
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def sequences(self) -> int:
        """Sequences to generate for each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        """A chunk with the usage at the end was asked for."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def repeats_usage(self) -> bool:
        """The usage so far was asked for in each chunk."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

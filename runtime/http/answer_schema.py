"""What the routes answer, for /openapi.json. Answers are written elsewhere; a test holds them to this."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Exact(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Exact):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Exact):
    """The body of every error, at most 1 KB. Anthropic's clients get `type` and `request_id` too."""

    error: ErrorDetail
    type: Literal["error"] = "error"
    request_id: str = ""


class PromptDetails(_Exact):
    """Of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the generated tokens."""

    reasoning_tokens: int = 0


class Usage(_Exact):
    """Tokens of a request. The prompt of n choices counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class PromptLogprob(_Exact):
    """A prompt token or an alternative to it."""

    logprob: float
    rank: int
    decoded_token: str


class NamedLogprob(_Exact):
    """A token, its log-probability and its bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ShownLogprob(NamedLogprob):
    """A token of the answer, and alternatives to it."""

    top_logprobs: list[NamedLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a chat answer."""

    content: list[ShownLogprob] | None
    refusal: None


class CalledFunction(_Exact):
    """`arguments` is JSON text, or what there is of it where the answer was cut."""

    name: str
    arguments: str


class Call(_Exact):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(_Exact):
    """What the model says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(_Exact):
    """One of n answers."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatAnswer(_Exact):
    """The whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(_Exact):
    """Log-probabilities of a text, with those of the echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Exact):
    """One of n answers to one of the prompts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextAnswer(_Exact):
    """The whole answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(BaseModel):
    """The model that is served, for clients of OpenAI's and Anthropic's APIs."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """One model, in a list."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Exact):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class PlainText(_Exact):
    """Answer of /detokenize."""

    prompt: str


class InputTokens(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class ResponseInputTokens(_Exact):
    """Answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class InputUsage(_Exact):
    """Tokens of inputs; nothing is generated."""

    prompt_tokens: int
    total_tokens: int


class Embedding(_Exact):
    """The vector of one input; as text it is base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Exact):
    """Answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class Score(_Exact):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class Scores(_Exact):
    """Answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


class DocumentText(_Exact):
    """A document as it was sent."""

    text: str


class Ranked(_Exact):
    """A document, by its place among those that were sent."""

    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(_Exact):
    """Answer of /v1/rerank, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: InputUsage


class Health(BaseModel):
    """How the engine is."""

    status: Literal["ok", "asleep", "stalled", "dead", "draining"]
    reason: str = ""


class Version(_Exact):
    """Version of ostinato."""

    version: str


class ForgottenBlocks(_Exact):
    """Answer of /admin/reset_prefix_cache."""

    blocks: int


class Aborted(_Exact):
    """Answer of /admin/abort: ids of the answers that ended, and given names that no running request has."""

    aborted: list[str]
    unknown: list[str]


class ProfileLimit(_Exact):
    """Answer of /admin/profile/start: the profile ends by itself after so many seconds."""

    seconds: float


class ProfileTrace(_Exact):
    """Answer of /admin/profile/stop."""

    file: str


class Anything(BaseModel):
    """An object whose fields docs/api.md describes."""

    model_config = ConfigDict(extra="allow")

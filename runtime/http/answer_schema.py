"""What the routes answer, for /openapi.json. Answers are written elsewhere; a test holds them to this."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

_EXACT = ConfigDict(extra="forbid")


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = _EXACT

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of every error, at most 1 KB. Anthropic's clients get `type` and `request_id` too."""

    model_config = _EXACT

    error: ErrorDetail
    type: Literal["error"] = "error"
    request_id: str = ""


class PromptDetails(BaseModel):
    """Of the prompt's tokens."""

    model_config = _EXACT

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Of the generated tokens."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    """Tokens of a request. The prompt of n choices counts once."""

    model_config = _EXACT

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class PromptLogprob(BaseModel):
    """A prompt token or an alternative to it."""

    model_config = _EXACT

    logprob: float
    rank: int
    decoded_token: str


class NamedLogprob(BaseModel):
    """A token, its log-probability and its bytes."""

    model_config = _EXACT

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


class CalledFunction(BaseModel):
    """`arguments` is JSON text, or what there is of it where the answer was cut."""

    model_config = _EXACT

    name: str
    arguments: str


class Call(BaseModel):
    """A call of a tool."""

    model_config = _EXACT

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(BaseModel):
    """What the model says."""

    model_config = _EXACT

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None


class ChatChoice(BaseModel):
    """One of n answers."""

    model_config = _EXACT

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatAnswer(BaseModel):
    """The whole answer of /v1/chat/completions."""

    model_config = _EXACT

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class TextLogprobs(BaseModel):
    """Log-probabilities of a text, with those of the echoed prompt."""

    model_config = _EXACT

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(BaseModel):
    """One of n answers to one of the prompts."""

    model_config = _EXACT

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TextAnswer(BaseModel):
    """The whole answer of /v1/completions."""

    model_config = _EXACT

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


class Tokens(BaseModel):
    """Answer of /tokenize."""

    model_config = _EXACT

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class PlainText(BaseModel):
    """Answer of /detokenize."""

    model_config = _EXACT

    prompt: str


class InputTokens(BaseModel):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class InputUsage(BaseModel):
    """Tokens of inputs; nothing is generated."""

    model_config = _EXACT

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The vector of one input; as text it is base64 of little-endian float32."""

    model_config = _EXACT

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    """Answer of /v1/embeddings."""

    model_config = _EXACT

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class Score(BaseModel):
    """The score of one pair."""

    model_config = _EXACT

    object: Literal["score"]
    index: int
    score: float


class Scores(BaseModel):
    """Answer of /v1/score."""

    model_config = _EXACT

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


class DocumentText(BaseModel):
    """A document as it was sent."""

    model_config = _EXACT

    text: str


class Ranked(BaseModel):
    """A document, by its place among those that were sent."""

    model_config = _EXACT

    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(BaseModel):
    """Answer of /v1/rerank, best first."""

    model_config = _EXACT

    id: str
    model: str
    results: list[Ranked]
    usage: InputUsage


class Health(BaseModel):
    """How the engine is."""

    status: Literal["ok", "asleep", "stalled", "dead", "draining"]
    reason: str = ""


class Version(BaseModel):
    """Version of ostinato."""

    model_config = _EXACT

    version: str


class ForgottenBlocks(BaseModel):
    """Answer of /admin/reset_prefix_cache."""

    model_config = _EXACT

    blocks: int


class Aborted(BaseModel):
    """Answer of /admin/abort: ids of the answers that ended, and given names that no running request has."""

    model_config = _EXACT

    aborted: list[str]
    unknown: list[str]


class ProfileLimit(BaseModel):
    """Answer of /admin/profile/start: the profile ends by itself after so many seconds."""

    model_config = _EXACT

    seconds: float


class ProfileTrace(BaseModel):
    """Answer of /admin/profile/stop."""

    model_config = _EXACT

    file: str


class Anything(BaseModel):
    """An object whose fields docs/api.md describes."""

    model_config = ConfigDict(extra="allow")

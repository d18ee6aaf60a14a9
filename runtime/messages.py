"""The typed boundary between front ends (server, Python) and the engine. No torch here.

Everything that crosses is one of these, as JSON, and is not changed after it is made; nothing is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, Field

from ostinato.graph.facts import PoolingFacts
from ostinato.section import Section

FinishReason = Literal["stop", "length", "abort", "error"]


class ThoughtBlock(Section):
    """How thoughts begin, and the tokens with which they are ended when their budget is spent."""

    start: str = Field(min_length=1)
    closing: tuple[int, ...] = Field(min_length=1)
    mark: int = Field(0, ge=0, description="so many tokens of `closing` are words in front of the end mark")


class Thoughts(Section):
    """A budget for thinking; runtime/thinking/thought_marks.py makes it, thinking_state.py has its rules."""

    budget: int = Field(ge=0, description="tokens of all thoughts of an answer, without their marks")
    blocks: tuple[ThoughtBlock, ...] = Field(min_length=1)
    ends: tuple[str, ...] = Field(min_length=1, description="any of these ends thoughts")
    anywhere: bool = Field(False, description="thoughts begin behind other text, too")
    begun: int | None = Field(None, ge=0, description="the block that the prompt has begun")


class SamplingParams(Section):
    """How tokens are drawn. Field meanings follow OpenAI and vLLM; each range is checked here, once."""

    max_tokens: int | None = Field(None, ge=1, description="most tokens to generate; None: up to the window")
    min_tokens: int = Field(0, ge=0, description="no EOS or stop before this many tokens")
    temperature: float = Field(1.0, ge=0, le=100, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=-1, description="0 and -1: off")
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100, allow_inf_nan=False)
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[int, float] = Field(default_factory=dict, description="token id -> bias, -100 to 100")
    allowed_token_ids: tuple[int, ...] | None = Field(
        None, min_length=1, description="no token but these, whatever the bias says"
    )
    bad_words: tuple[str, ...] = Field(
        (), description="words that are not generated; the front end turns them into `bad_word_ids`"
    )
    bad_word_ids: tuple[tuple[int, ...], ...] = Field(
        (), description="the last token of each is barred where the answer ends with those before it"
    )
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="None: drawn by the engine, per request")
    stop: tuple[str, ...] = Field(
        (), description="stop strings; handled where text is known, in the front end"
    )
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = Field(None, ge=0, description="alternatives per token; 0: only the chosen one")
    logprob_token_ids: tuple[int, ...] = Field(
        (), description="with logprobs=0: the alternatives are exactly these tokens, in this order"
    )
    prompt_logprobs: int | None = Field(None, ge=0, description="as `logprobs`, for prompt tokens")
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = Field(  # Any: JSON of the user's
        None, description="shape of the answer, as in OpenAI's API; see docs/api.md for all of these"
    )
    json_schema: dict[str, Any] | bool | None = Field(None, description="JSON schema of the whole answer")
    regex: str | None = Field(None, description="regular expression that the whole answer matches")
    choice: tuple[str, ...] | None = Field(None, description="the answer is one of these")
    grammar: str | None = Field(None, description="grammar of the answer, in Lark or GBNF")
    structural_tag: dict[str, Any] | None = Field(None, description="free text with tags of a given inside")
    grammar_param: str = Field("", description="what a front end calls the one of these that is given")
    grammar_after: tuple[int, ...] = Field(
        (), description="tokens that end a free part, such as a thought; the grammar holds behind them"
    )
    grammar_unless: tuple[int, ...] = Field(
        (), description="with grammar_after: there is a free part only if the answer begins with one of these"
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, description="most tokens of thoughts; the front end turns it into `thoughts`"
    )
    thoughts: Thoughts | None = Field(None, description="the budget, and how this model marks its thoughts")


class GenerateRequest(Section):
    """One sequence to generate. `n` > 1 becomes n of these, with ids `parent-0`, `parent-1`, ..."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = Field(0, description="lower runs first, as in vLLM")
    cache_salt: str = ""


class PoolRequest(Section):
    """One input to embed, or a pair of texts to score. It is answered by one `PoolResult`, or `Refused`."""

    request_id: str
    token_ids: tuple[int, ...]
    token_types: tuple[int, ...] = Field((), description="0 or 1 for each token; empty: all 0")
    dimensions: int | None = Field(None, description="embed: keep so many numbers; None: all")
    normalize: bool | None = Field(None, description="embed: make the length 1; None: as the model does")
    sigmoid: bool | None = Field(None, description="score: squeeze into 0 to 1; None: as the model does")
    priority: int = Field(0, description="lower runs first, as in vLLM")


class PoolResult(Section):
    """The numbers of one input: little-endian float32 in base64. With `error` there are none."""

    request_id: str
    numbers: str = ""
    error: str = ""
    aborted: bool = Field(False, description="by an operator; `error` says so")
    queued_s: float = 0.0


class PoolResults(Section):
    """All results of one step."""

    results: tuple[PoolResult, ...]


class TokenLogprob(Section):
    """Log-probability of one emitted (or prompt) token and of its alternatives, best first."""

    token_id: int
    logprob: float
    rank: int = Field(description="1 is the most likely token")
    top: tuple[tuple[int, float], ...] = ()


class OwnFault(str):
    """Why an answer ended with an error, where the request asked for what cannot be: the engine is well."""

    __slots__ = ()


@dataclass(slots=True)
class TokenEvent:
    """News about one request. `finish_reason` is set on the last event and only there.

    No `Section`, since one is made per token: that takes 0.2 us, a model 3 us. Frames check it all the same.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop token that ended it; it is the last of token_ids
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache; on the first event
    error: str | None = None
    queued_s: float = 0.0  # from the engine's inbox to the first step with it; on the first event
    refused: bool = False  # `error` is an `OwnFault`


class Refused(Section):
    """A request that never ran; the client raises the named class of errors.py. Nothing follows it."""

    request_id: str
    error: Literal["InvalidRequest", "ContextTooLong", "Overloaded", "WrongTask"]
    message: str
    param: str | None = None


class EngineStats(Section):
    """A snapshot, sent after steps (at most every 100 ms while busy) and when the engine turns idle."""

    steps: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    blocks_used: int = 0
    blocks_cached: int = 0  # unreferenced, content kept for the prefix cache
    blocks_committed: int = 0
    blocks_capacity: int = 0
    kv_bytes_committed: int = 0
    graph_replays: int = 0  # steps that were a captured CUDA graph
    eager_steps: dict[str, int] = Field(default_factory=dict)  # steps of a GPU without one, by reason
    asleep: int = 0  # level of sleep; 0: awake


class EngineInfo(Section):
    """What a front end must know about the loaded model; sent once, when the engine is ready."""

    model: str
    vocab_size: int
    max_model_len: int
    block_tokens: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    dtype: str
    artifact: str  # folder; holds tokenizer/
    pooling: PoolingFacts | None = None  # None: it generates
    load_seconds: float = 0.0


class Abort(Section):
    """Cancel requests. Unknown and finished ids are fine; each live one ends with finish_reason `abort`."""

    request_ids: tuple[str, ...]


class KVTarget(Section):
    """Have at most so many bytes of KV memory from now on; None: what the settings allow."""

    call_id: int
    target_bytes: int | None = Field(None, ge=0)


class Sleep(Section):
    """Give memory back until `Wake`. Running requests are preempted, new ones wait in the queue."""

    call_id: int
    level: int = Field(ge=1, le=2, description="1: weights are kept in host memory; 2: they are read again")


class Wake(Section):
    """Have the memory again, with the weights that were there before, and an empty prefix cache."""

    call_id: int


class ResetPrefixCache(Section):
    """Let no request find a prefix that was computed before."""

    call_id: int


class EndRequests(Section):
    """As `Abort`, and answered when the blocks are back. None: all that wait or run."""

    call_id: int
    request_ids: tuple[str, ...] | None = None


class StartProfile(Section):
    """Record what the engine's process does, for so many seconds at most; None: as many as are allowed."""

    call_id: int
    seconds: float | None = None


class StopProfile(Section):
    """End the profile that runs, and write it."""

    call_id: int


# Each is answered by one `CallDone`.
Call = KVTarget | Sleep | Wake | ResetPrefixCache | EndRequests | StartProfile | StopProfile
Order = GenerateRequest | PoolRequest | Abort | Call  # all that a front end says to a running engine


class EngineState(Section):
    """What the memory of an engine is used for, after a call."""

    asleep: int = Field(0, description="level of sleep; 0: awake")
    kv_bytes: int = Field(0, description="KV memory that is really held")
    kv_target_bytes: int | None = Field(None, description="most that it may become; None: see settings")
    weights_bytes: int = Field(0, description="weights on the device (on a CPU: mapped)")
    seconds: float = Field(0.0, description="what the call took")


class CallDone(Section):
    """The answer to a call: the state after it, or why it changed nothing."""

    call_id: int
    state: EngineState | None = None
    count: int = 0  # blocks that were forgotten, requests that were ended
    trace: str = ""  # file of a profile
    limit_s: float = 0.0  # when a profile ends by itself
    error: str = ""
    kind: str = ""  # class of errors.py that the caller raises
    param: str | None = None  # of a RequestError


class Fatal(Section):
    """The engine cannot go on; `error` says why. Sent as the last message."""

    error: str
    kind: str = "EngineDead"  # class of errors.py that `start` raises

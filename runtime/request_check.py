"""The rules that a request must meet before it may run, given the loaded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ostinato.errors import ContextTooLong, InvalidRequest, Overloaded, RequestError, WrongTask
from ostinato.graph.facts import Task
from ostinato.runtime.messages import EngineInfo, GenerateRequest, Refused
from ostinato.runtime.prompt_room import room_left
from ostinato.runtime.sampling.sampling_check import validate_sampling


def check_request(request: GenerateRequest, info: EngineInfo) -> None:
    """Raise InvalidRequest, ContextTooLong or WrongTask for what this model cannot run.

    `max_tokens` past the window is no error: it is an upper bound, and the answer ends with `length`.
    """
    check_task("generate", info)
    prompt = request.prompt_token_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")
    room_left(len(prompt), info.max_model_len, param="prompt")
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        wrong = next(token_id for token_id in prompt if not 0 <= token_id < info.vocab_size)
        raise InvalidRequest(
            f"the prompt holds token id {wrong}: ids are from 0 to {info.vocab_size - 1}", param="prompt"
        )
    validate_sampling(request.sampling, info.vocab_size)
    if request.sampling.thinking_token_budget is not None and request.sampling.thoughts is None:
        raise InvalidRequest(
            "thinking_token_budget: an engine knows no marks of thoughts; give thoughts",
            param="thinking_token_budget",
        )


ROUTES: Mapping[Task, str] = {  # what a front end over HTTP does it with
    "generate": "/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages",
    "embed": "/v1/embeddings, /v1/score and /v1/rerank",
    "score": "/v1/score and /v1/rerank",
}
METHODS: Mapping[Task, str] = {  # what Python does it with
    "generate": "LLM.generate, LLM.chat and LLM.stream",
    "embed": "LLM.embed and LLM.score",
    "score": "LLM.score",
}


def task_of(info: EngineInfo) -> Task:
    """What the model is for."""
    return "generate" if info.pooling is None else info.pooling.task


def check_task(task: Task, info: EngineInfo, means: Mapping[Task, str] = ROUTES) -> None:
    """Raise WrongTask for what the model cannot do. Vectors give scores too, by their angle."""
    able = task_of(info)
    if task != able and (task, able) != ("score", "embed"):
        raise wrong_task(task, info, means)


def wrong_task(task: Task, info: EngineInfo, means: Mapping[Task, str] = ROUTES) -> WrongTask:
    """The refusal, which says what the model can do, and by which of `means` to ask for it."""
    able = task_of(info)
    return WrongTask(
        f"{info.model} cannot {task}: it is a model to {able} with, for {means[able]}", param="model"
    )


def name_in_use(name: str) -> InvalidRequest:
    """For a request that would be taken for another one."""
    return InvalidRequest(f"request_id {name!r} is in use: give each request its own", param="request_id")


def refusal_of(request_id: str, error: RequestError) -> Refused:
    """What a client is told of a request that never ran."""
    kind: Literal["InvalidRequest", "ContextTooLong", "Overloaded", "WrongTask"] = "InvalidRequest"
    if isinstance(error, ContextTooLong):
        kind = "ContextTooLong"
    elif isinstance(error, Overloaded):
        kind = "Overloaded"
    elif isinstance(error, WrongTask):
        kind = "WrongTask"
    return Refused(request_id=request_id, error=kind, message=str(error), param=error.param)

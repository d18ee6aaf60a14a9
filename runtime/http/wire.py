"""What all request schemas are made of: strict types, and the fields that no schema has.

Rules for every field (docs/api.md): a type is never guessed (`"2"` and `true` are no integers; `2.0` is one,
as in JSON Schema), `null` means "not given", an unknown field is refused by name.  OpenAI and vLLM fields
that change nothing here are in `IGNORED`; those that would change the answer are in `UNSUPPORTED`, each with
the values that ask for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ostinato.graph.facts import Task
from ostinato.runtime.http.known_fields import keep_known

STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "session_id",
    }
)
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "early_stopping": (False,),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto",),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_interval": (1,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation_side": ("left",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}


def _whole(value: object) -> object:
    """JSON does not tell 2 from 2.0, so neither do we; the strict check follows."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


def optional(rule: str, default: str = "none", **limits: Any) -> Any:  # Any: as pydantic's Field
    """A field that may be left out. `rule` and `default` are what docs/api.md says of it."""
    return Field(None, description=rule, json_schema_extra={"x-default": default}, **limits)


def required(rule: str, **limits: Any) -> Any:  # Any: as pydantic's Field
    """A field that must be there."""
    return Field(description=rule, json_schema_extra={"x-default": "required"}, **limits)


class Wire(BaseModel):
    """One request body."""

    model_config = STRICT

    ignored: ClassVar[frozenset[str]] = IGNORED
    unsupported: ClassVar[dict[str, tuple[object, ...]]] = UNSUPPORTED
    task: ClassVar[Task | None] = None  # what the model must be able to do

    model: str | None = optional("the served name; anything else is 404", "the served model")

    @model_validator(mode="before")
    @classmethod
    def _known_elsewhere(cls, fields: Any) -> Any:  # Any: what pydantic hands to every "before" validator
        """Drop what asks for nothing, refuse by name what we cannot do."""
        return keep_known(fields, known=cls.model_fields, ignored=cls.ignored, unsupported=cls.unsupported)

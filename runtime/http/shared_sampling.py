"""Fields that the Responses and Messages APIs take besides their own: those of chat, by the same names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from ostinato.graph.facts import Task
from ostinato.runtime.http.sampling_schema import LogitBias
from ostinato.runtime.http.wire import TokenId, Whole, Wire, optional

_CHAT = "as in /v1/chat/completions"
_CONFIG = "generation_config.json"  # the model's; its value is the default


class TemplateFields(Wire):
    """For the chat template."""

    chat_template_kwargs: dict[str, Any] | None = optional(_CHAT)  # Any: the template's own business


class SharedSampling(TemplateFields):
    """How tokens are drawn."""

    task: ClassVar[Task | None] = "generate"

    temperature: float | None = optional(
        "0 to 100; 0 is greedy", f"{_CONFIG}, else 1", ge=0, le=100, allow_inf_nan=False
    )
    top_p: float | None = optional("over 0, to 1", f"{_CONFIG}, else 1", gt=0, le=1, allow_inf_nan=False)
    top_k: Annotated[Whole, Field(ge=-1)] | None = optional(_CHAT, f"{_CONFIG}, else off")
    min_p: float | None = optional(_CHAT, f"{_CONFIG}, else 0", ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = optional(
        _CHAT, f"{_CONFIG}, else 1", ge=0.01, le=100, allow_inf_nan=False
    )
    presence_penalty: float | None = optional(_CHAT, "0", ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = optional(_CHAT, "0", ge=-2, le=2, allow_inf_nan=False)
    logit_bias: LogitBias | None = optional(_CHAT)
    seed: Annotated[Whole, Field(ge=-(2**63), le=2**63 - 1)] | None = optional(_CHAT, "drawn")
    min_tokens: Annotated[Whole, Field(ge=0)] | None = optional(_CHAT, "0")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, fail_fast=True)] | None = optional(_CHAT)
    ignore_eos: bool | None = optional(_CHAT, "false")
    priority: Annotated[Whole, Field(ge=-(2**31), le=2**31 - 1)] | None = optional(_CHAT, "0")
    cache_salt: Annotated[str, Field(max_length=1024)] | None = optional(_CHAT, '""')

    def shared(self) -> dict[str, object]:
        """These fields as values of a chat request."""
        values: dict[str, object] = {name: getattr(self, name) for name in SharedSampling.model_fields}
        del values["model"]
        if self.logit_bias is not None:
            values["logit_bias"] = {str(key): bias for key, bias in self.logit_bias.items()}
        return values

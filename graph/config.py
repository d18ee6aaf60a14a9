"""Settings of tracing, and of what a compile measures."""

from typing import Literal

from pydantic import Field

from ostinato.section import Section


class GraphConfig(Section):
    """How a model is read and traced."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number type of weights and activations; auto: the checkpoint's own"
    )
    target: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device to compile for; auto: a GPU where torch finds one"
    )
    task: Literal["auto", "generate", "embed", "score"] = Field(
        "auto", description="what the model is for; auto: by modules.json and the architecture in its config"
    )
    pooling: Literal["auto", "mean", "last", "cls"] = Field(
        "auto", description="embed: which hidden states make the vector; auto: as the model folder says"
    )
    tune_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        allow_inf_nan=False,
        description="seconds for measuring linear layers that the GPU's table lacks; which kernels attend "
        "fastest is measured besides; 0: neither is",
    )

"""Which requests a run has: the settings that all data sets read."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from ostinato.section import Section

Dataset = Literal["random", "sonnet", "prefix_repetition", "multi_turn", "rerank", "sharegpt", "custom", "hf"]


class DataSettings(Section):
    """What is sent. Lengths are tokens with --tokenizer, words without."""

    dataset: Dataset = Field("random", description="where the prompts come from; see docs/bench.md")
    dataset_path: str = Field("", description="file that sharegpt, custom and hf are read from")
    tokenizer: str = Field("", description="tokenizer.json, or a folder with one: lengths become exact")
    num_prompts: int = Field(100, ge=1, description="requests of a run; conversations with multi_turn")
    input_len: int = Field(256, ge=1, description="length of a prompt (of a turn with multi_turn)")
    output_len: int = Field(128, ge=0, description="max_tokens; 0: as the file says, or the server's default")
    range_ratio: float = Field(0.0, ge=0, lt=1, description="r: lengths are (1-r) to (1+r) times the given")
    prefix_len: int = Field(0, ge=0, description="length of a beginning that all prompts share, in addition")
    hit_fraction: float = Field(
        0.0, ge=0, le=1, description="share of each random prompt that is the same in all of them"
    )
    num_prefixes: int = Field(10, ge=1, description="prefix_repetition: different prefixes")
    turns: int = Field(4, ge=1, description="multi_turn: turns of a conversation")
    global_prefix_ratio: float = Field(
        0.0, ge=0, le=1, description="multi_turn: share of a turn's length that all conversations begin with"
    )
    conversation_prefix_ratio: float = Field(
        0.0, ge=0, le=1, description="multi_turn: share that a conversation begins with, different in each"
    )
    turn_delay_s: float = Field(0.0, ge=0, description="multi_turn: mean pause before the next turn")
    turn_delay: Literal["fixed", "exponential"] = Field("fixed", description="multi_turn: kind of pauses")
    documents: int = Field(8, ge=1, description="rerank: documents of a query")
    batch_size: int = Field(1, ge=1, description="embeddings: inputs of a request")
    prompt_column: str = Field("prompt", description="hf: column of the prompts")
    output_column: str = Field("", description="hf: column of answers, whose length becomes max_tokens")
    seed: int = Field(0, ge=0, description="same seed, same requests at the same times")


class Draw(NamedTuple):
    """Random numbers of one call of `make_items`: its own, and those of texts that all calls share."""

    own: np.random.Generator
    shared: np.random.Generator

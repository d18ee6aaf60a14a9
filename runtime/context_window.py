"""How long a sequence may be: what is asked for, what the model can do, what KV memory can hold."""

from __future__ import annotations

import logging

from ostinato.errors import ConfigError
from ostinato.graph.facts import ModelFacts
from ostinato.runtime.config import EngineConfig

log = logging.getLogger(__name__)


def context_window(facts: ModelFacts, config: EngineConfig, kv_tokens: int) -> int:
    """Context window in tokens: the setting or the model's own, at most what KV memory can hold.

    Raises ConfigError: the setting is more than one of the two.
    """
    asked = config.max_model_len
    if asked > facts.max_model_len:
        raise ConfigError(
            f"max_model_len={asked}: the model's window is {facts.max_model_len} tokens; lower it, or use 0"
        )
    if asked > kv_tokens:
        raise ConfigError(
            f"max_model_len={asked}: KV memory holds at most {kv_tokens} tokens; lower it or raise kv.max_gib"
        )
    window = asked or facts.max_model_len
    if window > kv_tokens:
        log.warning(
            "context window: %d tokens instead of %d, for KV memory holds no more; raise kv.max_gib",
            kv_tokens,
            window,
        )
    return min(window, kv_tokens)

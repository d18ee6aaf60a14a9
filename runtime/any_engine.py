"""The engine for a model: one that generates, or one for whole inputs."""

from __future__ import annotations

from typing import cast

from ostinato.runtime.config import EngineConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.inbox import Inbox
from ostinato.runtime.pooling.pool_engine import PoolEngine, PoolModel
from ostinato.runtime.runner import Model


def make_engine(model: Model, config: EngineConfig, *, inbox: Inbox) -> Engine | PoolEngine:
    """Raises ConfigError: settings and model disagree, or there is no memory."""
    if model.facts.pooling is not None:
        return PoolEngine(cast(PoolModel, model), config, inbox=inbox)  # its program takes other inputs
    return Engine(model, config, inbox=inbox)

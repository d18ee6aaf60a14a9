"""A model that embeds or scores, traced from its folder and run by the graph's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ostinato.graph.build import build_model
from ostinato.graph.capture import CapturedGraph
from ostinato.graph.config import GraphConfig
from ostinato.graph.pool_capture import capture_pooling
from ostinato.graph.pool_hooks import PoolHooks
from ostinato.graph.pooling import pooling_plan
from ostinato.graph.source import load_config, open_source
from ostinato.graph.weights import weight_exprs
from ostinato.ops.weight_expr import evaluate
from ostinato.runtime.artifact import Proof
from ostinato.runtime.pooling.pool_inputs import pool_inputs
from ostinato.runtime.pooling.pool_proof import prove_pooling
from ostinato.runtime.proof import interpret
from tests.support.tiny_encoders import VOCAB


class Captured:
    """A model folder, traced; `run` interprets the graph."""

    def __init__(self, folder: Path, graph: GraphConfig) -> None:
        source = open_source(folder)
        plan = pooling_plan(source, graph)
        assert plan is not None
        hooks = PoolHooks()
        built = build_model(load_config(source), torch.float32, hooks, task=plan.task)
        self._exprs = weight_exprs(built.params, built.tied, source, built.config, model=built.model)
        self._source = source
        text = built.config.get_text_config()
        facts: dict[str, Any] = {
            "architecture": type(built.model).__name__, "model_type": built.config.model_type,
            "dtype": "float32", "hidden_size": text.hidden_size,
            "max_model_len": text.max_position_embeddings,
        }  # fmt: skip
        self.graph: CapturedGraph = capture_pooling(built, hooks, facts, plan)
        assert self.graph.facts.pooling is not None
        self.pooling = self.graph.facts.pooling

    def weight(self, node: fx.Node) -> Tensor:
        name = node.meta["weight"][1]
        if name in self.graph.constants:
            return self.graph.constants[name]
        return evaluate(self._exprs[name], self._source.read)

    def run(self, sequences: list[list[int]], types: list[list[int]]) -> Tensor:
        inputs = pool_inputs(sequences, types, self.pooling.pooling)
        return interpret(self.graph.graph_module, self.weight, inputs, (), None)

    def prove(self, spoil: Callable[[Tensor], Tensor] = lambda results: results) -> Proof:
        """As a compile does it, with the graph itself as the program; `spoil` changes its results."""
        graph = self.graph.graph_module
        return prove_pooling(
            graph, self.weight, lambda inputs, kv: spoil(interpret(graph, self.weight, inputs, kv, None)),
            self.pooling, alone=self.graph.alone, dtype=torch.float32, vocab_size=VOCAB,
            longest=self.graph.facts.max_model_len,
        )  # fmt: skip

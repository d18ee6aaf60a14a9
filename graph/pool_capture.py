"""Trace a model that gives one vector per sequence: sequences whole and flat, no cache, pooling in the graph.

The head of a classifier is transformers' own. It reads a row of a padded batch, so behind the layers that mix
tokens the flat step [1, T, D] becomes one row for each sequence, [B, 1, D], and what follows is unchanged.
That the head reads no more than this row is proved: the model is also traced as it is, for one sequence.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.modeling_layers import GenericForSequenceClassification

from ostinato.errors import EngineError, ModelError
from ostinato.graph.build import BuiltModel
from ostinato.graph.capture import MAX_STEP_TOKENS, CapturedGraph, export, name_weights
from ostinato.graph.facts import ModelFacts, PoolingFacts, PoolingMode
from ostinato.graph.pool_hooks import PoolHooks, PoolMask
from ostinato.graph.pooling import PoolingPlan, dense_layers
from ostinato.ops.step_inputs import PoolInputs

log = logging.getLogger(__name__)

MAX_SEQUENCES = 4096


class _PoolStep(nn.Module):
    """The calling convention of a step around a transformers model; gives [B, size] in float32."""

    def __init__(self, model: nn.Module, hooks: PoolHooks, plan: PoolingPlan, dense: nn.Sequential) -> None:
        super().__init__()
        self.model, self.dense = model, dense
        self._hooks, self._task = hooks, plan.task
        self.pooling: PoolingMode = plan.pooling or "cls"
        self.is_alone = False  # one sequence: the model as it is
        self._known = inspect.signature(model.forward).parameters
        self.first_position = _first_position(model)

    def forward(
        self, token_ids: Tensor, positions: Tensor, token_types: Tensor, query_start: Tensor, rows: Tensor
    ) -> Tensor:
        self._hooks.begin_pooling(query_start, token_ids)
        if "position_ids" not in self._known:
            raise ModelError(f"{type(self.model).__name__}: takes no positions, so it cannot run flat steps")
        at = positions + self.first_position if self.first_position else positions
        arguments: dict[str, Any] = {"input_ids": token_ids[None], "position_ids": at[None]}
        if "token_type_ids" in self._known:
            arguments["token_type_ids"] = token_types[None]
        if "use_cache" in self._known:
            arguments["use_cache"] = False
        if self._task == "score":
            return self._score(arguments, query_start, rows).float()
        # ones: without a mask transformers looks for packed sequences in the positions
        hidden = self.model(**arguments, attention_mask=torch.ones_like(token_ids)[None])[0][0]
        pooled = self._pool(hidden, query_start, rows)
        if len(self.dense):
            pooled = self.dense(pooled.to(hidden.dtype))
        return pooled.float()

    def _pool(self, hidden_TD: Tensor, query_start: Tensor, rows: Tensor) -> Tensor:
        if self.pooling == "mean":
            pooled: Tensor = torch.ops.ostinato.mean_rows(hidden_TD, query_start)
            return pooled
        return hidden_TD[rows]

    def _score(self, arguments: dict[str, Any], query_start: Tensor, rows: Tensor) -> Tensor:
        """Scores [B, labels] of the model's own head."""
        model: Any = self.model
        ones = torch.ones_like(arguments["input_ids"])
        if self.is_alone:
            whole: Tensor = model(**arguments, attention_mask=ones)[0]
            return whole
        if isinstance(model, GenericForSequenceClassification):
            hidden = model.base_model(**arguments, attention_mask=ones)[0][0]
            scores: Tensor = model.score(hidden[rows])
            return scores

        def one_row_each(module: nn.Module, args: Any, output: Any) -> Any:
            hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
            pooled = self._pool(hidden[0], query_start, rows)[:, None].to(hidden.dtype)
            if isinstance(output, tuple):
                return (pooled, *output[1:])
            return type(output)(last_hidden_state=pooled)

        layers = _mixing_layers(model)
        handle = layers.register_forward_hook(one_row_each)
        try:
            made: Tensor = model(**arguments)[0]
        finally:
            handle.remove()
        return made


def _mixing_layers(model: Any) -> nn.Module:
    """The part of a classifier behind which no token sees another one."""
    base = model.base_model
    for name in ("encoder", "transformer"):
        if isinstance(found := getattr(base, name, None), nn.Module):
            return found
    if base is model or getattr(base, "pooler", None) is not None:
        raise ModelError(f"{type(model).__name__}: where its head begins is not known; it cannot be served")
    found = base
    assert isinstance(found, nn.Module)
    return found


def _first_position(model: Any) -> int:
    """Position of a sequence's first token: RoBERTa's tables begin behind the row of the padding token."""
    embeddings = getattr(model.base_model, "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else int(padding) + 1


def sample_inputs() -> PoolInputs:
    """Valid inputs of a small step, for tracing."""
    return PoolInputs(
        token_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.tensor([0, 1, 2, 3, 0, 1, 2]),
        token_types=torch.zeros(7, dtype=torch.int64),
        query_start=torch.tensor([0, 4, 7], dtype=torch.int32),
        rows=torch.tensor([0, 4]),
    )


def capture_pooling(
    built: BuiltModel, hooks: PoolHooks, facts: dict[str, Any], plan: PoolingPlan
) -> CapturedGraph:
    """Trace `built`; `facts` as in `capture`. Raises ModelError for math that cannot be carried."""
    labels = built.config.num_labels
    if plan.task == "score" and labels != 1:
        raise ModelError(
            f"{facts['architecture']}: {labels} labels; a model that scores pairs has one (num_labels=1)"
        )
    sigmoid = plan.task == "score" and _has_sigmoid(built.config)
    dtype = getattr(torch, facts["dtype"])
    dense = dense_layers(plan, dtype)
    step = _PoolStep(built.model, hooks, plan, dense)
    step.eval().requires_grad_(False)
    inputs = sample_inputs()
    with hooks.registered(), torch.no_grad():
        with built.fake_mode:  # dry run: is it causal?
            _dry_run(step, hooks, [built.fake_mode.from_tensor(t, static_shapes=True) for t in inputs])
        causal = _is_causal(built, hooks)
        step.pooling = _pooling(built, plan, causal)
        # Scores with a bias tell T = 1 apart, where one size stands for all; the proof runs such a step.
        tokens = Dim("T", min=2 if hooks.makes_masks else 1, max=MAX_STEP_TOKENS)
        exported = export(step, tuple(inputs), _dynamic_shapes(tokens))
        alone = _export_alone(step, tokens) if plan.task == "score" else None
    graph_module = exported.graph_module
    (answer,) = graph_module.graph.output_node().args[0]
    size = int(answer.meta["val"].shape[-1])
    text = built.config.get_text_config()
    longest = min(facts["max_model_len"] - step.first_position, MAX_STEP_TOKENS)
    known = inspect.signature(built.model.forward).parameters
    types = int(getattr(text, "type_vocab_size", 0) or 0) if "token_type_ids" in known else 0
    pooling = PoolingFacts(
        task=plan.task,
        pooling=step.pooling,
        size=size,
        normalize=plan.normalize,
        matryoshka=plan.matryoshka,
        sigmoid=sigmoid,
        causal=causal,
        first_position=step.first_position,
        token_types=types,
    )
    model_facts = ModelFacts(
        **{**facts, "max_model_len": min(longest, plan.max_tokens or longest)},
        vocab_size=int(built.model.get_input_embeddings().num_embeddings),  # type: ignore[operator]  # transformers' own
        kv_layers=(),
        attention=tuple(hooks.attention),
        pooling=pooling,
    )
    constants = {f"dense.{name}": value.detach() for name, value in dense.named_parameters()}
    named = name_weights(exported, graph_module, built._replace(constants=built.constants | constants))
    if alone is None:
        return CapturedGraph(graph_module, model_facts, named)
    named |= name_weights(alone, alone.graph_module, built)
    return CapturedGraph(graph_module, model_facts, named, alone.graph_module)


def _dry_run(step: _PoolStep, hooks: PoolHooks, inputs: list[Tensor]) -> None:
    """Find out what attention there is; one of its own code stumbles over our stand-in for a mask."""
    try:
        try:
            step(*inputs)
        except TypeError as error:
            if PoolMask.__name__ not in str(error):
                raise
            hooks.makes_masks = True
            step(*inputs)
    except EngineError:
        raise
    except Exception as error:  # border: a model of another kind fails in any way, deep in transformers
        raise ModelError(
            f"{type(step.model).__name__}: cannot run whole sequences one after another "
            f"({type(error).__name__}: {str(error)[:300]}); models can whose attention or mask goes through "
            "transformers' interfaces"
        ) from error


def _export_alone(step: _PoolStep, tokens: Any) -> torch.export.ExportedProgram:
    """The model on one sequence, without our hook in front of its head."""
    inputs = PoolInputs(
        token_ids=torch.zeros(7, dtype=torch.int64),
        positions=torch.arange(7),
        token_types=torch.zeros(7, dtype=torch.int64),
        query_start=torch.tensor([0, 7], dtype=torch.int32),
        rows=torch.tensor([0]),
    )
    shapes: dict[str, Any] = {name: {0: tokens} for name in ("token_ids", "positions", "token_types")}
    step.is_alone = True
    return export(step, tuple(inputs), shapes | {"query_start": None, "rows": None})


def _is_causal(built: BuiltModel, hooks: PoolHooks) -> bool:
    """Of all layers alike. Layers whose attention was not seen would mix sequences."""
    if hooks.masks and not hooks.attention:
        return False
    layers = built.config.get_text_config().num_hidden_layers
    if len(hooks.attention) != layers:
        raise ModelError(
            f"{type(built.model).__name__}: {len(hooks.attention)} of its {layers} layers use transformers' "
            "attention interface; the others cannot be carried"
        )
    kinds = {fact.causal for fact in hooks.attention}
    return kinds == {True}


def _pooling(built: BuiltModel, plan: PoolingPlan, causal: bool) -> PoolingMode:
    if plan.task == "score":
        if isinstance(built.model, GenericForSequenceClassification):
            return "last"
        return "mean" if getattr(built.config, "classifier_pooling", None) == "mean" else "cls"
    if plan.pooling is not None:
        return plan.pooling
    chosen: Literal["mean", "last"] = "last" if causal else "mean"
    log.warning(
        "the model folder does not say how its vectors are made (no modules.json): pooling %s, length 1; "
        "set graph.pooling if that is wrong",
        chosen,
    )
    return chosen


def _has_sigmoid(config: Any) -> bool:
    """Whether scores end in a sigmoid: yes, unless the config says otherwise, as in sentence-transformers."""
    stated = getattr(config, "sentence_transformers", None) or {}
    name = stated.get("activation_fn") if isinstance(stated, dict) else None
    name = str(name or getattr(config, "sbert_ce_default_activation_function", None) or "Sigmoid")
    kind = name.rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ModelError(
            f"config.json: activation {name!r} of the scores cannot be carried; known: Sigmoid, Identity"
        )
    return kind == "Sigmoid"


def _dynamic_shapes(tokens: Any) -> dict[str, Any]:  # Any: torch.export's Dim
    sequences = Dim("B", min=1, max=MAX_SEQUENCES)
    return {
        "token_ids": {0: tokens},
        "positions": {0: tokens},
        "token_types": {0: tokens},
        "query_start": {0: sequences + 1},
        "rows": {0: sequences},
    }

"""The numeric proof: a right program passes, a wrong one is refused with the numbers."""

import re

import pytest
import torch

from ostinato.errors import CompileError, ModelError
from ostinato.ops import all_ops  # noqa: F401  # registers the operators
from ostinato.runtime import proof
from ostinato.runtime.program import bind, lower
from ostinato.runtime.proof import prove
from tests.support.captured import BLOCK, capture_tiny, weight_values
from tests.support.tiny_models import VOCAB, tiny_config, tiny_model


class Case:
    """A tiny model's graph, its weights, and the program made of it."""

    def __init__(self, family: str, dtype: torch.dtype) -> None:
        self.dtype = dtype
        _, captured = capture_tiny(tiny_config(family), dtype)
        self.graph, self.kv_layers = captured.graph_module, captured.facts.kv_layers
        self.values = weight_values(tiny_model(family, dtype=dtype), captured)
        keys = {n.name: n.meta["weight"][1] for n in self.graph.graph.nodes if n.meta.get("role") == "weight"}
        self.program = bind(lower(self.graph, keys), self.values, native={}, device=torch.device("cpu"))

    def prove(self, program):
        return prove(
            self.graph,
            lambda node: self.values[node.meta["weight"][1]],
            program,
            self.kv_layers,
            dtype=self.dtype,
            vocab_size=VOCAB,
            block_tokens=BLOCK,
        )


def figures(caught) -> list[float]:
    """Logit error, its budget, KV error, its budget, as the message states them."""
    found = re.search(r"by (\S+) \(allowed (\S+), .*KV by (\S+) \(allowed (\S+)\)", str(caught.value))
    return [float(number) for number in found.groups()]


@pytest.fixture(scope="module")
def llama():
    return Case("llama", torch.bfloat16)


def test_the_unfused_program_is_as_good_as_the_graph(llama):
    result = llama.prove(llama.program)
    assert result.tokens == 13 + 9 + 1 + 4
    assert 0 < result.unfused_error == result.max_error <= result.budget
    assert 0 < result.kv_max_error <= result.kv_budget


def test_wrong_logits_are_refused_with_the_numbers(llama):
    def wrong(inputs, kv):
        logits = llama.program(inputs, kv)
        logits[-1, 5] += 4.0  # one number of one row
        return logits

    with pytest.raises(CompileError, match=r"numeric proof failed.*passes\.fuel.*passes\.off") as caught:
        llama.prove(wrong)
    error, budget, kv, kv_budget = figures(caught)
    assert 3 < error < 5
    assert budget < 1
    assert kv <= kv_budget


def test_a_wrong_kv_plane_is_refused_though_every_logit_is_right(llama):
    def wrong(inputs, kv):
        logits = llama.program(inputs, kv)
        if len(inputs.token_ids) < 13:  # the last step: no later logit reads this
            kv[-1][1, 0, 0, 0] += 8.0
        return logits

    with pytest.raises(CompileError, match=r"numeric proof failed") as caught:
        llama.prove(wrong)
    logits, logit_budget, kv, kv_budget = figures(caught)
    assert logits <= logit_budget
    assert kv > kv_budget


def test_nan_is_refused(llama):
    with pytest.raises(CompileError, match="differ from float64 by inf"):
        llama.prove(lambda inputs, kv: llama.program(inputs, kv) * float("nan"))


def test_with_a_router_a_few_flipped_rows_pass_and_many_do_not():
    case = Case("mixtral", torch.float32)
    assert proof._has_router(case.graph)
    assert case.prove(case.program).max_error > 0

    def off(share):
        def program(inputs, kv):
            logits = case.program(inputs, kv)
            logits[: int(len(logits) * share)] += 1.0
            return logits

        return program

    assert case.prove(off(0.2)).max_error < 0.1
    with pytest.raises(CompileError, match="numeric proof failed"):
        case.prove(off(0.5))


def test_weights_that_hold_nan_are_the_models_fault_and_never_pass():
    case = Case("llama", torch.float32)
    name = next(name for name in case.values if name.endswith("layers.0.mlp.up_proj.weight"))
    case.values[name][3, 4] = float("nan")
    with pytest.raises(ModelError, match="gives NaN or infinity, in float64 too"):
        case.prove(case.program)


def test_a_model_that_overflows_its_number_type_is_told_which_to_use():
    case = Case("llama", torch.float16)
    name = next(name for name in case.values if name.endswith("lm_head.weight"))
    case.values[name].fill_(60_000.0)
    with pytest.raises(ModelError, match=r"overflows torch\.float16 .* bfloat16 or float32"):
        case.prove(case.program)

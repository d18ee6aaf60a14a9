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
        self.lowered = lower(self.graph, keys)
        self.program = self.bound(self.lowered)

    def bound(self, lowered):
        return bind(lowered, self.values, native={}, device=torch.device("cpu"))

    def changed(self, op, at, change, layers=range(99)):
        """The program with another argument `at` in the calls of an op, by their number."""
        steps, count = [], 0
        for step in self.lowered.steps:
            if step.op == op:
                args = [*step.args]
                if count in layers:
                    args[at] = change(args[at])
                step, count = step.model_copy(update={"args": args}), count + 1
            steps.append(step)
        assert count > max(layers, default=0) or layers == range(99)
        return self.bound(self.lowered.model_copy(update={"steps": type(self.lowered.steps)(steps)}))

    def prove(self, program, block_tokens=BLOCK, **sizes):
        return prove(
            self.graph,
            lambda node: self.values[node.meta["weight"][1]],
            program,
            self.kv_layers,
            dtype=self.dtype,
            vocab_size=VOCAB,
            block_tokens=block_tokens,
            **sizes,
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
    assert result.tokens == 64 + (12 + 4) + 13, "of the 109 tokens of the first step 64 are looked at"
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
        if len(inputs.token_ids) == 13:  # the last step: no later logit reads this
            kv[-1][1, 0, 0, 0] += 8.0
        return logits

    with pytest.raises(CompileError, match=r"numeric proof failed") as caught:
        llama.prove(wrong)
    logits, logit_budget, kv, kv_budget = figures(caught)
    assert logits <= logit_budget
    assert kv > kv_budget


SCALE = ("ostinato.paged_attention.default", 6)


@pytest.mark.parametrize(
    ("op", "at", "change", "layers"),
    [
        (*SCALE, lambda scale: scale * 1.05, range(99)),
        (*SCALE, lambda scale: scale * 1.2, [1]),  # the last layer: KV knows nothing of it
        ("aten.add.Tensor", 1, lambda eps: 1e-3 if isinstance(eps, float) else eps, range(99)),
    ],
    ids=["scale of attention", "scale of attention in one layer", "epsilon of norms"],
)
def test_what_hides_below_the_largest_error_of_bfloat16_shows_in_the_typical_one(
    llama, monkeypatch, op, at, change, layers
):
    wrong = llama.changed(op, at, change, layers)
    with pytest.raises(CompileError, match=r"errors are .* times those of the unfused graph"):
        llama.prove(wrong)

    monkeypatch.setattr(proof, "TYPICAL", 100.0)
    result = llama.prove(wrong)
    assert result.max_error < result.budget
    assert result.kv_max_error < result.kv_budget
    assert max(result.typical, result.kv_typical) > 2


def test_the_typical_error_of_one_plane_shows_however_empty_its_blocks_are(llama, monkeypatch):
    def wrong(inputs, kv):
        logits = llama.program(inputs, kv)
        if len(inputs.token_ids) == 13:  # the last step: no later logit reads this
            kv[0] *= 1 + 2**-6
        return logits

    with pytest.raises(CompileError, match=r"in the worst plane of KV .* \(allowed 1\.75\)"):
        llama.prove(wrong, block_tokens=64)

    monkeypatch.setattr(proof, "TYPICAL", 100.0)
    result = llama.prove(wrong, block_tokens=64)
    assert (result.typical, result.max_error) == (1.0, result.unfused_error)
    assert result.kv_max_error < result.kv_budget
    assert result.kv_typical > 2


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (lambda tokens: tokens == 13, "the decode step alone"),
        (lambda tokens: 13 < tokens <= 16, "the mixed step alone"),
        (lambda tokens: tokens > 100, "the first step alone"),
    ],
)
def test_a_fault_of_one_kind_of_step_shows(llama, when, said):
    wrong = llama.changed(*SCALE, lambda scale: scale * 1.1)
    with pytest.raises(CompileError, match=r"errors are .* times those of the unfused graph"):
        llama.prove(lambda inputs, kv: (wrong if when(len(inputs.token_ids)) else llama.program)(inputs, kv))


@pytest.mark.parametrize(
    ("above", "longest", "first"), [(0, 512, 109), (110, 512, 111), (300, 512, 301), (300, 40, 301)]
)
def test_the_first_step_has_more_tokens_than_a_program_for_few(llama, above, longest, first):
    seen = []

    def program(inputs, kv):
        seen.append((len(inputs.token_ids), len(inputs.seq_lens), int(inputs.seq_lens.max())))
        assert len({*inputs.slot_mapping.tolist()}) == len(inputs.token_ids), "a slot is written twice"
        return llama.program(inputs, kv)

    result = llama.prove(program, above=above, longest=longest)
    assert result.typical == result.kv_typical == 1.0
    (tokens, count, _), (mixed, _, _), (decode, _, most) = seen
    assert (tokens, mixed, decode) == (first, count + 3, count)
    assert most <= longest


def test_typical_errors_of_a_right_program_are_those_of_the_graph(llama):
    result = llama.prove(llama.program)
    assert (result.typical, result.kv_typical, result.typical_budget) == (1.0, 1.0, 1.75)
    assert proof.typical_budget(torch.float16) == 1.75
    assert proof.typical_budget(torch.float32) == 4.0


def test_a_typical_error_is_the_median_of_rows_whatever_their_size():
    truth = torch.ones(5, 4, dtype=torch.float64)
    plain = truth + torch.tensor([1e-2, 1e-2, 1e-2, 1e-2, 1.0]).double()[:, None]
    ours = truth + torch.tensor([2e-2, 2e-2, 3e-2, 50.0, 0.0]).double()[:, None]
    assert proof.typical_ratio(truth, plain, ours, 1e-9) == pytest.approx(2.0)
    # what is exact in both is alike, and a slip below a sixteenth of eps is none
    assert proof.typical_ratio(truth, truth, truth, 1e-2) == 1.0
    assert proof.typical_ratio(truth, truth, truth + 1e-2 / 16, 1e-2) == pytest.approx(2.0)
    assert proof.typical_ratio(truth[:0], truth[:0], truth[:0], 1e-2) == 0.0
    assert proof.typical_ratio(truth, plain, ours * float("nan"), 1e-2) == float("inf")
    assert proof.typical_ratio(0 * truth, 0 * truth, 0 * truth, 1e-2) == 0.0


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

"""Every family: the traced graph gives transformers' logits, in chunks, in batches, with cached context."""

import pytest
import torch

from ostinato.errors import ModelError
from ostinato.graph.build import build_model
from ostinato.graph.hooks import CaptureHooks
from ostinato.ops import all_ops  # noqa: F401  # registers the operators
from ostinato.runtime.program import Bound, bind, lower
from tests.support.captured import Sequences, capture_tiny, kv_planes, weight_values
from tests.support.tiny_models import FAMILIES, VOCAB, tiny_config, tiny_model

LENGTHS = (23, 14, 1)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    """Transformers' logits of three prompts, and the traced program of the same model."""
    model = tiny_model(request.param)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]
    with torch.no_grad():
        wanted = [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    _, captured = capture_tiny(tiny_config(request.param))
    keys = {
        n.name: n.meta["weight"][1]
        for n in captured.graph_module.graph.nodes
        if n.op == "placeholder" and n.meta["role"] == "weight"
    }
    program = lower(captured.graph_module, keys)
    run = bind(program, weight_values(model, captured), native={}, device=torch.device("cpu"))
    return captured, run, prompts, wanted


def logits_of(run: Bound, captured, prompts, schedule) -> list[torch.Tensor]:
    sequences = Sequences(prompts)
    planes = kv_planes(captured, sequences.num_blocks)
    out: list[list[torch.Tensor]] = [[] for _ in prompts]
    for lengths in schedule:
        logits = run(sequences.step(lengths), planes)
        for i, part in zip(lengths, logits.split(list(lengths.values())), strict=True):
            out[i].append(part)
    return [torch.cat(parts) for parts in out]


@pytest.mark.parametrize(
    "schedule",
    [
        [{0: 23, 1: 14, 2: 1}],
        [{2: 1}, {0: 9, 1: 5}, {1: 1, 0: 13}, {0: 1, 1: 8}],
    ],
    ids=["all at once", "chunks mixed with decode"],
)
def test_logits_equal_transformers(family, schedule):
    captured, run, prompts, wanted = family
    for got, want in zip(logits_of(run, captured, prompts, schedule), wanted, strict=True):
        # the same float32 operations in another order: 2 layers of sums over at most 96 terms
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_only_the_asked_rows_give_logits(family):
    captured, run, prompts, wanted = family
    sequences = Sequences(prompts)
    inputs = sequences.step({0: 23})._replace(logit_rows=torch.tensor([22, 4]))
    got = run(inputs, kv_planes(captured, sequences.num_blocks))
    torch.testing.assert_close(got, wanted[0][[22, 4]], rtol=2e-4, atol=2e-4)


def test_windows_and_softcaps_are_carried_as_facts():
    _, captured = capture_tiny(tiny_config("gemma2"))
    assert [(a.window, a.softcap) for a in captured.facts.attention] == [(9, 5.0), (0, 5.0)]
    assert captured.facts.attention[0].scale == pytest.approx(24**-0.5)


def test_tied_embeddings_are_one_weight():
    _, captured = capture_tiny(tiny_config("qwen2"))
    names = [n.meta["weight"][1] for n in captured.graph_module.graph.nodes if n.meta.get("role") == "weight"]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_is_refused(kind):
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ModelError, match=f"rope_type='{kind}' depends on the sequence length"):
        build_model(config, torch.float32, CaptureHooks())


def test_attention_sinks_are_refused_by_name():
    from transformers import GptOssConfig

    config = GptOssConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=32, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, vocab_size=VOCAB,
        sliding_window=9, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"GptOssAttention: attention with s_aux cannot be carried"):
        capture_tiny(config)

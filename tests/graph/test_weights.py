"""Weight expressions give exactly the parameters that transformers loads, or name what is wrong."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ostinato.errors import ModelError
from ostinato.graph.recorded_tensor import RecordedTensor
from ostinato.graph.source import ModelSource, load_config, open_source
from ostinato.graph.weights import weight_exprs
from ostinato.ops.weight_expr import Expr, evaluate, load, sources
from tests.support.tiny_models import FAMILIES, edit_json, make_tiny, tiny_model

PROMPT = torch.tensor([[5, 17, 200, 33, 8, 91, 4, 250]])


def specs(
    model: PreTrainedModel, dtype: torch.dtype | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(p.shape), dtype or p.dtype) for name, p in model.named_parameters()}


def exprs_of(source: ModelSource, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Expr]]:
    """The model on the meta device as the config builds it, and its expressions."""
    config = load_config(source)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, weight_exprs(
        specs(model, **kwargs), model.all_tied_weights_keys, source, config, model=model
    )


def logits(source: ModelSource) -> Tensor:
    """Logits of the model filled through our expressions only."""
    _, exprs = exprs_of(source)
    model = AutoModelForCausalLM.from_config(load_config(source), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(evaluate(exprs[name], source.read))
        return model(PROMPT).logits


def reference(folder: Path) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(PROMPT).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_to_the_bit_and_uses_each_tensor_once(family: str, tmp_path: Path):
    folder = make_tiny(family, tmp_path, tokenizer=False)
    source = open_source(folder)
    _, exprs = exprs_of(source)
    used = Counter(name for expr in exprs.values() for name in sources(expr))
    assert used == Counter(source.tensor_names())
    for name, parameter in tiny_model(family).named_parameters():
        assert torch.equal(evaluate(exprs[name], source.read), parameter), name


def test_shards_give_the_same_parameters_as_one_file(tmp_path: Path):
    folder = make_tiny("mixtral", tmp_path, tokenizer=False, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    source = open_source(folder)
    _, exprs = exprs_of(source)
    for name, parameter in tiny_model("mixtral").named_parameters():
        assert torch.equal(evaluate(exprs[name], source.read), parameter), name


def test_experts_keep_their_order_past_nine(tmp_path: Path):
    folder = make_tiny("qwen3_moe", tmp_path, tokenizer=False, num_experts=12, num_hidden_layers=1)
    source = open_source(folder)
    _, exprs = exprs_of(source)
    expected = tiny_model("qwen3_moe", num_experts=12, num_hidden_layers=1).model.layers[0].mlp.experts
    made = evaluate(exprs["model.layers.0.mlp.experts.gate_up_proj"], source.read)
    assert torch.equal(made, expected.gate_up_proj)


def test_the_asked_number_type_is_cast_at_each_load(tmp_path: Path):
    source = open_source(make_tiny("mixtral", tmp_path, tokenizer=False))
    _, exprs = exprs_of(source, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.experts.down_proj"
    made = evaluate(exprs[name], source.read)
    assert torch.equal(made, tiny_model("mixtral").get_parameter(name).bfloat16())
    assert exprs[name][0] == "stack"
    assert [part[:2] for part in exprs[name][2]] == [["cast", "bfloat16"]] * 4


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path, tokenizer=False)


def test_a_checkpoint_of_the_bare_model_without_its_prefix_loads(tmp_path: Path):
    folder = make_tiny("qwen2", tmp_path, tokenizer=False)
    expected = reference(folder)
    rewrite(folder, lambda t: [t.update({name.removeprefix("model."): t.pop(name)}) for name in list(t)])
    assert torch.equal(logits(open_source(folder)), expected)


def test_a_parameter_that_no_file_fills_is_an_error_and_never_random(llama: Path):
    rewrite(llama, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        ModelError, match=r"no tensor fills 1 parameters .*layers\.1\.mlp\.up_proj\.weight.*random"
    ):
        exprs_of(open_source(llama))


def test_a_missing_expert_is_an_error(tmp_path: Path):
    folder = make_tiny("mixtral", tmp_path, tokenizer=False)
    rewrite(folder, lambda t: t.pop("model.layers.0.block_sparse_moe.experts.2.w1.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.0\.mlp\.experts\.gate_up_proj.*Concatenate"):
        exprs_of(open_source(folder))


def test_a_tensor_of_another_shape_than_the_config_asks_for_is_named(llama: Path):
    rewrite(llama, lambda t: t.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(
        ModelError, match=r"model\.norm\.weight gives .* shape \[63\], but the config asks for \[64\]"
    ):
        exprs_of(open_source(llama))


def test_a_quantised_tensor_is_refused(llama: Path):
    rewrite(llama, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is torch\.int8, a quantised weight"):
        exprs_of(open_source(llama))


def test_one_parameter_from_two_tensors_is_refused(llama: Path):
    rewrite(llama, lambda t: t.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"norm\.weight and .*norm\.weight are both model\.norm\.weight"):
        exprs_of(open_source(llama))


def test_unused_tensors_are_named_in_one_warning(llama: Path, caplog: pytest.LogCaptureFixture):
    rewrite(llama, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    with caplog.at_level(logging.WARNING):
        exprs_of(open_source(llama))
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "1 tensors are not used by LlamaForCausalLM: model.layers.0.self_attn.rotary_emb.inv_freq"
    ]


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
@pytest.mark.parametrize("flag", [True, False, None])
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # default of the flag: llama False, gemma2 True
def test_tied_and_own_heads_give_transformers_logits_or_an_error(
    family: str, flag: bool | None, head: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = make_tiny(family, tmp_path, tokenizer=False, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    if head != "absent":
        own = embedding.clone() if head == "equal" else torch.randn_like(embedding)
        rewrite(folder, lambda t: t.update({"lm_head.weight": own}))
    edit_json(folder / "config.json", tie_word_embeddings=flag)
    tied = flag if flag is not None else family == "gemma2"
    source = open_source(folder)
    if not tied and head == "absent":
        with pytest.raises(ModelError, match=r"no tensor fills 1 parameters of .*: lm_head\.weight"):
            exprs_of(source)
        return
    with caplog.at_level(logging.WARNING):
        model, exprs = exprs_of(source)
    assert torch.equal(logits(source), reference(folder))
    is_one_tensor = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert is_one_tensor == (tied and head != "different")
    assert ("lm_head.weight" in exprs) == (not is_one_tensor)
    assert ("which are used" in caplog.text) == (tied and head == "different")


def test_a_tied_embedding_is_filled_from_the_head_if_only_that_is_there(tmp_path: Path):
    folder = make_tiny("qwen2", tmp_path, tokenizer=False)
    expected = reference(folder)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(logits(open_source(folder)), expected)


def test_a_shared_tensor_in_the_graph_is_refused_if_the_head_differs(tmp_path: Path):
    folder = make_tiny("qwen2", tmp_path, tokenizer=False)
    rewrite(folder, lambda t: t.update({"lm_head.weight": torch.randn(320, 64)}))
    model = tiny_model("qwen2")
    with pytest.raises(
        ModelError, match=r"lm_head\.weight differs from the tensor that the config ties it to"
    ):
        weight_exprs(
            specs(model), model.all_tied_weights_keys, open_source(folder), model.config, model=model
        )


def recorded(*shape: int) -> RecordedTensor:
    return RecordedTensor(load("w"), shape, torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: torch.cat([w, w], dim=-1),
        lambda w: torch.stack((w, w), 1),
        lambda w: torch.chunk(w, 3, dim=0)[1],
        lambda w: w.split([1, 5], dim=0)[1],
        lambda w: w.narrow(1, 1, 3),
        lambda w: w[2:4],
        lambda w: w[:, 1:3],
        lambda w: w[-1],
        lambda w: w.transpose(-1, 0).contiguous(),
        lambda w: w.t(),
        lambda w: w.reshape(3, 2, 4).transpose(1, 2).reshape(6, 4),
        lambda w: w.view(-1),
        lambda w: w.unflatten(0, (2, 3)).flatten(1),
        lambda w: w.unsqueeze(0).squeeze(0),
        lambda w: w.to(torch.bfloat16).float(),
        lambda w: w.clone().detach(),
    ],
)
def test_what_is_done_to_a_recorded_tensor_becomes_its_expression(change: Any):
    values = torch.randn(6, 4)
    made = change(recorded(6, 4))
    assert tuple(made.shape) == tuple(change(values).shape)
    assert torch.equal(evaluate(made.expr, lambda _: values), change(values))


@pytest.mark.parametrize(
    ("change", "name"),
    [(lambda w: w * 2, "mul"), (lambda w: torch.exp(w), "exp"), (lambda w: w[[0, 2]], "indexes")],
)
def test_a_conversion_that_computes_is_refused_by_name(change: Any, name: str):
    with pytest.raises(ModelError, match=name):
        change(recorded(3, 4))

"""GGUF files: the model that was written comes back, values equal transformers', broken files are named."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from ostinato.errors import ModelError
from ostinato.graph.gguf_config import llama3_divisors
from ostinato.graph.source import load_config, open_source, resolve_dtype
from ostinato.graph.weights import weight_exprs
from ostinato.ops.weight_expr import evaluate
from tests.support.gguf_files import ARCHITECTURES, gguf_model, write_gguf
from tests.support.tiny_models import EOS_ID

PROMPT = torch.tensor([[5, 17, 200, 33, 8, 91, 4, 250, 7, 66, 120, 31]])


def filled(path: Path) -> torch.nn.Module:
    """The transformers model of the file's config, filled through our expressions."""
    source = open_source(path)
    config = load_config(source)
    # eager, as in tiny_model: equal weights then give equal bits
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    specs = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
    exprs = weight_exprs(specs, model.all_tied_weights_keys, source, config, model=model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(evaluate(exprs[name], source.read))
    return model


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_model_that_was_written_comes_back(family: str, tmp_path: Path):
    model = gguf_model(family)
    made = filled(write_gguf(tmp_path / "m.gguf", family, model=model))
    for name, parameter in model.named_parameters():
        tolerance = 1e-6 if "norm" in name and "gemma" in family else 0.0  # (w + 1) - 1 is rounded once
        torch.testing.assert_close(made.get_parameter(name), parameter, rtol=0, atol=tolerance, msg=name)
    torch.testing.assert_close(logits(made), logits(model), rtol=0, atol=1e-4 if "gemma" in family else 0.0)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0])
def test_dequantised_values_are_bit_equal_to_transformers(kind: Any, tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", "llama", kind=kind)
    source = open_source(path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=gguf_model("llama"))[
        "tensors"
    ]
    assert sorted(source.tensor_names()) == sorted(theirs)
    for name, tensor in theirs.items():
        assert source.tensor_spec(name) == (tuple(tensor.shape), torch.float32)
        assert torch.equal(source.read(name), tensor), name


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "phi3"])
def test_other_families_are_bit_equal_to_transformers_too(family: str, tmp_path: Path):
    model = gguf_model(family)
    path = write_gguf(tmp_path / "m.gguf", family, model=model, kind=Kind.Q8_0)
    made = filled(path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    for name, tensor in theirs.items():
        assert torch.equal(made.get_parameter(name), tensor), name


def test_a_folder_with_one_gguf_file_opens_and_several_are_listed(tmp_path: Path):
    write_gguf(tmp_path / "one.gguf")
    assert open_source(tmp_path).path == tmp_path / "one.gguf"
    write_gguf(tmp_path / "two.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files \(one\.gguf, two\.gguf\)"):
        open_source(tmp_path)


def test_ids_and_number_type(tmp_path: Path):
    source = open_source(
        write_gguf(tmp_path / "m.gguf", kind=Kind.F16, metadata={"tokenizer.ggml.eot_token_id": 3})
    )
    assert source.kind == "gguf"
    assert (source.eos_token_ids, source.bos_token_id) == ((EOS_ID, 3), 1)
    assert resolve_dtype("auto", source) == torch.float32


def test_the_fingerprint_changes_with_one_weight(tmp_path: Path):
    model = gguf_model("llama")
    first = open_source(write_gguf(tmp_path / "a.gguf", model=model)).fingerprint
    assert open_source(write_gguf(tmp_path / "b.gguf", model=model)).fingerprint == first
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert open_source(write_gguf(tmp_path / "c.gguf", model=model)).fingerprint != first


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_frequency_scaling_is_recognised_by_its_table(factor: float, tmp_path: Path):
    table = llama3_divisors(10_000.0, 16, factor)
    path = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": table.numpy()})
    config = load_config(open_source(path))
    assert config.rope_parameters["factor"] == factor
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    plain = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(rotary.double(), plain / table.double(), rtol=1e-5, atol=0)


def test_an_unknown_frequency_table_is_refused(tmp_path: Path):
    table = llama3_divisors(10_000.0, 16, 8.0) * 1.01
    path = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": table.numpy()})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's"):
        open_source(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, r"GGUF architecture 'mamba'; readable: llama, qwen2"),
        ({"llama.expert_count": 8}, r"metadata llama\.expert_count=8 is not known"),
        (
            {"llama.rope.scaling.type": "longrope"},
            r"rope\.scaling\.type='longrope'; readable: none, linear, yarn",
        ),
        ({"llama.attention.value_length": 8}, r"value_length differs from attention\.key_length"),
        ({"llama.embedding_length": None}, r"metadata llama\.embedding_length is missing"),
        ({"llama.attention.head_count_kv": [2, 1]}, "num_key_value_heads differs by layer"),
        ({"split.count": 3}, "one of 3 parts; join them first"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(metadata: dict[str, Any], message: str, tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        open_source(path)


def test_a_harmless_zero_is_not_refused(tmp_path: Path):
    assert (
        open_source(write_gguf(tmp_path / "m.gguf", metadata={"llama.expert_count": 0})).config["hidden_size"]
        == 64
    )


def test_an_unknown_number_format_is_named_with_its_tensor(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name)
    at += 4 + 8 * int.from_bytes(content[at : at + 4], "little")  # number of sizes, then the sizes
    content[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(
        ModelError, match=r"tensor blk\.0\.ffn_down\.weight has unknown number format 99; known: F32"
    ):
        open_source(path)


@pytest.mark.parametrize("keep", [8, 60, 3000, -1])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    stop = len(content) - 200 if keep == -1 else keep  # the file ends with padding
    path.write_bytes(content[:stop])
    with pytest.raises(ModelError, match=r"m\.gguf: .*download it again"):
        open_source(path)


def test_another_version_is_refused(tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf")
    content = bytearray(path.read_bytes())
    content[4:8] = (9).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError, match="GGUF version 9; readable: 2 and 3"):
        open_source(path)


def test_without_the_gguf_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_gguf(tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'ostinato\[gguf\]'"):
        open_source(path)

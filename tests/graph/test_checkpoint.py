"""Safetensors folders: which files count, and every way in which they can be broken."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ostinato.errors import ModelError
from ostinato.graph.checkpoint import INDEX, SINGLE, Checkpoint

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.arange(6, dtype=torch.float32).bfloat16(),
    "c": torch.tensor([[7]], dtype=torch.int64),
}
SHARDS = {"a": "model-00001-of-00003.safetensors", "b": "model-00002-of-00003.safetensors"} | {
    "c": "model-00003-of-00003.safetensors"
}


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for name, file in SHARDS.items():
        save_file({name: TENSORS[name]}, tmp_path / file)
    write_index(tmp_path, SHARDS)
    return tmp_path


def test_reads_a_single_file_and_shards_to_the_bit(sharded: Path, tmp_path_factory: pytest.TempPathFactory):
    single = tmp_path_factory.mktemp("single")
    save_file(TENSORS, single / SINGLE)
    for folder in (sharded, single):
        checkpoint = Checkpoint(folder)
        assert sorted(checkpoint.places) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert torch.equal(checkpoint.read(name), tensor)
            assert checkpoint.read(name).dtype == tensor.dtype


def test_writing_to_a_tensor_does_not_reach_the_file(sharded: Path):
    Checkpoint(sharded).read("a").zero_()
    assert torch.equal(Checkpoint(sharded).read("a"), TENSORS["a"])


def test_a_missing_shard_is_named(sharded: Path):
    (sharded / SHARDS["b"]).unlink()
    with pytest.raises(ModelError, match=r"missing model-00002-of-00003\.safetensors.*finish the download"):
        Checkpoint(sharded)


@pytest.mark.parametrize("cut", [1, 5, 10_000])
def test_a_shard_that_is_too_short_is_named(sharded: Path, cut: int):
    path = sharded / SHARDS["c"]
    path.write_bytes(path.read_bytes()[:-cut] if cut < 100 else b"")
    with pytest.raises(ModelError, match=r"model-00003-of-00003\.safetensors.*again"):
        Checkpoint(sharded)


def test_a_shard_that_is_too_long_is_named(sharded: Path):
    with (sharded / SHARDS["c"]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelError, match="1 bytes too many"):
        Checkpoint(sharded)


def test_an_index_entry_that_no_shard_holds_is_named(sharded: Path):
    write_index(sharded, SHARDS | {"ghost": SHARDS["a"]})
    with pytest.raises(ModelError, match=r"places tensor ghost in model-00001.*does not hold it"):
        Checkpoint(sharded)


def test_an_index_entry_that_points_to_the_wrong_shard_is_named(sharded: Path):
    write_index(sharded, SHARDS | {"a": SHARDS["b"]})
    with pytest.raises(ModelError, match=r"places tensor a in model-00002"):
        Checkpoint(sharded)


def test_a_tensor_that_the_index_lacks_is_usable_and_named_in_a_warning(
    sharded: Path, caplog: pytest.LogCaptureFixture
):
    save_file({"a": TENSORS["a"], "extra": torch.ones(2)}, sharded / SHARDS["a"])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(Checkpoint(sharded).read("extra"), torch.ones(2))
    assert "does not list 1 tensors of its shards (extra)" in caplog.text


def test_a_tensor_in_two_shards_is_refused_with_both_names(sharded: Path):
    save_file({"b": TENSORS["b"], "a": torch.zeros(3, 4)}, sharded / SHARDS["b"])
    with pytest.raises(ModelError, match=r"tensor a is in model-00001.*and in model-00002"):
        Checkpoint(sharded)


def test_a_stale_extra_shard_is_ignored_with_a_warning(sharded: Path, caplog: pytest.LogCaptureFixture):
    save_file({"a": torch.zeros(3, 4)}, sharded / "model-00004-of-00004.safetensors")
    with caplog.at_level(logging.WARNING):
        assert torch.equal(Checkpoint(sharded).read("a"), TENSORS["a"])
    assert "ignored: model-00004-of-00004.safetensors" in caplog.text


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}']
)
def test_a_broken_index_is_named(sharded: Path, text: str):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index\.json: broken index.*download it again"):
        Checkpoint(sharded)


def test_an_index_cannot_lead_out_of_the_folder(sharded: Path):
    write_index(sharded, {"a": "../model.safetensors"})
    with pytest.raises(ModelError, match=r"not the name of a \.safetensors file in this folder"):
        Checkpoint(sharded)


def test_a_single_file_wins_over_an_index_with_a_warning(sharded: Path, caplog: pytest.LogCaptureFixture):
    save_file({"a": TENSORS["a"] + 1}, sharded / SINGLE)
    with caplog.at_level(logging.WARNING):
        checkpoint = Checkpoint(sharded)
    assert list(checkpoint.places) == ["a"]
    assert "is ignored, because model.safetensors is there too" in caplog.text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_with_advice_and_never_opened(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ModelError, match=rf"only pickled weights \({name}\).*save_pretrained"):
        Checkpoint(tmp_path)


def test_a_folder_without_weights_says_what_is_needed(tmp_path: Path):
    with pytest.raises(ModelError, match=r"no weights; needed: model\.safetensors"):
        Checkpoint(tmp_path)


def test_shards_without_an_index_are_refused(sharded: Path):
    (sharded / INDEX).unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(sharded)


def test_a_zero_size_tensor_loads(tmp_path: Path):
    save_file({"empty": torch.empty(0, 5), "full": torch.ones(2)}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.read("empty").shape == (0, 5)
    assert torch.equal(checkpoint.read("full"), torch.ones(2))


def raw_file(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{nonsense", b"", "broken safetensors header"),
        ([1], b"", "broken safetensors header"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "entry of a is broken"),
        ({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"x", "number type F4"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", r"shape \[2\] has 4 bytes"),
        (
            {"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}},
            b"1234",
            "gap or overlap before tensor a",
        ),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, header: object, data: bytes, message: str):
    raw_file(tmp_path / SINGLE, header, data)
    with pytest.raises(ModelError, match=message):
        Checkpoint(tmp_path)


def test_unaligned_data_is_read_right(tmp_path: Path):
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "word": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    raw_file(tmp_path / SINGLE, header, b"\x07" + torch.tensor([1.5, -2.0]).numpy().tobytes())
    assert torch.equal(Checkpoint(tmp_path).read("word"), torch.tensor([1.5, -2.0]))


def test_a_removed_folder_during_reading_keeps_what_is_mapped(sharded: Path):
    checkpoint = Checkpoint(sharded)
    tensor = checkpoint.read("a")
    shutil.rmtree(sharded)
    assert torch.equal(tensor, TENSORS["a"])

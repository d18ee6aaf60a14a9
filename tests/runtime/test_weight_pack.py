"""Packing: what is read back is what the expressions say; files are whole, aligned, never half written."""

import errno
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ostinato.errors import ArtifactError, CompileError, ModelError
from ostinato.ops.weight_expr import Expr, cast, concat, evaluate, load, reshape, slice_, stack, transpose
from ostinato.runtime import weight_pack
from ostinato.runtime.file_hash import hash_file
from ostinato.runtime.weight_pack import load_packed, pack

GENERATOR = torch.Generator().manual_seed(0)
SOURCE = {
    "q": torch.randn(6, 8, generator=GENERATOR),
    "k": torch.randn(3, 8, generator=GENERATOR),
    "odd": torch.randn(5, 7, generator=GENERATOR).bfloat16(),
    "ids": torch.arange(3),
    "empty": torch.empty(0, 8),
}
EXPRS: dict[str, Expr] = {
    "merged": concat([load("q"), load("k"), load("empty")]),
    "side": concat([load("q"), load("q")], 1),
    "stacked": stack([load("odd"), load("odd")]),
    "nested": concat([stack([load("k"), load("k")]), stack([load("k")])]),
    "sliced": slice_(load("q"), 0, 1, 4),
    "turned": transpose(load("q"), 0, 1),
    "shaped": reshape(cast(load("q"), torch.bfloat16), [2, 3, 8]),
    "odd": load("odd"),
    "ids": load("ids"),
    "empty": load("empty"),
    'emoji 🎉 "quoted"\n': load("k"),
}


def read(name: str) -> Tensor:
    return SOURCE[name]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    pack(EXPRS, read, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_every_form_of_expression_comes_back_to_the_bit_and_aligned(packed: Path):
    loaded = load_packed(packed)
    assert list(loaded) == list(EXPRS)
    for name, expr in EXPRS.items():
        expected = evaluate(expr, read)
        assert torch.equal(loaded[name], expected), name
        assert loaded[name].dtype == expected.dtype
        assert loaded[name].is_contiguous()
        assert loaded[name].data_ptr() % 64 == 0


def test_the_file_is_plain_safetensors(packed: Path):
    theirs = load_file(packed)
    assert {name for name in theirs if not name.startswith("__pad__.")} == set(EXPRS)
    assert torch.equal(theirs["merged"], evaluate(EXPRS["merged"], read))


def test_the_result_tells_size_and_content_hash(tmp_path: Path):
    first = pack(EXPRS, read, tmp_path / "a")
    assert first == (tmp_path.joinpath("a").stat().st_size, hash_file(tmp_path / "a"))
    assert pack(EXPRS, read, tmp_path / "b").digest == first.digest
    assert pack({**EXPRS, "sliced": slice_(load("q"), 0, 0, 3)}, read, tmp_path / "c").digest != first.digest


def test_progress_ends_at_one(tmp_path: Path):
    shares: list[float] = []
    pack(EXPRS, read, tmp_path / "w", progress=shares.append)
    assert shares == [(i + 1) / len(EXPRS) for i in range(len(EXPRS))]


def test_one_source_tensor_is_alive_at_a_time_however_many_are_joined(tmp_path: Path):
    alive, peak = 0, 0

    def died() -> None:
        nonlocal alive
        alive -= 1

    def read_counted(name: str) -> Tensor:
        nonlocal alive, peak
        values = np.full((4, 4), int(name), np.float32)
        weakref.finalize(values, died)
        alive += 1
        peak = max(peak, alive)
        return torch.from_numpy(values)

    exprs = {"experts": stack([concat([load(str(i)), load(str(i + 1))]) for i in range(24)])}
    pack(exprs, read_counted, tmp_path / "w")
    assert (alive, peak) == (0, 1)
    assert torch.equal(load_packed(tmp_path / "w")["experts"][:, 0, 0], torch.arange(24.0))


class FullDisk:
    """A file that accepts `room` bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, content: Any) -> int:
        self.room -= memoryview(content).nbytes
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(content))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_all = weight_pack._write_all
    monkeypatch.setattr(weight_pack, "_write_all", lambda file, *rest: write_all(FullDisk(file, 300), *rest))
    with pytest.raises(CompileError, match=r"weights: the disk is full \(\d+ MiB free\) while packing"):
        pack(EXPRS, read, tmp_path / "weights")
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_reading_leaves_the_old_file_as_it_was(packed: Path):
    before = packed.read_bytes()

    def broken(name: str) -> Tensor:
        raise RuntimeError("unreadable")

    with pytest.raises(RuntimeError, match="unreadable"):
        pack(EXPRS, broken, packed)
    assert packed.read_bytes() == before
    assert list(packed.parent.iterdir()) == [packed]


def test_parts_that_do_not_fit_together_are_refused(tmp_path: Path):
    with pytest.raises(CompileError, match="parts of a weight do not fit together"):
        pack({"w": concat([load("q"), load("odd")])}, read, tmp_path / "w")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_nan_and_infinite_values_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, value: float):
    tensors = {"good": torch.ones(2, 4).to(dtype), "bad": torch.tensor([[1, 2, 3, value]]).to(dtype)}
    with pytest.raises(ModelError, match="weight qkv, made of bad: NaN or infinite values in"):
        pack({"qkv": concat([load("good"), load("bad")])}, tensors.__getitem__, tmp_path / "w")
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_its_new_type_cannot_hold_is_refused(tmp_path: Path):
    large = {"w": torch.tensor([1.0, 1e6])}
    with pytest.raises(ModelError, match="infinite values in float16"):
        pack({"w": cast(load("w"), torch.float16)}, large.__getitem__, tmp_path / "w")


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:100], lambda b: b""])
def test_a_damaged_file_is_refused(packed: Path, change: Any):
    packed.write_bytes(change(packed.read_bytes()))
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: .*compile the model again"):
        load_packed(packed)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match="nowhere: cannot be read"):
        load_packed(tmp_path / "nowhere")


def test_tensors_past_two_gib_are_found(tmp_path: Path):
    large, value = 3 * 2**30, torch.tensor([1.5, -2.5, 7.0])
    header = {
        "hole": {"dtype": "U8", "shape": [large], "data_offsets": [0, large]},
        "tail": {"dtype": "F32", "shape": [3], "data_offsets": [large, large + 12]},
    }
    text = json.dumps(header).encode().ljust(248)
    with (tmp_path / "w").open("wb") as file:  # sparse: takes no room on the disk
        file.write(len(text).to_bytes(8, "little") + text)
        file.seek(large, 1)
        file.write(value.numpy().tobytes())
    loaded = load_packed(tmp_path / "w")
    assert loaded["hole"].numel() == large
    assert torch.equal(loaded["tail"], value)

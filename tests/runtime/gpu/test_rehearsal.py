"""What `compile-model` rehearses is all that a server of any shape of step launches."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from ostinato.ops import attention_choice, fa3_attention, paged_attention, tuning, wgmma_prefill
from ostinato.ops.attention_choice import StepClass, Way
from ostinato.ops.skinny_rows import Config
from ostinato.ops.wgmma_linear import Tile
from ostinato.runtime.gpu.gpu_model import launchers
from ostinato.runtime.gpu.rehearsal import rehearsal_shapes
from ostinato.runtime.runner import StepShape
from tests.support.captured import capture_tiny
from tests.support.dry_gpu import DryGpu
from tests.support.tiny_models import tiny_config

FEW = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 65)
MANY = (64, 129, 200, 255, 257, 700)


def shapes_of_a_server() -> set[StepShape]:
    """T tokens, S sequences and R rows of logits: S, or with scored prompts any number up to T."""
    shapes = set()
    for tokens in FEW:
        for sequences, rows in product((1, 2, tokens // 2, tokens), (*FEW, 0)):
            shapes.add(StepShape(tokens, sequences, rows or sequences))
    for tokens, sequences, rows in product(MANY, (1, 2, 17, 64, 257), (0, 1, 3, 6, 20, 257)):
        shapes.add(StepShape(tokens, sequences, rows or sequences))
    return {s for s in shapes if 0 < s.sequences <= s.tokens and s.logit_rows <= s.tokens}


# odd sizes: 24 of a head is no multiple of 16, rows of 120 bytes are not aligned
ODD = {"hidden_size": 60, "intermediate_size": 36, "head_dim": 24, "vocab_size": 331}


class Measured(dict[tuning.Shape, tuning.Choice]):
    """A table that has every layer: other kernels for each class of tokens, and the library for one."""

    def get(self, shape: tuning.Shape, default: Any = None) -> Any:
        by_class = {
            1: Config(False, 2, 512, 2, 1),
            2: Config(False, 4, 512, 2, 1),
            4: None,
            8: Config(True, 16, 256, 4, 4),
            16: Config(True, 16, 128, 4, 4, split=2 if shape.op == "skinny_linear" else 1),
        }
        if shape.tokens > 16:
            rows = {32: Tile(64, 1, 2), 64: Tile(32), 128: Tile(48, 2), 192: None, 256: Tile(32, 2, 1, 2)}
            tile = rows[shape.tokens]
            return tuning.Choice(tile=tile and tile._asdict())
        config = by_class[shape.tokens]
        return tuning.Choice(config and config._asdict())


@pytest.mark.parametrize(
    ("family", "dtype", "choices", "changes"),
    [
        ("llama", torch.bfloat16, Measured(), {}),
        ("llama", torch.float32, {}, ODD),
        ("gemma2", torch.bfloat16, {}, {}),
    ],
    ids=["measured", "odd sizes", "gemma2"],
)
def test_every_shape_of_a_server_launches_only_what_was_rehearsed(
    family: str, dtype: torch.dtype, choices: tuning.Choices, changes: dict[str, int]
) -> None:
    gpu = DryGpu(capture_tiny(tiny_config(family, **changes), dtype)[1], choices)
    by_shape = {shape: gpu.variants(shape) for shape in rehearsal_shapes()}
    rehearsed = frozenset[str]().union(*by_shape.values())
    assert len({by_shape[StepShape(n, n, n)] for n in (1, 2, 4, 8, 16, 32)}) >= 3, "shapes make no variants"
    for shape in sorted(shapes_of_a_server()):
        unknown = gpu.variants(shape) - rehearsed
        assert not unknown, (shape, sorted(unknown))


class OneWayEach(dict[StepClass, Way]):
    """A table in which neighbouring classes of attention go different ways."""

    def get(self, key: StepClass, default: Any = None) -> Any:
        ways: dict[tuple[str, int], Way] = {
            ("lone", 512): "triton",
            ("lone", 2048): "fa3",
            ("lone", 8192): "wgmma",
            ("mixed", 512): "fa3",
            ("mixed", 2048): "wgmma",
            ("mixed", 8192): "triton",
            ("decode", 64): "triton",
            ("decode", 128): "fa3",
            ("decode", 256): "triton",
        }
        return ways[key.kind, key.tokens]


def test_steps_about_the_bounds_of_measured_classes_launch_what_was_rehearsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fa3_attention, "_forward", lambda: lambda *_, **__: None)
    for name, value in {"is_hopper": lambda _: True, "box_map": lambda _: b"", "_BLOCKS": (4,)}.items():
        monkeypatch.setattr(wgmma_prefill, name, value)
    changes = {"hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    captured = capture_tiny(tiny_config("llama", **changes), torch.bfloat16)[1]
    ops = launchers(Measured(), OneWayEach())
    names = *tuning.OPS, *attention_choice.OPS
    gpu = DryGpu(captured, {}, {f"ostinato::{name}": ops[f"ostinato::{name}"] for name in names})
    rehearsed = frozenset[str]().union(*map(gpu.variants, rehearsal_shapes()))
    bounds = (1, 2, 3, 4, 5, 9, 17, 33, 64, 65, 128, 129, 192, 193, 256, 257, 512, 513, 2048, 2049, 8191)
    launched = set[str]()
    for tokens in bounds:
        for sequences in {1, 2, 33, min(tokens, 512)}:
            if sequences <= tokens:
                some = gpu.variants(StepShape(tokens, sequences, sequences))
                assert some <= rehearsed, (tokens, sequences, sorted(some - rehearsed))
                launched |= some
    for name in ("fa3_attention", "wgmma_prefill", "wgmma_linear", "paged_prefill"):
        assert any(name in key for key in launched), name


class LongPromptsByLibrary(dict[StepClass, Way]):
    """A table that sends lone prompts of 513 to 2048 tokens another way than all others."""

    def get(self, key: StepClass, default: Any = None) -> Any:
        return "fa3" if (key.kind, key.tokens) == ("lone", 2048) else default


def test_a_way_that_only_long_prompts_go_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3_attention, "_forward", lambda: lambda *_, **__: None)
    launch = partial(paged_attention._launch, choices=LongPromptsByLibrary())
    captured = capture_tiny(tiny_config("llama"), torch.bfloat16)[1]
    gpu = DryGpu(captured, {}, {"ostinato::paged_attention": launch})
    shapes = [shape for shape in rehearsal_shapes() if shape.tokens >= 512]
    by_shape = {shape: gpu.variants(shape) for shape in shapes}
    long = gpu.variants(StepShape(700, 1, 1))
    assert any("fa3_attention" in key for key in long)
    assert long <= frozenset().union(*by_shape.values())
    assert not any("fa3_attention" in key for key in by_shape[StepShape(512, 1, 1)])

"""Which kernels attend in a step: classes of steps, the way that an op takes, the table of an artifact."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.errors import ArtifactError
from ostinato.ops import attention_choice, fa3_attention, paged_attention, rope_attention, wgmma_prefill
from ostinato.ops.attention_choice import Asked, Attention, Measured, StepClass, Way, chosen

EIGHT_B = Attention(32, 8, 128, 128, 16, "bfloat16", 0, 0.0, False)
SMALL = Attention(4, 2, 16, 16, 4, "float32", 0, 0.0, False)
LONE = StepClass(EIGHT_B, "lone", 2048)
DECODE = StepClass(EIGHT_B, "decode", 64)


def inputs(num_tokens: int, of: Attention = SMALL) -> tuple[Tensor, Tensor, Tensor]:
    """q and planes, without memory."""
    dtype = getattr(torch, of.dtype)
    shape = 3, of.block_tokens, of.kv_heads
    sizes = (num_tokens, of.heads, of.k_size), (*shape, of.k_size), (*shape, of.v_size)
    q, k_cache, v_cache = (torch.empty(size, dtype=dtype, device="meta") for size in sizes)
    return q, k_cache, v_cache


@pytest.mark.parametrize(
    ("tokens", "sequences", "kind", "most"),
    [
        (256, 1, "lone", 512),
        (513, 1, "lone", 2048),
        (9000, 1, "lone", 8192),
        (512, 2, "mixed", 512),
        (8192, 8191, "mixed", 8192),
        (33, 33, "decode", 64),
        (256, 256, "decode", 256),
        (300, 300, "decode", 256),
    ],
)
def test_a_step_is_served_as_the_next_class_that_was_measured(
    tokens: int, sequences: int, kind: Any, most: int
) -> None:
    table: dict[StepClass, Way] = {StepClass(SMALL, kind, most): "fa3"}
    assert chosen(table, *inputs(tokens), sequences, 0, 0.0, None) == "fa3"


@pytest.mark.parametrize(("tokens", "sequences"), [(255, 1), (255, 3), (32, 32), (1, 1)])
def test_steps_of_few_tokens_ask_for_nothing(tokens: int, sequences: int) -> None:
    asked = Asked()
    assert chosen(asked, *inputs(tokens), sequences, 0, 0.0, None) is None
    assert not asked.attentions


def test_whatever_layers_differ_in_makes_another_class() -> None:
    asked = Asked()
    chosen(asked, *inputs(300, EIGHT_B), 1, 0, 0.0, None)
    assert asked.attentions == {EIGHT_B}
    chosen(asked, *inputs(300), 1, 0, 0.0, None)
    chosen(asked, *inputs(300), 1, 64, 0.0, None)
    chosen(asked, *inputs(300), 1, 0, 20.0, None)
    chosen(asked, *inputs(300), 1, 0, 0.0, torch.zeros(4))
    assert len(asked.attentions) == 5
    asked[StepClass(EIGHT_B, "lone", 512)] = "wgmma"
    assert chosen(asked, *inputs(300, EIGHT_B), 1, 0, 0.0, None) == "wgmma"


class Launches:
    """What stands for the kernels notes its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []

        def note(name: str) -> Any:
            return lambda *args, **kwargs: self.names.append(name)

        monkeypatch.setattr(fa3_attention, "launch", note("fa3"))
        monkeypatch.setattr(wgmma_prefill, "launch", note("wgmma"))
        monkeypatch.setattr(wgmma_prefill, "can_launch", lambda *args: True)
        monkeypatch.setattr(paged_attention, "decode", note("decode"))
        monkeypatch.setattr(paged_attention, "prefill", note("triton"))
        monkeypatch.setattr(rope_attention, "decode", note("together"))
        monkeypatch.setattr(rope_attention.rope_kv_write, "_launch", lambda q, *rest: q)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def step(num_tokens: int, num_seqs: int) -> tuple[Any, ...]:
    index = [torch.zeros(size, dtype=torch.int32, device="meta") for size in (num_seqs, num_seqs + 1)]
    return (
        *inputs(num_tokens),
        torch.zeros(num_seqs, 2, dtype=torch.int32, device="meta"),
        *index,
        0.3,
        0,
        0.0,
    )


@pytest.mark.parametrize(
    ("way", "tokens", "sequences", "expected"),
    [
        ("fa3", 300, 1, ["fa3"]),
        ("fa3", 300, 2, ["fa3"]),
        ("fa3", 64, 64, ["fa3"]),
        ("triton", 300, 1, ["triton"]),
        ("triton", 300, 2, ["decode", "triton"]),
        ("triton", 64, 64, ["decode"]),
        ("wgmma", 300, 2, ["decode", "wgmma"]),
        (None, 300, 2, ["decode", "wgmma"]),
        (None, 64, 64, ["decode"]),
    ],
)
def test_the_op_goes_the_way_that_was_chosen(
    launches: Launches, way: Way | None, tokens: int, sequences: int, expected: list[str]
) -> None:
    kind: Any = "decode" if tokens == sequences else "lone" if sequences == 1 else "mixed"
    key = StepClass(SMALL, kind, 64 if kind == "decode" else 512)
    paged_attention._launch(*step(tokens, sequences), choices={} if way is None else {key: way})
    assert launches.names == expected


def test_the_op_that_rotates_too_hands_the_choices_on(launches: Launches) -> None:
    table: dict[StepClass, Way] = {StepClass(SMALL, "decode", 64): "fa3"}

    def run(num_tokens: int) -> None:
        q, k_cache, v_cache, *rest = step(num_tokens, num_tokens)
        k, v = (torch.empty(num_tokens, 2, 16, device="meta") for _ in range(2))
        cos, sin = (torch.empty(num_tokens, 16, device="meta") for _ in range(2))
        slots = torch.zeros(num_tokens, dtype=torch.int64, device="meta")
        planes = k_cache, v_cache, slots, None, None, 1e-6, 0.0, True, False
        rope_attention._launch(q, k, v, cos, sin, *planes, *rest, choices=table)

    run(64)
    run(32)
    assert launches.names == ["fa3", "together"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is installed, and why it cannot be used."""
    found: dict[str, str | None] = {"version": "3.1", "reason": None}
    monkeypatch.setattr(fa3_attention, "installed_version", lambda: found["version"])
    monkeypatch.setattr(fa3_attention, "unavailable_reason", lambda: found["reason"])
    return found


def table(folder: Path, **ways: Way) -> None:
    measured = [
        Measured(step, way, {"wgmma": 30.0, "fa3": 20.5})
        for step, way in ((LONE, ways.get("lone")), (DECODE, ways.get("decode")))
        if way is not None
    ]
    attention_choice.write(folder, measured)


def test_an_artifact_gives_back_the_choices_that_were_written(
    tmp_path: Path, library: dict[str, str | None]
) -> None:
    table(tmp_path, lone="fa3", decode="triton")
    assert attention_choice.read(tmp_path) == {LONE: "fa3", DECODE: "triton"}
    told = json.loads((tmp_path / attention_choice.FILE).read_text())
    assert told["fa3"] == "3.1"
    assert told["choices"][0]["us"] == {"wgmma": 30.0, "fa3": 20.5}


def test_a_library_that_was_not_chosen_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("installed_version", "unavailable_reason"):
        monkeypatch.setattr(fa3_attention, name, lambda: pytest.fail("asked for"))
    table(tmp_path, lone="wgmma", decode="triton")
    assert attention_choice.read(tmp_path) == {LONE: "wgmma", DECODE: "triton"}


@pytest.mark.parametrize(
    ("version", "reason", "said"),
    [
        (
            "",
            None,
            r"tokenspeed-fa3 is not installed; pip install tokenspeed-fa3==3\.1, or compile the model",
        ),
        ("3.2", None, r"tokenspeed-fa3 3\.2 is installed; pip install tokenspeed-fa3==3\.1, or compile"),
        ("3.1", "it is broken", r"runs by tokenspeed-fa3, and it is broken; compile the model again"),
    ],
)
def test_an_artifact_that_needs_the_library_says_how_to_get_it(
    tmp_path: Path, library: dict[str, str | None], version: str, reason: str | None, said: str
) -> None:
    table(tmp_path, lone="fa3")
    library.update(version=version, reason=reason)
    with pytest.raises(ArtifactError, match=said):
        attention_choice.read(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"fa3": "", "choices": [{"way": "fa3"}]}', '{"fa3": "", "choices": 3}'],
)
def test_a_broken_table_is_an_artifact_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    (tmp_path / attention_choice.FILE).write_text(text)
    with pytest.raises(ArtifactError, match=r"attention\.json: .*compile the model again"):
        attention_choice.read(tmp_path)
    with pytest.raises(ArtifactError, match=r"attention\.json: .*compile the model again"):
        attention_choice.read(tmp_path / "nowhere")


def test_an_unknown_way_is_an_artifact_error(tmp_path: Path) -> None:
    table(tmp_path, lone="wgmma")
    path = tmp_path / attention_choice.FILE
    path.write_text(path.read_text().replace('"way": "wgmma"', '"way": "flashinfer"'))
    with pytest.raises(ArtifactError, match="way 'flashinfer' is none of triton, wgmma, fa3"):
        attention_choice.read(tmp_path)

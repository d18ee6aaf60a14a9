"""Which kernels attend fastest: steps that are measured, ways that are wrong or fail, and who wins."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ostinato.ops import attention_choice, fa3_attention, paged_attention, wgmma_prefill
from ostinato.ops.attention_choice import Asked, Attention, StepClass, Way
from ostinato.ops.paged_attention import paged_attention_reference
from ostinato.runtime.gpu import attention_tuning
from ostinato.runtime.gpu.attention_tuning import candidates, choose, classes, lengths_of, make_step, measure

CPU = torch.device("cpu")
SMALL = Attention(4, 2, 16, 16, 4, "bfloat16", 0, 0.0, False)
ALL: list[Way] = ["triton", "wgmma", "fa3"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """What is installed, and why it cannot be used."""
    found: dict[str, str | None] = {"version": "3.1", "reason": None}
    monkeypatch.setattr(fa3_attention, "installed_version", lambda: found["version"])
    monkeypatch.setattr(fa3_attention, "unavailable_reason", lambda: found["reason"])
    return found


def test_a_step_of_each_kind_is_as_a_server_forms_it() -> None:
    assert lengths_of(StepClass(SMALL, "lone", 2048), 4096) == ([2048], [2048], 2048)
    assert lengths_of(StepClass(SMALL, "decode", 64), 4096) == ([1024] * 64, [1] * 64, 64)
    padded = lengths_of(StepClass(SMALL, "mixed", 512), 4096)
    assert len(padded.total) == 256, "as many sequences as a captured step has room for"
    assert (padded.total[:2], padded.new[:2], padded.num_tokens) == ([472, 1024], [472, 1], 512)
    assert (sum(padded.new), padded.total[33:]) == (504, [0] * 223)
    large = lengths_of(StepClass(SMALL, "mixed", 2048), 4096)
    assert (large.new, sum(large.new)) == ([1024, 992] + [1] * 32, 2048)


def test_no_sequence_is_longer_than_the_model_s_window() -> None:
    for step in classes(SMALL, ALL, 600):
        lengths = lengths_of(step, 600)
        assert max(lengths.total) <= 600
        assert lengths.num_tokens == (min(step.tokens, 600) if step.kind == "lone" else step.tokens)
        assert sum(lengths.new) <= lengths.num_tokens
        assert all(new <= total for new, total in zip(lengths.new, lengths.total, strict=True))


@pytest.mark.parametrize(
    ("window", "lone"),
    [(100, [512]), (512, [512]), (513, [512, 2048]), (4096, [512, 2048, 8192]), (1 << 20, [512, 2048, 8192])],
)
def test_every_lone_prompt_that_fits_has_a_class(window: int, lone: list[int]) -> None:
    found = classes(SMALL, ALL, window)
    assert [step.tokens for step in found if step.kind == "lone"] == lone
    longest = StepClass(SMALL, "lone", lone[-1])
    assert lengths_of(longest, window).num_tokens == min(window, lone[-1])


def test_only_classes_with_several_ways_are_measured() -> None:
    assert classes(SMALL, ["triton"], 8192) == []
    assert {step.kind for step in classes(SMALL, ["triton", "wgmma"], 8192)} == {"lone", "mixed"}
    assert len(classes(SMALL, ["triton", "fa3"], 8192)) == 9


def test_ways_are_those_that_take_the_operands_here(
    library: dict[str, str | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wgmma_prefill, "is_hopper", lambda _: True)
    eight_b = Attention(32, 8, 128, 128, 16, "bfloat16", 0, 0.0, False)
    assert candidates(eight_b, CPU) == ALL
    assert candidates(SMALL, CPU) == ["triton", "fa3"]
    for changed in ({"window": 64}, {"softcap": 30.0}, {"has_sinks": True}, {"dtype": "float32"}):
        assert candidates(eight_b._replace(**changed), CPU) == ["triton"]
    assert not caplog.records
    library["reason"] = "it is broken"
    assert candidates(SMALL, CPU) == ["triton"]
    assert "attention runs by our own kernels: it is broken" in caplog.text


def test_a_library_that_is_not_installed_is_not_asked_for(
    library: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library["version"] = ""
    monkeypatch.setattr(fa3_attention, "unavailable_reason", lambda: pytest.fail("asked for"))
    assert candidates(SMALL, CPU) == ["triton"]


@pytest.mark.parametrize(
    ("us", "default", "expected"),
    [
        ({"triton": 50.0, "wgmma": 40.0, "fa3": 38.9}, "wgmma", "wgmma"),
        ({"triton": 50.0, "wgmma": 40.0, "fa3": 38.0}, "wgmma", "fa3"),
        ({"triton": 39.0, "wgmma": 40.0, "fa3": 38.5}, "wgmma", "wgmma"),
        ({"triton": 30.0, "wgmma": 40.0, "fa3": 29.5}, "wgmma", "triton"),
        ({"triton": 50.0, "fa3": 45.0}, "wgmma", "fa3"),
        ({"triton": 50.0}, "wgmma", "triton"),
        ({"fa3": 45.0}, "triton", "fa3"),
    ],
)
def test_the_rule_s_way_stays_unless_another_is_faster_by_more_than_noise(
    us: dict[Way, float], default: Way, expected: Way
) -> None:
    assert choose(us, default) == expected


class Kernels:
    """Every way attends by the reference, but for what a test says; the times are those that it gives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spoil: dict[Way, Callable[[Tensor], Tensor]] = {}
        self.ms: dict[Way, float] = {"triton": 5.0, "wgmma": 4.0, "fa3": 3.0}
        self.ran: list[Way] = []
        monkeypatch.setattr(attention_choice, "PREFILL", (48, 80))
        monkeypatch.setattr(attention_choice, "DECODE", (6,))
        monkeypatch.setattr(attention_tuning, "CONTEXT", 20)
        monkeypatch.setattr(attention_tuning, "_MOST_LAYERS", 2)
        monkeypatch.setattr(attention_tuning, "candidates", lambda attention, device: list(ALL))
        monkeypatch.setattr(attention_tuning, "captured", self._captured)
        monkeypatch.setattr(attention_tuning, "race", self._race)
        monkeypatch.setattr(paged_attention, "_launch", self._launch)

    def _launch(self, *args: Any, choices: Any) -> Tensor:
        way = choices.get(None)
        self.ran.append(way)
        out = paged_attention_reference(*args)
        return self.spoil[way](out) if way in self.spoil else out

    def _captured(self, call: Callable[[], object]) -> Way:
        call()
        return self.ran[-1]

    def _race(self, graphs: Sequence[Way], num_bytes: None, rounds: int, run_ms: float = 3.0) -> Any:
        assert num_bytes is None, "products take the time of a long prompt"
        return [[self.ms[way]] * rounds for way in graphs]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def asked() -> Asked:
    choices = Asked()
    choices.attentions.add(SMALL)
    return choices


def test_the_fastest_way_of_each_class_is_chosen_and_used_from_then_on(kernels: Kernels) -> None:
    choices = asked()
    measured = measure(choices, window=64, device=CPU)
    assert {(one.step.kind, one.step.tokens) for one in measured} == {
        ("lone", 48),
        ("lone", 80),  # by a prompt of 64 tokens
        ("mixed", 48),
        ("mixed", 80),
        ("decode", 6),
    }
    assert set(choices.values()) == {"fa3"}
    by_kind = {one.step.kind: one.us for one in measured}
    assert by_kind["lone"] == {"triton": 2500.0, "wgmma": 2000.0, "fa3": 1500.0}, "of one of two layers"
    assert "wgmma" not in by_kind["decode"]
    assert choices == {one.step: one.way for one in measured}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda out: out + 1,
            r"fa3 is left out for lone steps of 48 tokens, 4/2 heads of 16: its error is 1",
        ),
        (lambda out: out * float("nan"), "its error is nan"),
        (lambda out: out.fill_(1.0), "its error is"),
        (lambda out: out * 1.06, "its error is"),  # of the largest, where bf16 rounds by 0.004 of it
    ],
)
def test_a_way_that_is_wrong_is_left_out_with_a_warning(
    kernels: Kernels, caplog: pytest.LogCaptureFixture, spoil: Callable[[Tensor], Tensor], said: str
) -> None:
    kernels.spoil["fa3"] = spoil
    choices = asked()
    measure(choices, window=64, device=CPU)
    assert set(choices.values()) == {"wgmma", "triton"}
    assert said in caplog.text


def test_rows_that_no_sequence_has_must_be_zero(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> None:
    def spoil(out: Tensor) -> Tensor:
        out[-attention_tuning.SPARE] = 1.0  # the first of them
        return out

    kernels.spoil["fa3"] = spoil
    measure(asked(), window=64, device=CPU)
    assert (
        "mixed steps of 48 tokens, 4/2 heads of 16: rows past the last sequence are not zero" in caplog.text
    )


def test_a_way_that_fails_is_left_out_and_a_device_without_memory_measures_nothing(
    kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(error: Exception) -> Callable[[Tensor], Tensor]:
        def spoil(out: Tensor) -> Tensor:
            raise error

        return spoil

    kernels.spoil["fa3"] = fail(RuntimeError("no kernel image\nand more"))
    choices = asked()
    measure(choices, window=64, device=CPU)
    assert set(choices.values()) == {"wgmma", "triton"}
    assert "fa3 is left out for decode steps of 6 tokens, 4/2 heads of 16: no kernel image" in caplog.text
    kernels.spoil["fa3"] = fail(torch.OutOfMemoryError("out of memory"))
    choices = asked()
    assert measure(choices, window=64, device=CPU) == []
    assert not choices
    assert "attention of mixed steps of 80 tokens, 4/2 heads of 16 is not measured" in caplog.text


class CompilationError(Exception):
    """As Triton's: of no base that says more."""


def test_a_way_that_a_compiler_cannot_compile_is_left_out(
    kernels: Kernels, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(out: Tensor) -> Tensor:
        raise CompilationError("ptxas is not amused")

    kernels.spoil["triton"] = spoil
    choices = asked()
    measure(choices, window=64, device=CPU)
    assert set(choices.values()) == {"fa3"}
    assert "triton is left out for lone steps of 48 tokens, 4/2 heads of 16: ptxas" in caplog.text


def test_ways_that_cannot_be_found_cost_that_attention_alone(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def found(attention: Attention, device: torch.device) -> list[Way]:
        if attention == SMALL:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return ALL

    monkeypatch.setattr(attention_tuning, "candidates", found)
    choices, other = asked(), SMALL._replace(heads=6)
    choices.attentions.add(other)
    assert {one.step.attention for one in measure(choices, window=64, device=CPU)} == {other}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["attention of 4/2 heads of 16 is not measured: CUDA out of memory"]


def test_among_equals_prompts_keep_our_cuda_kernel_and_decodes_have_triton(kernels: Kernels) -> None:
    kernels.ms = {"triton": 3.95, "wgmma": 4.0, "fa3": 3.9}
    choices = asked()
    measure(choices, window=64, device=CPU)
    assert {(step.kind, way) for step, way in choices.items()} == {
        ("lone", "wgmma"),
        ("mixed", "wgmma"),
        ("decode", "triton"),
    }


def test_a_large_step_shares_blocks_instead_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tuning, "_MOST_BYTES", 20 * 4 * 2 * 32 * 2)
    monkeypatch.setattr(attention_tuning, "_MOST_LAYERS", 1)
    lengths = attention_tuning.Lengths([40] * 9, [1] * 9, 9)
    step = make_step(SMALL, lengths, 64, CPU)
    assert step.planes[0][0].shape == (20, 4, 2, 16)
    assert step.tables.shape == (9, 16)
    assert int(step.tables.max()) == 19
    monkeypatch.setattr(attention_tuning, "_MOST_BYTES", 1 << 30)
    assert len(make_step(SMALL, lengths, 64, CPU).tables[:, :10].unique()) == 9 * 10

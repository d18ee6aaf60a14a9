"""Measuring the linear layers of a model: with made-up times, kernels of the interpreter, and no GPU."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from ostinato.errors import CompileError
from ostinato.ops import kernel_store, skinny_linear, tuning
from ostinato.ops.kernel_store import STORE, Binary, Variant
from ostinato.ops.skinny_rows import Config
from ostinato.ops.skinny_ways import Way, choice_of
from ostinato.runtime.gpu import layer_tuning
from ostinato.runtime.gpu.layer_calls import Layer, LayerCall, layers_of
from ostinato.runtime.gpu.layer_tuning import Gpu, Tuned, choose, contests_of, tune_layers
from tests.runtime.gpu.test_layer_calls import gated, linear

pytest.importorskip("triton", reason="Triton exists for Linux only")
AMPERE = Gpu(capability=80, places=108, l2_bytes=1024)
USUAL = skinny_linear._config(1, 16, 16, torch.bfloat16)
FAST = Config(False, 4, 512, 2, 1)
OTHER = Config(False, 2, 1024, 4, 1)


def test_the_default_stays_unless_another_is_faster_by_more_than_noise() -> None:
    steady = [10.0, 10.1, 9.9, 10.0, 10.0]
    assert choose({USUAL: steady, FAST: [8.0] * 5, None: [9.0] * 5}, USUAL) == FAST
    assert choose({USUAL: steady, FAST: [9.5] * 5, None: [9.0] * 5}, USUAL) is None
    assert choose({USUAL: steady, FAST: steady, None: steady}, USUAL) == USUAL  # a tie
    assert choose({USUAL: [10.0] * 5, FAST: [9.95] * 5}, USUAL) == USUAL  # under a percent
    noisy = [9.0, 8.0, 10.5, 9.7, 11.0]
    assert choose({USUAL: [10.0, 9.0, 11.0, 10.5, 9.5], FAST: noisy}, USUAL) == USUAL
    assert choose({USUAL: [10.0, 9.0, 11.0, 10.5, 9.5], FAST: [9.6] * 5}, USUAL) == USUAL
    assert choose({FAST: [9.0] * 5, None: [8.0] * 5}, USUAL) is None  # the default was left out


class Stage:
    """Stands for a GPU: `us` says what a way takes, in us a call."""

    def __init__(self) -> None:
        self.us: Callable[[Way], float] = lambda way: 10.0
        self.asked: list[Variant] = []
        self.until = 0.0
        self.races: list[list[Way]] = []
        self.refused: set[str] = set()  # parts of keys that the compiler does not take
        self.late: set[str] = set()  # and of those for which there is no time
        self.carveouts: set[int] = set()

    def compile_all(
        self, variants: Sequence[Variant], capability: int, *, refused: dict[str, str], until: float
    ) -> Iterator[tuple[Binary, bytes]]:
        self.asked += variants
        self.until = until
        for variant in variants:
            if any(part in variant.key for part in self.refused):
                refused[variant.key] = "ptxas is not amused"
                continue
            if any(part in variant.key for part in self.late):
                continue
            binary = Binary(
                key=variant.key,
                symbol="k",
                threads=32,
                shared=0,
                params=(),
                launch_pdl=False,
                offset=0,
                size=0,
            )
            yield binary, b""

    def captured(self, call: Callable[[], object], pool: Any) -> Way:
        """The way that a chain goes stands for its graph."""
        self.carveouts.add(STORE.carveout)
        (way,) = (cell.cell_contents for cell in call.__closure__ or () if _is_choice(cell.cell_contents))
        if way.config is not None:
            return Config(**way.config)
        return None

    def race(self, graphs: Sequence[Way], num_bytes: None, rounds: int, run_ms: float) -> list[list[float]]:
        self.races.append([*graphs])
        return [[self.us(way) * 16 / 1e3] * rounds for way in graphs]  # calls in a chain


def _is_choice(value: object) -> bool:
    return isinstance(value, tuning.Choice)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage()
    monkeypatch.setattr(kernel_store, "capability_here", lambda: 80)
    monkeypatch.setattr(STORE, "_compiled", {})
    for name in ("compile_all", "captured", "race"):
        monkeypatch.setattr(layer_tuning, name, getattr(made, name))
    monkeypatch.setattr(layer_tuning, "new_pool", lambda: None)
    monkeypatch.setattr(layer_tuning, "_free_bytes", lambda: 1 << 30)
    ways: list[Way] = [USUAL, FAST, OTHER, None]
    monkeypatch.setattr(layer_tuning, "candidates", lambda *_: ways)
    monkeypatch.setattr(layer_tuning, "CLASSES", (1, 4))
    return made


@pytest.fixture
def layers() -> list[Layer]:
    return layers_of([linear(16, 16, norm=True, residual=at > 0) for at in range(4)])


def by_tokens(tuned: Tuned) -> dict[int, tuning.Choice]:
    return {row["tokens"]: tuning.Choice(row.get("config"), row.get("tile")) for row in tuned.rows}


def test_the_fastest_way_of_each_class_becomes_a_row_with_its_times(
    stage: Stage, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.us = {USUAL: 10.0, FAST: 7.0, OTHER: 8.0, None: 9.0}.__getitem__
    monkeypatch.setattr(STORE, "carveout", 37)
    tuned = tune_layers(layers, {}, AMPERE, 60.0)
    assert by_tokens(tuned) == {1: choice_of(FAST), 4: choice_of(FAST)}
    row = tuned.rows[0]
    assert (row["us"], row["default_us"], row["parts_us"]) == (7.0, 10.0, 9.0)
    assert (row["op"], row["out"], row["width"], row["dtype"]) == ("skinny_linear", 16, 16, "bfloat16")
    assert tuned.about == {"shapes": 2, "not_default": 2, "seconds": round(tuned.seconds, 1)}
    assert tuned.num_candidates == 8
    assert stage.carveouts == {50, 100}  # of one token, of more
    assert STORE.carveout == 37
    # three configurations, with and without a sum, for one token and for four
    assert tuned.num_variants == len(stage.asked) == 12


def test_the_parts_can_be_fastest_and_the_default_can_stay(stage: Stage, layers: list[Layer]) -> None:
    stage.us = {USUAL: 10.0, FAST: 9.0, OTHER: 9.0, None: 5.0}.__getitem__
    assert by_tokens(tune_layers(layers, {}, AMPERE, 60.0)) == dict.fromkeys((1, 4), tuning.BY_PARTS)
    stage.us = {USUAL: 10.0, FAST: 9.95, OTHER: 12.0, None: 9.96}.__getitem__
    tuned = tune_layers(layers, {}, AMPERE, 60.0)
    assert by_tokens(tuned) == dict.fromkeys((1, 4), choice_of(USUAL))
    assert tuned.about["not_default"] == 0


def test_after_a_look_the_best_two_race_with_the_default_and_the_parts(
    stage: Stage, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = USUAL._replace(rows=16)
    monkeypatch.setattr(layer_tuning, "candidates", lambda *_: [USUAL, slow, OTHER, FAST, None])
    stage.us = {USUAL: 10.0, FAST: 7.0, OTHER: 8.0, slow: 8.5, None: 9.0}.__getitem__
    tune_layers(layers, {layers[0].shape(1): tuning.BY_PARTS}, AMPERE, 60.0)
    looks, final = stage.races
    assert looks == [slow, OTHER, FAST]
    assert sorted(map(str, final)) == sorted(map(str, [USUAL, FAST, OTHER, None]))


def test_most_of_the_time_is_for_compiling_and_the_rest_for_races(
    stage: Stage, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_tuning.time, "monotonic", lambda: 1000.0)
    tune_layers(layers, {}, AMPERE, 100.0)
    assert stage.until == 1060.0


def test_only_what_the_table_lacks_is_measured(stage: Stage, layers: list[Layer]) -> None:
    known = {layers[0].shape(1): tuning.BY_PARTS}
    assert by_tokens(tune_layers(layers, known, AMPERE, 60.0)).keys() == {4}
    known[layers[0].shape(4)] = tuning.BY_PARTS
    stage.asked.clear()
    assert tune_layers(layers, known, AMPERE, 60.0).num_candidates == 0
    assert stage.asked == []


@pytest.mark.parametrize("off", [9.0, float("nan")])
def test_a_wrong_candidate_is_named_and_never_taken(
    stage: Stage, layers: list[Layer], off: float,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    right = skinny_linear._launch

    def launch(x: torch.Tensor, *rest: Any, choices: tuning.Choices) -> torch.Tensor:
        y = right(x, *rest, choices=choices)
        is_fast = choices.get(layers[0].shape(1)) == choice_of(FAST)
        return torch.cat([y[:, :-1], y[:, -1:] + off], 1) if is_fast else y

    monkeypatch.setattr(skinny_linear, "_launch", launch)
    stage.us = {USUAL: 10.0, FAST: 1.0, OTHER: 8.0, None: 9.0}.__getitem__
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers(layers, {}, AMPERE, 60.0)
    assert by_tokens(tuned) == dict.fromkeys((1, 4), choice_of(OTHER))
    assert len(caplog.messages) == 2
    assert f"skinny_linear 16 x 16 bfloat16, 1 tokens: {FAST} is left out: its relative error" in caplog.text


def test_candidates_that_fail_or_cannot_be_compiled_are_left_out(
    stage: Stage, layers: list[Layer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = stage.captured

    def captured(call: Callable[[], object], pool: Any) -> Way:
        way = usual(call, pool)
        if way == OTHER:
            raise RuntimeError("CUDA error: too many resources\nmore")
        return way

    monkeypatch.setattr(layer_tuning, "captured", captured)
    stage.refused = {"BLOCK_R=4"}
    stage.us = {USUAL: 10.0, FAST: 1.0, OTHER: 2.0, None: 9.0}.__getitem__
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers(layers, {}, AMPERE, 60.0)
    assert by_tokens(tuned) == dict.fromkeys((1, 4), tuning.BY_PARTS)
    assert f"{FAST} is left out: ptxas is not amused" in caplog.text
    assert f"{OTHER} is left out: CUDA error: too many resources" in caplog.text
    assert len(caplog.messages) == 4


def test_what_was_not_compiled_in_time_does_not_race(stage: Stage, layers: list[Layer]) -> None:
    stage.late = {f"BLOCK_R={FAST.rows}"}
    stage.us = {USUAL: 10.0, FAST: 1.0, OTHER: 2.0, None: 9.0}.__getitem__
    tuned = tune_layers(layers, {}, AMPERE, 60.0)
    assert by_tokens(tuned) == dict.fromkeys((1, 4), choice_of(OTHER))
    assert not any(FAST in graphs for graphs in stage.races)
    assert (tuned.num_variants, len(stage.asked)) == (8, 12)


def test_a_default_that_cannot_be_compiled_has_no_contest(
    stage: Stage, layers: list[Layer], caplog: pytest.LogCaptureFixture
) -> None:
    assert USUAL.rows not in (FAST.rows, OTHER.rows)
    stage.refused = {f"BLOCK_R={USUAL.rows}"}
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers(layers, {}, AMPERE, 60.0)
    assert (tuned.rows, stage.races) == ([], [])
    assert caplog.messages[-1].endswith("(2: too few candidates could be compiled)")


def no_memory(*_: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


def no_compiler(*_: object, **__: object) -> Any:
    raise CompileError("kernel k could not be compiled: a worker died")


@pytest.mark.parametrize(
    ("name", "failing", "said"),
    [
        ("_free_bytes", lambda: 0, "0 MiB are free for copies"),
        ("captured", no_memory, "CUDA out of memory. Tried to allocate 2 GiB"),
        ("compile_all", no_compiler, "a worker died"),
        ("truth", lambda *_: torch.full((4, 16), float("nan")), "its weights give no finite numbers"),
    ],
    ids=["memory for copies", "memory for a capture", "compiler", "weights"],
)
def test_what_cannot_be_measured_keeps_the_default_with_one_warning(
    name: str, failing: Callable[..., Any], said: str, stage: Stage, layers: list[Layer],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(layer_tuning, name, failing)
    few = [layers[0]._replace(calls=layers[0].calls[:1])]
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers(few, {}, AMPERE, 60.0)
    assert tuned.rows == []
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("2 of 2 shapes of linear layers keep ways that nobody measured (2: ")
    assert said in caplog.messages[0]


def test_a_layer_that_fails_leaves_the_others_their_turn(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wide, narrow = layers_of([linear(32, 16), linear(16, 16)])
    usual = layer_tuning.truth

    def truth(call: LayerCall, *inputs: torch.Tensor) -> torch.Tensor:
        if call.weight.shape[0] == 32:
            raise RuntimeError("cublas is not amused")
        return usual(call, *inputs)

    monkeypatch.setattr(layer_tuning, "truth", truth)
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers([wide, narrow], {}, AMPERE, 60.0)
    assert [(row["tokens"], row["out"]) for row in tuned.rows] == [(1, 16), (4, 16)]
    assert caplog.messages == [
        "2 of 4 shapes of linear layers keep ways that nobody measured (2: cublas is not amused)"
    ]


def test_a_device_that_computes_no_more_is_counted_for_all_layers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("CUDA error: an illegal address")

    monkeypatch.setattr(layer_tuning, "truth", broken)
    calls = iter((lambda: None, broken))  # of the cache: before the first layer, and behind it
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: next(calls)())
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers(layers_of([linear(32, 16), linear(16, 16)]), {}, AMPERE, 60.0)
    assert tuned.rows == []
    assert caplog.messages == [
        "4 of 4 shapes of linear layers keep ways that nobody measured (4: CUDA error: an illegal address)"
    ]


def test_without_its_parts_a_layer_keeps_its_default(
    stage: Stage, layers: list[Layer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usual = stage.captured

    def captured(call: Callable[[], object], pool: Any) -> Way:
        if (way := usual(call, pool)) is None:
            raise RuntimeError("cublas is not amused")
        return way

    monkeypatch.setattr(layer_tuning, "captured", captured)
    with caplog.at_level(logging.WARNING):
        assert tune_layers(layers, {}, AMPERE, 60.0).rows == []
    assert "1 tokens: by parts is left out: cublas is not amused" in caplog.messages[0]
    assert caplog.messages[-1].endswith("(2: its parts cannot be computed)")


def test_when_time_is_over_the_rest_keeps_its_default(
    stage: Stage, layers: list[Layer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    monkeypatch.setattr(layer_tuning.time, "monotonic", lambda: clock[0])
    usual = stage.race

    def race(*args: Any) -> list[list[float]]:
        clock[0] += 2.0
        return usual(*args)

    monkeypatch.setattr(layer_tuning, "race", race)
    with caplog.at_level(logging.WARNING):
        tuned = tune_layers(layers, {}, AMPERE, 3.0)
    assert by_tokens(tuned).keys() == {1}
    assert caplog.messages == [
        "1 of 2 shapes of linear layers keep ways that nobody measured (1: graph.tune_s was over)"
    ]


@pytest.mark.parametrize(("capability", "most"), [(80, 16), (90, 256)])
def test_the_classes_of_a_gpu_are_those_that_it_has_kernels_for(capability: int, most: int) -> None:
    layers = layers_of([gated(32, 64), linear(64, 64, dtype=torch.float32)])
    found = contests_of(layers, {}, Gpu(capability, 132, 1 << 20))
    by_op: dict[str, list[int]] = {}
    for contest in found:
        by_op.setdefault(contest.layer.op, []).append(contest.num_tokens)
        assert len(contest.ways) > 1
    assert by_op["skinny_linear"] == [1, 2, 4, 8, 16]  # float32 has no tiles
    assert by_op["skinny_gated"] == [1, 2, 4, 8, 16]  # nor has a CPU

"""The skinny layers of one model measured on the GPU that compiles it, as far as its table has no row.

What a table lacks is a layer and a number of tokens; each has candidates (`layer_candidates`). All are
compiled by several processes at once, checked against the op's reference in higher precision, and captured as
chains of calls whose weights are not in L2 (`layer_calls`). The graphs take turns: a look at all, then a
final of the default, the parts and the best two others. The default stays unless another is faster by more
than noise.
Nothing here fails a compile: what cannot be measured keeps its default, and one warning says why.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ostinato.errors import EngineError
from ostinato.ops import tuning, wgmma_linear
from ostinato.ops.kernel_store import STORE, Variant
from ostinato.ops.skinny_ways import Way, choice_of, most_tokens
from ostinato.ops.tuning import CLASSES
from ostinato.runtime.gpu.gpu_backend import step_carveout
from ostinato.runtime.gpu.graph_race import captured, new_pool, race
from ostinato.runtime.gpu.kernel_workers import compile_all
from ostinato.runtime.gpu.layer_calls import Layer, LayerCall, chain_of, error_of, truth
from ostinato.runtime.gpu.layer_candidates import candidates

log = logging.getLogger(__name__)

MIN_GAIN = 0.01  # of the default's time: less is not worth another way
COMPILE_SHARE = 0.6  # of the time, after which no candidate's compilation is begun
_LOOKS, _LOOK_MS = 2, 1.0
_ROUNDS, _FINAL_MS = 7, 2.0
_FAILURES = (EngineError, RuntimeError, ValueError)  # of one candidate; torch's errors are RuntimeErrors
_OUT_OF_TIME = "graph.tune_s was over"


class Gpu(NamedTuple):
    """What of a device decides what is measured."""

    capability: int
    places: int  # multiprocessors
    l2_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Gpu:
        """Of a real one."""
        found = torch.cuda.get_device_properties(device)
        return cls(found.major * 10 + found.minor, found.multi_processor_count, found.L2_cache_size)


class Tuned(NamedTuple):
    """What a measurement gave."""

    rows: list[dict[str, Any]]  # as `tuning.row`
    num_candidates: int
    num_variants: int  # of kernels, compiled for them
    compile_s: float
    seconds: float  # in all

    @property
    def about(self) -> dict[str, Any]:
        """As `tuning.measured` has it."""
        others = sum(row["us"] != row["default_us"] for row in self.rows if "default_us" in row)
        return {"shapes": len(self.rows), "not_default": others, "seconds": round(self.seconds, 1)}


class _Contest(NamedTuple):
    """A row to be: a layer, a number of tokens, and its candidates, the default first."""

    layer: Layer
    num_tokens: int
    ways: list[Way]

    def __str__(self) -> str:
        return f"{self.layer}, {self.num_tokens} tokens"


class _Inputs(NamedTuple):
    """Of a layer, for the most tokens that it is measured with."""

    x_TK: Tensor
    residual_TN: Tensor

    @classmethod
    def of(cls, layer: Layer, num_tokens: int) -> _Inputs:
        weight = layer.calls[0].weight
        draw = torch.Generator(weight.device).manual_seed(0)
        x_TK, residual_TN = (
            torch.randn(num_tokens, size, generator=draw, device=weight.device).to(layer.dtype)
            for size in (layer.width, layer.out)
        )
        return cls(x_TK, residual_TN)

    def first(self, num_tokens: int) -> _Inputs:
        return _Inputs(*(rows[:num_tokens] for rows in self))


def tune_layers(layers: Sequence[Layer], choices: tuning.Choices, gpu: Gpu, seconds: float) -> Tuned:
    """Measure what `choices` lacks, in about `seconds` at most: what is under way then is finished."""
    began = time.monotonic()
    contests = contests_of(layers, choices, gpu)
    num_candidates = sum(len(contest.ways) for contest in contests)
    why: Counter[str] = Counter()  # shapes keep their default
    rows: list[dict[str, Any]] = []
    num_variants, compiled = 0, began
    try:
        with torch.inference_mode(), _same_carveout_after():
            ready, num_variants = _compile(contests, gpu, began + COMPILE_SHARE * seconds, why)
            compiled = time.monotonic()
            for layer in layers:
                mine = [contest for contest in ready if contest.layer is layer]
                rows += _measure(mine, gpu, began + seconds, why)
    except _FAILURES as error:
        why[_said(error)] += len(contests) - len(rows) - why.total()
    if why:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in why.items())
        log.warning(
            "%d of %d shapes of linear layers keep ways that nobody measured (%s)",
            len(contests) - len(rows),
            len(contests),
            reasons,
        )
    return Tuned(rows, num_candidates, num_variants, compiled - began, time.monotonic() - began)


def contests_of(layers: Sequence[Layer], choices: tuning.Choices, gpu: Gpu) -> list[_Contest]:
    """Whatever has no row and more than one candidate."""
    found = []
    for layer in layers:
        call = layer.calls[0]
        activation = call.rest[-1] if layer.op == "skinny_gated" else ""
        takes_tiles = wgmma_linear.can_launch(call.weight.new_empty(2, layer.width), call.weight, activation)
        places = gpu.places if takes_tiles else 0
        for num_tokens in CLASSES:
            if num_tokens <= most_tokens(gpu.capability) and layer.shape(num_tokens) not in choices:
                ways = candidates(layer.op, num_tokens, layer.out, layer.width, layer.dtype, places)
                if len(ways) > 1:
                    found.append(_Contest(layer, num_tokens, ways))
    return found


def choose(samples: Mapping[Way, Sequence[float]], default: Way) -> Way:
    """The fastest; the default, unless that gains more than `MIN_GAIN` and more than both vary."""
    best = min(samples, key=lambda way: statistics.median(samples[way]))
    if default not in samples:
        return best
    usual = statistics.median(samples[default])
    gain = usual - statistics.median(samples[best])
    return (
        best if gain > max(MIN_GAIN * usual, _spread(samples[default]) + _spread(samples[best])) else default
    )


def _compile(
    contests: Sequence[_Contest], gpu: Gpu, until: float, why: Counter[str]
) -> tuple[list[_Contest], int]:
    """Contests of what can be launched now, and how many variants were compiled for them."""
    needs: dict[tuple[int, Way], list[Variant]] = {}
    for at, contest in enumerate(contests):
        inputs = _Inputs.of(contest.layer, contest.num_tokens)
        forms = {call.form: call for call in contest.layer.calls}
        STORE.carveout = step_carveout(contest.num_tokens)
        for way in contest.ways:
            with STORE.recording(is_dry=True) as noted:
                try:
                    for call in forms.values():
                        call(*inputs, choice_of(way))
                except torch.OutOfMemoryError:
                    raise
                except _FAILURES as error:
                    _leave_out(contest, way, _said(error))
                    continue
            needs[at, way] = list(noted.variants.values())
    variants = {variant.key: variant for some in needs.values() for variant in some}
    wanted = STORE.missing(variants.values())
    refused: dict[str, str] = {}
    for binary, cubin in compile_all(wanted, gpu.capability, refused=refused, until=until):
        STORE.add(binary, cubin)
    ready = []
    for at, contest in enumerate(contests):
        ways = []
        for way in contest.ways:
            missing = [variant.key for variant in STORE.missing(needs.get((at, way), []))]
            if reason := next((refused[key] for key in missing if key in refused), None):
                _leave_out(contest, way, reason)
            elif not missing and (at, way) in needs:
                ways.append(way)
        if len(ways) > 1 and ways[0] == contest.ways[0] and None in ways:
            ready.append(contest._replace(ways=ways))
        else:
            why[_OUT_OF_TIME if time.monotonic() >= until else "too few candidates could be compiled"] += 1
    return ready, len(wanted) - len(STORE.missing(wanted))


def _measure(contests: Sequence[_Contest], gpu: Gpu, until: float, why: Counter[str]) -> list[dict[str, Any]]:
    """Rows of one layer. What it takes of the device is free again behind it."""
    rows: list[dict[str, Any]] = []
    if contests and time.monotonic() < until:
        try:
            _fill(rows, contests, gpu, until)
        except _FAILURES as error:  # of this layer; the others have their turn
            why[_said(error)] += len(contests) - len(rows)
            contests = contests[: len(rows)]
        torch.cuda.empty_cache()
    if left := len(contests) - len(rows):
        why[_OUT_OF_TIME] += left
    return rows


def _fill(rows: list[dict[str, Any]], contests: Sequence[_Contest], gpu: Gpu, until: float) -> None:
    layer = contests[0].layer
    torch.cuda.empty_cache()
    chain = chain_of(layer, gpu.l2_bytes, _free_bytes() // 2)
    inputs = _Inputs.of(layer, max(contest.num_tokens for contest in contests))
    right = truth(chain[0], *inputs)
    for contest in contests:
        if time.monotonic() < until:
            some = inputs.first(contest.num_tokens)
            rows.append(_row(contest, chain, some, right[: contest.num_tokens]))


def _row(contest: _Contest, chain: Sequence[LayerCall], inputs: _Inputs, right_TN: Tensor) -> dict[str, Any]:
    STORE.carveout = step_carveout(contest.num_tokens)
    limit = 4 * error_of(chain[0](*inputs, tuning.BY_PARTS), right_TN)
    limit += torch.finfo(inputs.x_TK.dtype).eps / 4  # a value that is left out of thousands is more
    if not limit < 1:
        raise ValueError("its weights give no finite numbers")
    pool, graphs = new_pool(), {}
    for way in contest.ways:
        choice = choice_of(way)
        try:
            error = _error(chain[0], inputs, choice, right_TN)
            if not error <= limit:
                _leave_out(contest, way, f"its relative error is {error:.3g}, and {limit:.3g} is allowed")
                continue
            graphs[way] = captured(lambda: _run(chain, inputs, choice), pool)  # noqa: B023  # called at once
        except torch.OutOfMemoryError:
            raise
        except _FAILURES as failure:
            _leave_out(contest, way, _said(failure))
    if None not in graphs:
        raise ValueError("its parts cannot be computed")
    default = contest.ways[0]
    others = [way for way in graphs if way not in (default, None)]
    looks = race([graphs[way] for way in others], None, _LOOKS, _LOOK_MS)
    order = sorted(range(len(others)), key=lambda at: min(looks[at]))
    finalists = [way for way in graphs if way in (default, None)] + [others[at] for at in order[:2]]
    finals = race([graphs[way] for way in finalists], None, _ROUNDS, _FINAL_MS)
    samples = dict(zip(finalists, finals, strict=True))
    chosen = choose(samples, default)
    us = {way: statistics.median(took) * 1e3 / len(chain) for way, took in samples.items()}
    times = {"us": us[chosen], "parts_us": us[None]} | ({"default_us": us[default]} if default in us else {})
    return tuning.row(contest.layer.shape(contest.num_tokens), choice_of(chosen), **times)


def _run(chain: Sequence[LayerCall], inputs: _Inputs, choice: tuning.Choice) -> None:
    for call in chain:
        call(*inputs, choice)


def _error(call: LayerCall, inputs: _Inputs, choice: tuning.Choice, right_TN: Tensor) -> float:
    """Of one way. Its output is likely to lie where NaN was, so that a value not written is seen."""
    torch.full_like(inputs.residual_TN, float("nan"))
    return error_of(call(*inputs, choice), right_TN)


def _leave_out(contest: _Contest, way: Way, reason: str) -> None:
    log.warning("%s: %s is left out: %s", contest, "by parts" if way is None else way, reason)


def _spread(samples: Sequence[float]) -> float:
    """Median distance from the median."""
    middle = statistics.median(samples)
    return statistics.median(abs(sample - middle) for sample in samples)


def _said(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _free_bytes() -> int:
    free, _ = torch.cuda.mem_get_info()
    return free


@contextmanager
def _same_carveout_after() -> Iterator[None]:
    before = STORE.carveout
    try:
        yield
    finally:
        STORE.carveout = before

"""Thinking budgets through the GPU's back end, two steps in flight: the device's rows over CPU memory."""

from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.engine import Engine
from ostinato.runtime.messages import GenerateRequest, ThoughtBlock, Thoughts
from ostinato.runtime.scheduling.plan import PENDING, Plan
from tests.runtime.gpu.test_bad_words_behind import Sampling
from tests.support.engine_runs import generate
from tests.support.grammar_runs import TEXT, ids_of, toy_folder
from tests.support.no_gpu import HostEngine, NoModel, config, request

FIRST, SECOND, THIRD = 5, 9, 12  # by likelihood, in every row


def text(token: int) -> str:
    return TEXT.decode([token])


class Noted(Sampling):
    plans: list[Plan]

    def launch(self, plan: Plan, limits: Any = ()) -> Any:
        self.plans.append(plan)
        return super().launch(plan, limits or {})


class NotedEngine(HostEngine):
    noted: Noted

    def _make_backend(self, model: Any, window: int, stream: Any) -> Any:
        self.noted = Noted(model, self._memory.planes(), self._config, window)
        self.noted.plans = []
        return self.noted


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    model = NoModel()
    model.folder = toy_folder(tmp_path)
    with NotedEngine(model, config()) as engine:
        yield engine
        engine.check()


def asked(name: str, tokens: int, thoughts: Thoughts | None, **sampling: Any) -> GenerateRequest:
    made = None if thoughts is None else thoughts.model_dump()
    return request(name, tokens, prompt=3, **{"temperature": 0.0, "thoughts": made, **sampling})


def budget(tokens: int, closing: list[int], start: str = "<t>", **fields: Any) -> Thoughts:
    block = ThoughtBlock(start=start, closing=tuple(closing))
    return Thoughts(**{"budget": tokens, "blocks": (block,), "ends": (text(closing[-1]),), **fields})


def test_tokens_are_forced_and_barred_where_they_must_be(engine: Engine):
    closing = [*ids_of("so "), THIRD]
    got = generate(
        engine,
        asked("free", 12, None),
        asked("begun", 12, budget(4, closing, begun=0)),
        asked("none", 8, budget(0, closing, begun=0)),
        asked("begins", 12, budget(3, [THIRD], text(FIRST), anywhere=True)),
        asked("barred", 6, budget(0, [THIRD], text(FIRST), anywhere=True)),
        asked("against", 9, budget(2, closing, begun=0), logit_bias={THIRD: -100.0}, min_tokens=8),
        asked(
            "penalties", 9, budget(2, [THIRD], begun=0), presence_penalty=2.0, bad_word_ids=((THIRD,) * 2,)
        ),
    )
    rest = len(closing)
    assert got["free"] == [FIRST] * 12
    assert got["begun"] == [FIRST] * 4 + closing + [FIRST] * (8 - rest)
    assert got["none"] == closing + [FIRST] * (8 - rest)
    assert got["begins"] == [FIRST] * 4 + [THIRD] + [SECOND] * 7
    assert got["barred"] == [SECOND] * 6
    assert got["against"] == [FIRST] * 2 + closing + [FIRST] * (7 - rest)
    assert got["penalties"][:3] == [FIRST, SECOND, THIRD]


def test_only_the_border_of_a_budget_costs_a_step(engine: NotedEngine):
    closing = [*ids_of("so "), THIRD]
    generate(engine, asked("r", 60, budget(30, closing, begun=0)))
    known = [entry.output_index for plan in engine.noted.plans for entry in plan.entries]
    waited = [
        entry.output_index
        for plan in engine.noted.plans
        for entry in plan.entries
        if PENDING not in entry.token_ids
    ]
    assert known == list(range(60))
    # the first token; the first forced one; and behind the closing, until the answer has begun
    assert waited == [0, 30, 30 + len(closing) + 1]

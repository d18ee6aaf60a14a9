"""Engines on the toy model that know the toy tokenizer, so that they can follow grammars."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ostinato.runtime.engine import Engine
from ostinato.runtime.grammar.grammar_compiler import GrammarCompiler
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.sampling.sampler import SampledBatch
from ostinato.runtime.scheduling.plan import PENDING, Plan
from ostinato.runtime.step_backend import CpuBackend, StepBackend
from ostinato.runtime.token_limits import NO_LIMITS, Limit
from tests.support import toy_text
from tests.support.engine_runs import prompt_of, toy_config
from tests.support.toy_model import EOS, FACTS, VOCAB, ToyModel

TEXT = toy_text.front_end()


def toy_folder(path: Path) -> Path:
    """An artifact's folder as far as grammars look at it."""
    (path / "tokenizer").mkdir(parents=True, exist_ok=True)
    (path / "tokenizer" / "tokenizer.json").write_text(toy_text.tokenizer_json(), encoding="utf-8")
    return path


def toy_compiler(path: Path) -> GrammarCompiler:
    return GrammarCompiler(toy_folder(path) / "tokenizer" / "tokenizer.json", VOCAB, (EOS,))


def ids_of(text: str) -> list[int]:
    return TEXT.encode(text, add_special_tokens=False)


def text_of(tokens: list[int]) -> str:
    return TEXT.decode(tokens)


def asked(name: str, max_tokens: int = 200, **sampling: Any) -> GenerateRequest:
    """Random tokens of the toy model, by seed, as a grammar allows."""
    params = {"max_tokens": max_tokens, "seed": 1, "temperature": 1.0, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt_of(9, seed=len(name))),
        sampling=SamplingParams.model_validate(params),
    )


class LateBackend(CpuBackend):
    """Two steps in flight, as on a GPU: the device knows at once what it samples, the host a step later."""

    max_in_flight = 2

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._newest: dict[str, int] = {}
        self.plans: list[tuple[Plan, frozenset[str]]] = []

    def launch(self, plan: Plan, limits: Mapping[str, Limit] = NO_LIMITS) -> Any:
        self.plans.append((plan, frozenset(limits)))
        entries = [
            entry._replace(
                token_ids=tuple(
                    self._newest[entry.request_id] if t == PENDING else t for t in entry.token_ids
                )
            )
            for entry in plan.entries
        ]
        step = super().launch(plan._replace(entries=tuple(entries)), limits)
        self._newest.update(step.result().tokens)
        return _Late(plan, step.result())


class _Late:
    def __init__(self, plan: Plan, batch: SampledBatch) -> None:
        self.plan, self._batch = plan, batch

    def result(self) -> SampledBatch:
        return self._batch


class LateEngine(Engine):
    """The engine one step behind its device, on a CPU."""

    late: LateBackend

    def _make_backend(self, model: Any, window: int, stream: torch.cuda.Stream | None) -> StepBackend:
        self.late = LateBackend(
            model,
            self._memory.planes(),
            block_tokens=self._config.kv.block_tokens,
            vocab_size=FACTS.vocab_size,
            eos_token_ids=frozenset(FACTS.eos_token_ids),
        )
        return self.late


def grammar_engine(path: Path, kind: type[Engine] = Engine, **settings: Any) -> Engine:
    return kind(ToyModel(toy_folder(path)), toy_config(**settings))

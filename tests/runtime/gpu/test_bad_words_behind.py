"""Bad words of several tokens where the host is one step behind: the device knows the token before."""

from typing import Any, cast

import torch

from ostinato.runtime.frames import Events
from ostinato.runtime.gpu.step_graphs import Replay
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.runner import StepShape
from ostinato.runtime.sampling.sampler import Sampler, SampleRow
from tests.support.no_gpu import FACTS, HostEngine, NoGpuBackend, NoModel, config, request

WANTED = {
    "plain": {},
    "pair": {"bad_word_ids": ((5, 5),)},
    "triple": {"bad_word_ids": ((5, 5, 5), (9, 5))},
    "early": {"bad_word_ids": ((5, 5), (5, 9)), "min_tokens": 4},
    "single": {"bad_word_ids": ((5,),)},
}


class Sampling(NoGpuBackend):
    """Every row has the same logits: 5 before 9 before 12 before EOS; they are really sampled."""

    def logits(self, rows: int) -> torch.Tensor:
        logits = torch.zeros(rows, FACTS.vocab_size)
        for rank, token in enumerate((1, 12, 9, 5), 1):
            logits[:, token] = rank
        return logits

    def _replay(self, shape: StepShape) -> Replay:
        out, logits = self._output(shape.logit_rows), self.logits(shape.logit_rows)

        class Graph:
            @staticmethod
            def replay() -> None:
                _, samples = self._buffers.inputs(shape)
                self._sampler.launch(logits, samples, out.tokens, out.status, self._last_tokens)

        return Replay(cast("torch.cuda.CUDAGraph", Graph()), logits)


class SamplingEngine(HostEngine):
    def _make_backend(self, model: Any, window: int, stream: Any) -> Any:
        return Sampling(model, self._memory.planes(), self._config, window)


def by_the_cpu(name: str, params: SamplingParams, prompt: tuple[int, ...], logits: torch.Tensor) -> list[int]:
    sampler, tokens = Sampler(FACTS.vocab_size, frozenset(FACTS.eos_token_ids)), list(prompt)
    for position in range(params.max_tokens or 0):
        row = SampleRow(name, params, 1, position, tokens, len(prompt))
        tokens.append(sampler.sample(logits, [row]).tokens[name])
    return tokens[len(prompt) :]


def test_answers_equal_those_of_the_cpu_sampler_with_two_steps_in_flight():
    with SamplingEngine(NoModel(), config()) as engine:
        assert engine._backend.max_in_flight == 2
        asked = {
            name: request(name, 9, prompt=3, temperature=0.0, **sampling) for name, sampling in WANTED.items()
        }
        for one in asked.values():
            engine.inbox.put(one)
        answers: dict[str, list[int]] = {name: [] for name in WANTED}
        while True:
            for message in engine.step():
                assert isinstance(message, Events)
                for event in message.events:
                    answers[event.request_id] += event.token_ids
            if not engine.has_work:
                break
        logits = cast(Sampling, engine._backend).logits(1)
        engine.check()
    for name, one in asked.items():
        assert answers[name] == by_the_cpu(name, one.sampling, one.prompt_token_ids, logits), name
    assert answers["pair"] == [5, 9, 5, 9, 5, 9, 5, 9, 5]
    assert answers["triple"] == [5, 5, 9, 9, 9, 9, 9, 9, 9]
    assert 5 not in answers["single"]

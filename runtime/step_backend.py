"""What the engine needs of a device: plans in, sampled tokens out, perhaps with a step still under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ostinato.runtime.messages import GenerateRequest, TokenLogprob
from ostinato.runtime.runner import Model, Runner
from ostinato.runtime.sampling.sampler import SampledBatch
from ostinato.runtime.sampling.step_sampler import StepSampler
from ostinato.runtime.scheduling.plan import Plan
from ostinato.runtime.token_limits import NO_LIMITS, Limit


class LaunchedStep(Protocol):
    """A step that was given to the device."""

    @property
    def plan(self) -> Plan:
        """What it computes."""
        ...

    def result(self) -> SampledBatch:
        """Wait for its tokens. Called once, in the order of the launches; raises what went wrong."""
        ...


class StepBackend(Protocol):
    """Runs plans, in order. One thread calls everything here."""

    @property
    def max_in_flight(self) -> int:
        """Plans that may be launched before the oldest is settled."""
        ...

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        ...

    def open(self, request: GenerateRequest, tokens: Sequence[int]) -> None:
        """A request was admitted; `tokens` is its live list of prompt and generated tokens."""
        ...

    def close(self, request_id: str) -> None:
        """A request has ended; unknown ids are ignored."""
        ...

    def prompt_logprobs(self, request_id: str) -> tuple[TokenLogprob | None, ...] | None:
        """One record per prompt token, complete with the first sampled token; None if not asked for."""
        ...

    def launch(self, plan: Plan, limits: Mapping[str, Limit]) -> LaunchedStep:
        """Start a step. What it raises concerns this plan alone.

        NoRoomError: the device has no memory for it; its requests can be planned again, in smaller steps.
        `limits`: the tokens that may be sampled, for requests with rules; masks may change as soon as this
        returns.
        """
        ...

    @property
    def wants_pause(self) -> bool:
        """Whether `idle` should be called although there is work, once nothing is in flight."""
        ...

    def idle(self) -> bool:
        """Do a little of what was put off at start; False: nothing is left. KV memory must not change."""
        ...

    def check(self) -> None:
        """Raise EngineDead if the device can compute no more, after a step that failed."""
        ...

    @property
    def graph_replays(self) -> int:
        """Steps that were a captured graph."""
        ...

    def eager_steps(self) -> Mapping[str, int]:
        """Steps that ran without a captured graph, by reason."""
        ...

    def shut(self) -> None:
        """Let go of KV planes and device memory."""
        ...


class CpuBackend:
    """Computes a step where it is launched."""

    max_in_flight = 1
    graph_replays = 0
    wants_pause = False

    def __init__(
        self,
        model: Model,
        planes: Sequence[Tensor],
        *,
        block_tokens: int,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._runner = Runner(model, planes, block_tokens=block_tokens)
        self._sampler = StepSampler(vocab_size, eos_token_ids)
        self.open = self._sampler.open
        self.close = self._sampler.close
        self.prompt_logprobs = self._sampler.prompt_logprobs

    @property
    def num_requests(self) -> int:
        """Requests that are open."""
        return self._sampler.num_requests

    def launch(self, plan: Plan, limits: Mapping[str, Limit] = NO_LIMITS) -> LaunchedStep:
        """Run and sample the plan."""
        return _Done(plan, self._sampler.sample(plan, self._runner.run(plan), limits))

    def idle(self) -> bool:
        """Nothing was put off."""
        return False

    def check(self) -> None:
        """A CPU that has failed does not get here."""

    def eager_steps(self) -> Mapping[str, int]:
        """A CPU has no graphs to replay, so there is nothing to count."""
        return {}

    def shut(self) -> None:
        """Let go of the KV planes."""
        del self._runner


class _Done:
    def __init__(self, plan: Plan, batch: SampledBatch) -> None:
        self.plan, self._batch = plan, batch

    def result(self) -> SampledBatch:
        return self._batch

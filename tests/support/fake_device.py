"""A device for scheduler tests: it remembers what was written where, and is strict about what is read.

The KV of a token is the hash of everything up to it. A step that reads a block whose content is not the KV
of its own context raises; so does one that samples out of turn, passes the token budget or writes into a
block that another live sequence may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.scheduling.block_pool import BlockPool
from ostinato.runtime.scheduling.plan import PENDING, Outcome, Plan, PlanEntry
from ostinato.runtime.scheduling.scheduler import Scheduler


def next_token(context: tuple[int, ...]) -> int:
    """The fake model: a token from 100 to 1099 that depends on the whole context."""
    return 100 + hash(context) % 1000


@dataclass
class Client:
    """What one client has seen."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    first_step: int = 0  # number of the step that gave the first token
    steps: list[int] = field(default_factory=list)  # steps with a token
    scored: list[int] = field(default_factory=list)  # positions of the prompt with a log-probability


class FakeDevice:
    """A scheduler, its pool and a device in one, driven step by step."""

    def __init__(
        self,
        *,
        blocks: int = 100,
        capacity: int | None = None,
        block_tokens: int = 16,
        budget: int = 64,
        max_running: int = 8,
        max_waiting: int = 1000,
        window: int = 100_000,
        eos: frozenset[int] = frozenset({2}),
        prefix_cache: bool = True,
        max_in_flight: int = 1,
        model: Callable[[tuple[int, ...]], int] = next_token,
    ) -> None:
        self.pool = BlockPool(blocks, capacity or blocks, block_tokens, prefix_cache)
        config = SchedulerConfig(max_running=max_running, max_step_tokens=budget, max_waiting=max_waiting)
        self.scheduler = Scheduler(self.pool, config, window, eos, max_in_flight=max_in_flight)
        self.clients: dict[str, Client] = {}
        self.plans: list[Plan] = []
        self._model = model
        self._written: dict[tuple[int, int], int] = {}  # (block, offset) -> KV
        self._history: dict[str, list[int]] = {}  # prompt and every token sampled
        self._kv: dict[str, list[int]] = {}  # of each token of the history
        self._launched: list[tuple[Plan, dict[str, int]]] = []

    def add(
        self,
        name: str,
        prompt: int | tuple[int, ...],
        *,
        priority: int = 0,
        salt: str = "",
        **sampling: object,
    ) -> None:
        """`prompt`: token ids, or a number of tokens that no other request has."""
        if isinstance(prompt, int):
            base = 10_000 + 100_000 * len(self.clients)
            prompt = tuple(range(base, base + prompt))
        params = SamplingParams.model_validate({"max_tokens": 4, **sampling})
        self.scheduler.add(
            GenerateRequest(
                request_id=name, prompt_token_ids=prompt, sampling=params, priority=priority, cache_salt=salt
            )
        )
        self.clients[name] = Client(prompt)
        self._history[name] = list(prompt)
        self._kv[name] = []

    def launch(self) -> Plan | None:
        """Plan and run one step; its outcome is not told yet."""
        plan = self.scheduler.next_plan()
        for outcome in self.scheduler.take_ended():
            self._tell(outcome, 0)
        if plan is None:
            return None
        assert plan.entries
        assert plan.num_tokens == sum(len(e.token_ids) for e in plan.entries) <= self.scheduler.step_tokens
        assert len({entry.request_id for entry in plan.entries}) == len(plan.entries)
        sampled = {e.request_id: token for e in plan.entries if (token := self._run(e)) is not None}
        self.plans.append(plan)
        self._launched.append((plan, sampled))
        return plan

    def take_back(self) -> None:
        """The newest step was not for this device."""
        plan, sampled = self._launched.pop()
        for name in sampled:
            self._history[name].pop()
            del self._kv[name][len(self._history[name]) :]
        self.scheduler.take_back(plan)
        self.scheduler.check()

    def settle(self, failed: dict[str, str] | None = None) -> list[Outcome]:
        """Tell the scheduler the outcome of the oldest step."""
        plan, sampled = self._launched.pop(0)
        sampled = {name: token for name, token in sampled.items() if name not in (failed or {})}
        for entry in plan.entries:
            scored = self.clients[entry.request_id].scored
            scored += [entry.start + row + 1 for row in entry.prompt_logit_rows]
            assert scored == [*range(1, len(scored) + 1)], "a token of a prompt is scored twice, or not"
        outcomes = self.scheduler.complete(plan, sampled, failed)
        for outcome in outcomes:
            self._tell(outcome, plan.step)
        self.scheduler.check()
        return outcomes

    def step(self) -> Plan | None:
        """One whole turn."""
        plan = self.launch()
        if plan is not None:
            self.settle()
        return plan

    def run(self, most: int = 10_000) -> None:
        """Steps until there is no work."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {most} steps")

    def abort(self, name: str) -> bool:
        """As a client does."""
        ended = self.scheduler.abort(name)
        if ended:
            self.clients[name].finish = "abort"
        self.scheduler.check()
        return ended

    def expected(self, name: str, count: int) -> list[int]:
        """What the model says to this prompt when it is alone."""
        context = list(self.clients[name].prompt)
        for _ in range(count):
            context.append(self._model(tuple(context)))
        return context[len(self.clients[name].prompt) :]

    def entry(self, name: str) -> PlanEntry | None:
        """The entry of a request in the newest plan."""
        return next((e for e in self.plans[-1].entries if e.request_id == name), None)

    def _run(self, entry: PlanEntry) -> int | None:
        size, history = self.pool.block_tokens, self._history[entry.request_id]
        end = entry.start + len(entry.token_ids)
        fed = zip(entry.token_ids, history[entry.start : end], strict=True)
        assert all(token in (PENDING, known) for token, known in fed), "wrong tokens are fed"
        assert end <= len(entry.block_ids) * size, "tokens without a block"
        kv = self._kv_of(entry.request_id)
        for position in range(entry.start):
            where = (entry.block_ids[position // size], position % size)
            assert self._written.get(where) == kv[position], f"the KV at position {position} is another's"
        for position in range(entry.start, end):
            block = entry.block_ids[position // size]
            assert self.pool.references(block) == 1, "a shared block is written"
            self._written[block, position % size] = kv[position]
        assert entry.samples == (end == len(history)), "samples out of turn"
        if not entry.samples:
            return None
        assert entry.output_index == len(history) - entry.prompt_tokens
        history.append(self._model(tuple(history)))
        return history[-1]

    def _kv_of(self, name: str) -> list[int]:
        kv, history = self._kv[name], self._history[name]
        while len(kv) < len(history):
            kv.append(hash((kv[-1] if kv else 0, history[len(kv)])))
        return kv

    def _tell(self, outcome: Outcome, step: int) -> None:
        client = self.clients[outcome.request_id]
        assert client.finish is None, "news after the end"
        if outcome.token_id is not None:
            assert outcome.index == len(client.tokens)
            client.tokens.append(outcome.token_id)
            client.steps.append(step)
            client.first_step = client.first_step or step
        client.finish, client.error = outcome.finish_reason, outcome.error
        client.cached_tokens = outcome.cached_tokens


def assert_right(device: FakeDevice, *names: str) -> None:
    """Each answer is what the model says to the prompt alone, and complete."""
    for name in names or device.clients:
        client = device.clients[name]
        assert client.finish == "length", (name, client.finish, client.error)
        assert client.tokens == device.expected(name, len(client.tokens)), name
    assert device.pool.num_held == 0

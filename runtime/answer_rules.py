"""What an answer must be besides likely: grammars and budgets for thinking, asked and told in one place.

A request with such rules is parked until they are ready, and its place in them follows its tokens. A token
that cannot be decided before the one in front of it is known makes its request wait for a step, where the
device is one step ahead: always with a grammar, now and then with a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.grammar_spec import GrammarSpec, read_grammar
from ostinato.runtime.grammar.request_grammars import RequestGrammars, make_grammars
from ostinato.runtime.messages import GenerateRequest, Thoughts
from ostinato.runtime.scheduling.plan import Plan
from ostinato.runtime.thinking.request_thoughts import RequestThoughts
from ostinato.runtime.token_limits import Limit

if TYPE_CHECKING:
    from ostinato.graph.facts import ModelFacts


class Rules(NamedTuple):
    """Those of one request."""

    grammar: GrammarSpec | None = None
    thoughts: Thoughts | None = None

    @property
    def are_none(self) -> bool:
        """Whether the model is free."""
        return self.grammar is None and self.thoughts is None


def read_rules(request: GenerateRequest) -> Rules:
    """What a request asks for. Raises InvalidRequest that names the field."""
    return Rules(read_grammar(request.sampling), request.sampling.thoughts)


class Verdict(NamedTuple):
    """What new tokens mean."""

    ended: frozenset[str]  # grammars that are complete
    failed: Mapping[str, str]  # answers that their grammar lost, with the reason
    runs_ahead: Mapping[str, bool]  # `AnswerRules.runs_ahead` of those with a budget


class AnswerRules:
    """From `start` to `close`, the rules of the requests that have some."""

    def __init__(self, grammars: RequestGrammars, thoughts: RequestThoughts) -> None:
        self.grammars = grammars
        self._thoughts = thoughts
        self._waits: dict[str, int] = {}  # parked requests: so many of their rules are not ready
        self._grammatical: set[str] = set()

    @property
    def num_requests(self) -> int:
        """Requests that have rules, ready or not."""
        return max(self.grammars.num_requests, self._thoughts.num_requests)

    def start(self, request: GenerateRequest, rules: Rules) -> None:
        """Make rules ready; the request is parked until `take_ready` names it."""
        name = request.request_id
        self._waits[name] = (rules.grammar is not None) + (rules.thoughts is not None)
        if rules.grammar is not None:
            self._grammatical.add(name)
            self.grammars.start(request, rules.grammar)
        if rules.thoughts is not None:
            self._thoughts.start(request, rules.thoughts)

    def take_ready(self) -> list[tuple[str, InvalidRequest | None]]:
        """Requests that need not be parked any longer; those with an error are to be refused."""
        if not self._waits:
            return []
        ready: list[tuple[str, InvalidRequest | None]] = []
        for name, error in (*self._thoughts.take_ready(), *self.grammars.take_ready()):
            left = self._waits.pop(name, 0) - 1
            if error is None and left > 0:
                self._waits[name] = left
            elif left >= 0:  # else it was refused a moment ago
                ready.append((name, error))
        return ready

    def runs_ahead(self, request_id: str) -> bool:
        """Whether the next token of a request may be drawn before the last one is known."""
        return request_id not in self._grammatical and self._thoughts.knows_next(request_id)

    def limits(self, plan: Plan) -> Mapping[str, Limit]:
        """Of the tokens that a plan samples, by request; valid until the plan is settled."""
        return self._thoughts.limits(plan, self.grammars.masks(plan))

    def take(self, tokens: Mapping[str, int]) -> Verdict:
        """Answers go on with these tokens."""
        thinking = self._thoughts.take(tokens)
        ended, failed = self.grammars.take(tokens)
        return Verdict(ended, failed, {name: self.runs_ahead(name) for name in thinking})

    def close(self, request_id: str) -> None:
        """A request has ended, in whatever state; unknown ids are ignored."""
        self._waits.pop(request_id, None)
        self._grammatical.discard(request_id)
        self.grammars.close(request_id)
        self._thoughts.close(request_id)

    def shut(self) -> None:
        """Stop the threads; what they are doing is finished first."""
        self.grammars.shut()
        self._thoughts.shut()


def make_rules(
    folder: Path, facts: ModelFacts, *, wake: Callable[[], None], clock: Callable[[], float]
) -> AnswerRules:
    """For the artifact in `folder`. Nothing is read or started before the first request with rules."""
    return AnswerRules(
        make_grammars(folder, facts, wake=wake, clock=clock),
        RequestThoughts(folder / "tokenizer" / "tokenizer.json", facts.vocab_size, wake=wake),
    )

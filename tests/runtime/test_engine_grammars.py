"""Grammars in the engine: answers match; requests park, or are refused; steps overlap. B01, B11, B57, B59."""

import json
import random
import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.engine import Engine
from ostinato.runtime.grammar import request_grammars
from ostinato.runtime.messages import Abort, GenerateRequest, Refused
from ostinato.runtime.scheduling.plan import PENDING
from tests.support.engine_runs import events_of, finish, generate, greedy, prompt_of, tokens_of
from tests.support.grammar_runs import LateEngine, asked, grammar_engine, ids_of, text_of
from tests.support.toy_model import EOS, ToyModel

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "grün"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


def check_person(text: str) -> None:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags", "more"]
    assert len(person["name"]) <= 6
    assert type(person["age"]) is int
    assert 0 <= person["age"] <= 150
    assert set(person["tags"]) <= {"red", "grün"}
    assert len(person["tags"]) <= 3
    assert person["more"] in (True, False, None)


def matching(pattern: str) -> Any:
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(text)


KINDS: list[tuple[dict[str, Any], Any]] = [
    ({"json_schema": PERSON}, check_person),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}, check_person),
    ({"regex": "[a-f]{3}-[0-9]{2}"}, matching("[a-f]{3}-[0-9]{2}")),
    ({"choice": ("yes", "no", "perhaps")}, matching("yes|no|perhaps")),
    ({"grammar": 'start: "(" start ")" | "é"'}, matching(r"(\()*é(\))*")),
    ({"grammar": 'root ::= [0-9] ("+" [0-9]){1,3}'}, matching(r"[0-9](\+[0-9]){1,3}")),
]


@pytest.mark.parametrize("kind", [Engine, LateEngine], ids=["one", "two in flight"])
def test_every_answer_that_stops_matches_whatever_runs_beside_it(folder: Path, kind: type[Engine]):
    free = greedy("free", prompt_of(20), 60)
    alone = ToyModel().greedy(free.prompt_token_ids, 60)
    requests: list[GenerateRequest] = []
    checks: dict[str, Any] = {}
    for seed in range(4):
        for at, (sampling, check) in enumerate(KINDS):
            name = f"k{at}-{seed}"
            checks[name] = check
            requests.append(
                asked(
                    name,
                    seed=seed,
                    temperature=seed * 0.5,
                    logit_bias=dict.fromkeys(ids_of(')"0],'), 8.0),
                    **sampling,
                )
            )
    with grammar_engine(folder, kind, blocks=300) as engine:
        engine.inbox.put(free, *requests)
        news = finish(engine)
        engine.check()
        assert engine._rules.grammars.num_requests == 0
    assert tokens_of(news, "free") == alone
    stopped = 0
    for name, check in checks.items():
        last = events_of(news, name)[-1]
        assert last.finish_reason in ("stop", "length"), (name, last.error)
        if last.finish_reason == "stop":
            stopped += 1
            tokens = tokens_of(news, name)
            check(text_of(tokens[:-1] if last.stop_token_id is not None else tokens))
    assert stopped >= len(checks) * 3 // 4


def test_two_in_flight_gives_the_tokens_of_one_and_only_free_rows_are_fed_unknown_tokens(folder: Path):
    requests = [asked(f"r{at}", seed=at, regex="[a-z]{9}") for at in range(3)]
    free = greedy("free", prompt_of(12), 30)
    with grammar_engine(folder) as engine:
        one = generate(engine, *requests, free)
    with grammar_engine(folder, LateEngine) as engine:
        two = generate(engine, *requests, free)
        assert isinstance(engine, LateEngine)
        plans = engine.late.plans
    assert one == two
    unknown = {entry.request_id for plan, _ in plans for entry in plan.entries if PENDING in entry.token_ids}
    assert unknown == {"free"}
    for plan, masked in plans:
        assert masked == {e.request_id for e in plan.entries if e.samples and e.request_id != "free"}


def test_preempted_requests_stay_in_their_grammar(folder: Path):
    requests = [asked(f"r{at}", 80, seed=at, regex="([0-9]{3},){15}") for at in range(8)]
    with grammar_engine(folder) as engine:
        roomy = generate(engine, *requests)
    with grammar_engine(folder, LateEngine, blocks=12) as engine:
        tight = generate(engine, *requests)
        assert engine.stats().preemptions > 0
        engine.check()
    assert tight == roomy
    for tokens in tight.values():
        assert re.fullmatch("([0-9]{3},){15}", text_of(tokens))


def test_min_tokens_ignore_eos_and_stop_tokens_meet_the_grammar(folder: Path):
    stop = ids_of("q")[0]
    bias = {EOS: 90.0}
    with grammar_engine(folder) as engine:
        news = generate(
            engine,
            asked("least", regex="[ab]{1,40}", min_tokens=5, logit_bias=bias),
            asked("short", regex="ab", min_tokens=50),
            asked("on", regex="[ab]{1,6}", ignore_eos=True, logit_bias=bias),
            asked("stop", regex="[ab]{2,9}", stop_token_ids=(stop,), logit_bias={stop: 90.0}),
            asked("cut", 3, regex="[ab]{9}"),
        )
    assert len(news["least"]) == 6
    assert news["least"][-1] == EOS
    assert text_of(news["short"]) == "ab"
    assert len(news["on"]) == 6
    assert len(news["stop"]) == 3
    assert news["stop"][-1] == stop
    assert len(news["cut"]) == 3


def test_a_thinking_part_is_free_and_the_grammar_follows_it(folder: Path):
    (end,) = ids_of("#")  # part of no other token
    with grammar_engine(folder) as engine:
        request = asked("r", 200, regex="yes|no", grammar_after=(end,), logit_bias={end: 6.0})
        tokens = generate(engine, request)["r"]
    first = tokens.index(end)
    assert first > 0
    assert text_of(tokens[first + 1 :]) in ("yes", "no")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"json_schema": {"type": "objekt"}}, "json_schema", "objekt"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/no"}}}},
        "response_format",
        "/no",
    ),
    ({"regex": "(", "grammar_param": "guided_regex"}, "guided_regex", "unclosed"),
    ({"grammar": "start: x"}, "grammar", "unknown name"),
    ({"regex": "a", "choice": ("b",)}, "choice", "contradicts regex"),
    ({"regex": ""}, "regex", "nothing but the empty text"),
]


def test_a_wrong_grammar_refuses_its_request_by_name_and_nobody_else_notices(folder: Path):
    with grammar_engine(folder) as engine:
        fine = asked("fine", regex="[a-z]{5}")
        bad = [asked(f"bad{at}", **sampling) for at, (sampling, _, _) in enumerate(BAD)]
        engine.inbox.put(fine, *bad)
        news = finish(engine)
        engine.check()
    refused = {message.request_id: message for message in news if isinstance(message, Refused)}
    for at, (_, param, words) in enumerate(BAD):
        refusal = refused[f"bad{at}"]
        assert (refusal.error, refusal.param) == ("InvalidRequest", param)
        assert refusal.message.startswith(param)
        assert words in refusal.message
    assert len(refused) == len(BAD)
    assert re.fullmatch("[a-z]{5}", text_of(tokens_of(news, "fine")))


class HeldPool:
    """A pool whose work is done when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, work: Any, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, work, args))
        return future

    def run(self) -> None:
        for future, work, args in self.jobs:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(*args))
                except Exception as error:
                    future.set_exception(error)
        self.jobs.clear()

    def shutdown(self, **_: Any) -> None:
        pass


def held(engine: Engine) -> HeldPool:
    pool = HeldPool()
    engine._rules.grammars._pool = pool  # type: ignore[assignment]
    return pool


def test_a_request_parks_until_its_grammar_is_ready_and_delays_nobody(tmp_path: Path):
    with grammar_engine(tmp_path, max_step_tokens=64) as engine:
        pool = held(engine)
        engine.inbox.put(
            greedy("A", prompt_of(400), 4), asked("C", regex="[a-z]{4}"), asked("C2", regex="[a-z]{4}")
        )
        engine.inbox.put(greedy("B", prompt_of(8), 30))
        news = [message for _ in range(4) for message in engine.step()]
        assert len(pool.jobs) == 1  # the same grammar is compiled once
        assert len(tokens_of(news, "B")) == 4
        assert tokens_of(news, "C") == []
        assert engine.stats().waiting == 2
        pool.run()
        news = engine.step()
        assert len(tokens_of(news, "C")) == len(tokens_of(news, "C2")) == 1  # while A is still at its prompt
        assert events_of(news, "A") == []
        finish(engine)
        engine.inbox.put(asked("again", regex="[a-z]{4}"))
        assert len(tokens_of(engine.step(), "again")) == 1  # kept: in the very step in which it came
        assert pool.jobs == []
        finish(engine)
        engine.check()


def test_a_parked_request_is_aborted_and_its_id_used_again(tmp_path: Path):
    with grammar_engine(tmp_path) as engine:
        pool = held(engine)
        engine.inbox.put(asked("C", regex="[a-z]{4}"), Abort(request_ids=("C",)))
        (last,) = events_of(engine.step(), "C")
        assert last.finish_reason == "abort"
        assert not engine.has_work
        assert pool.jobs[0][0].cancelled()  # nobody wants it any more
        engine.check()
        engine.inbox.put(asked("C", regex="[0-9]{4}"))
        engine.step()
        pool.run()
        assert re.fullmatch("[0-9]{4}", text_of(tokens_of(finish(engine), "C")))
        engine.check()


def test_a_grammar_that_takes_too_long_is_refused(tmp_path: Path):
    now = [0.0]
    with grammar_engine(tmp_path) as engine:
        pool = held(engine)
        engine._rules.grammars._clock = lambda: now[0]
        engine.inbox.put(asked("C", regex="[a-z]{4}"))
        assert engine.step() == []
        now[0] = request_grammars.COMPILE_S + 1
        (refused,) = engine.step()
        assert isinstance(refused, Refused)
        assert refused.message.startswith("regex: the grammar was not compiled in 10 s")
        assert not engine.has_work
        pool.run()  # it is ready at last, for the next one
        engine.check()


def test_an_id_used_again_while_a_step_of_the_old_request_is_out_does_not_mix_them(folder: Path):
    with grammar_engine(folder, LateEngine) as engine:
        generate(engine, asked("warm", regex="[0-9]{4}"))
        engine.inbox.put(greedy("x", prompt_of(5), 40))
        for _ in range(4):
            engine.step()
        engine.inbox.put(Abort(request_ids=("x",)), asked("x", regex="[0-9]{4}"))
        news = finish(engine)
        assert re.fullmatch("[0-9]{4}", text_of(tokens_of(news, "x")))
        engine.check()


def test_random_arrivals_and_aborts_with_grammars_keep_the_books(folder: Path):
    rng = random.Random(5)
    with grammar_engine(folder, LateEngine, blocks=60) as engine:
        names = []
        for turn in range(250):
            if rng.random() < 0.4:
                names.append(f"r{turn}")
                kinds: list[dict[str, Any]] = [
                    {},
                    {"regex": "[a-z ]{20}"},
                    {"regex": "("},
                    {"json_schema": PERSON},
                ]
                engine.inbox.put(asked(names[-1], 25, seed=turn, **rng.choice(kinds)))
            if names and rng.random() < 0.2:
                engine.inbox.put(Abort(request_ids=(rng.choice(names),)))
            engine.step()
            engine._scheduler.check()
        finish(engine)
        engine.check()
        assert engine._rules.grammars.num_requests == 0


def test_masks_of_many_rows_are_computed_together(folder: Path):
    requests = [asked(f"r{at}", seed=at, regex="[a-z]{6}") for at in range(request_grammars._TOGETHER + 3)]
    with grammar_engine(folder) as engine:
        together = generate(engine, *requests)
        assert engine._rules.grammars._executor is not None
    with grammar_engine(folder) as engine:
        alone = {r.request_id: generate(engine, r)[r.request_id] for r in requests[:3]}
    assert {name: together[name] for name in alone} == alone

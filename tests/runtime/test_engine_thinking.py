"""Thinking budgets in the engine: exact tokens in any batch, in chunks, after preemption, one step behind."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ostinato.runtime.engine import Engine
from ostinato.runtime.messages import Abort, GenerateRequest, Refused, Thoughts
from ostinato.runtime.scheduling.plan import PENDING
from ostinato.runtime.token_limits import mask_of_one
from tests.runtime.test_engine_grammars import HeldPool
from tests.support.engine_runs import events_of, finish, generate, greedy, prompt_of, tokens_of
from tests.support.grammar_runs import LateEngine, asked, grammar_engine, ids_of, text_of
from tests.support.thinking_runs import Story, expected, thoughts
from tests.support.toy_model import EOS, ToyModel

BOTH = pytest.mark.parametrize("kind", [Engine, LateEngine], ids=["one", "two in flight"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("toy")


def thinking(name: str, given: Thoughts, max_tokens: int = 40, **sampling: Any) -> GenerateRequest:
    """Random tokens among which the marks of thoughts are frequent."""
    marks = given.blocks[0].start + given.ends[0]
    params = {"seed": 1, "logit_bias": dict.fromkeys(ids_of(marks), 9.0), "thoughts": given.model_dump()}
    return asked(name, max_tokens, **{**params, **sampling})


def many(seed: int, count: int = 18) -> list[GenerateRequest]:
    rng = random.Random(seed)
    made = []
    for at in range(count):
        start, end = rng.choice([("q", "z"), ("qa", "za"), ("<t>", "</t>")])
        given = thoughts(
            rng.randrange(0, 12),
            start=start,
            end=end,
            words=rng.choice(["", "so: "]),
            begun=rng.random() < 0.5,
            anywhere=rng.random() < 0.6,
        )
        made.append(thinking(f"r{at}", given, seed=at, temperature=rng.choice([0.0, 1.0, 1.5])))
    return made


@BOTH
def test_forced_ends_are_exact_whatever_runs_beside_them(folder: Path, kind: type[Engine]):
    requests, free = many(3), greedy("free", prompt_of(20), 60)
    with grammar_engine(folder, kind, blocks=300) as engine:
        got = generate(engine, free, *requests)
        engine.check()
        assert engine._rules.num_requests == 0
    assert got["free"] == ToyModel().greedy(free.prompt_token_ids, 60)
    for request in requests:
        assert got[request.request_id] == expected(request), request.sampling.thoughts


@BOTH
def test_preemption_chunks_and_cached_prefixes_change_nothing(folder: Path, kind: type[Engine]):
    requests = [
        request.model_copy(update={"prompt_token_ids": tuple(prompt_of(50, seed=at // 2))})
        for at, request in enumerate(many(4, 10))
    ]
    with grammar_engine(folder) as engine:
        roomy = generate(engine, *requests)
    with grammar_engine(folder, kind, blocks=12, max_step_tokens=16) as engine:
        tight = generate(engine, *requests)
        assert engine.stats().preemptions > 0
        again = generate(engine, *requests)
        engine.check()
        assert engine.stats().prefix_hits > 0
    assert tight == again == roomy


def test_rows_with_a_budget_run_ahead_but_at_its_border(folder: Path):
    given = thoughts(20, start="q", end="</t>", words="so", begun=True)
    request = asked("r", 60, thoughts=given.model_dump(), logit_bias=dict.fromkeys(ids_of("<"), -100))
    closing = list(given.blocks[0].closing)
    with grammar_engine(folder, LateEngine) as engine:
        assert isinstance(engine, LateEngine)
        tokens = generate(engine, request)["r"]
        plans = [(plan, masked) for plan, masked in engine.late.plans]
    assert tokens[20 : 20 + len(closing)] == closing
    known = [plan.entries[0].output_index for plan, _ in plans if PENDING not in plan.entries[0].token_ids]
    assert known == [0, 20]  # the first token; and the first that is forced, which waits to see the last free
    limited = [plan.entries[0].output_index for plan, masked in plans if masked]
    assert limited == list(range(20, 60))  # forced, then barred from thinking again


def test_a_budget_of_nothing_ends_thoughts_at_once(folder: Path):
    in_prompt = thinking("prompt", thoughts(0, words="so: ", begun=True), 12)
    begins = thinking("begins", thoughts(0, end="zz", anywhere=False), 12, logit_bias={ids_of("q")[0]: 40.0})
    never = thinking("never", thoughts(0), 30, logit_bias={ids_of("q")[0]: 40.0})
    with grammar_engine(folder, LateEngine) as engine:
        got = generate(engine, in_prompt, begins, never)
    assert text_of(got["prompt"]).startswith("so: z")
    assert text_of(got["begins"]).startswith("qzz")
    assert "q" not in text_of(got["never"])  # barred where it could come anywhere


def test_forcing_is_stronger_than_bias_bad_words_and_allowed_tokens(folder: Path):
    (a,), (z,) = ids_of("a"), ids_of("z")
    free = {"logit_bias": {}, "ignore_eos": True}
    given = thoughts(3, words="so", begun=True, anywhere=False)
    with grammar_engine(folder) as engine:
        got = generate(
            engine,
            thinking("bias", given, 12, **{**free, "logit_bias": {z: -100.0, a: 100.0}}),
            thinking("allowed", given, 12, **free, allowed_token_ids=(a,)),
            thinking("bad", given, 12, **free, bad_word_ids=((z,), tuple(ids_of("so")))),
            thinking("penalty", given, 12, **free, repetition_penalty=100.0, frequency_penalty=2.0),
        )
    assert text_of(got["bias"]) == text_of(got["allowed"]) == "aaasozaaaaaa"
    for name in ("bad", "penalty"):
        assert got[name][3 : 3 + len(given.blocks[0].closing)] == list(given.blocks[0].closing)
    assert z not in got["bad"][3 + len(given.blocks[0].closing) :]


def test_min_tokens_stop_tokens_and_max_tokens_meet_a_forced_end(folder: Path):
    (z,) = ids_of("z")
    given = thoughts(4, end="zz", words="so: ", begun=True, anywhere=False)
    closing = list(given.blocks[0].closing)
    with grammar_engine(folder, LateEngine) as engine:
        engine.inbox.put(
            thinking("cut", given, 6, logit_bias={z: -100.0}),
            thinking("stop", given, 30, logit_bias={z: -100.0}, stop_token_ids=(z,)),
            thinking("least", given, 30, logit_bias={EOS: 90.0}, min_tokens=12, stop_token_ids=(z,)),
            thinking("on", given, 20, logit_bias={EOS: 90.0}, ignore_eos=True),
        )
        news = finish(engine)
    last = {name: events_of(news, name)[-1] for name in ("cut", "stop", "least", "on")}
    assert [one.finish_reason for one in last.values()] == ["length", "stop", "stop", "length"]
    assert tokens_of(news, "cut")[4:] == closing[:2]
    assert (
        tokens_of(news, "stop")[4:] == closing[: closing.index(z) + 1]
    )  # the end of thoughts stops this one
    assert last["stop"].stop_token_id == z
    assert tokens_of(news, "least")[4 : 4 + len(closing)] == closing  # too early to stop there
    assert (len(tokens_of(news, "least")), last["least"].stop_token_id) == (13, EOS)
    assert tokens_of(news, "on") == [*[EOS] * 4, *closing, *[EOS] * (16 - len(closing))]


@BOTH
def test_a_grammar_begins_behind_the_forced_end(folder: Path, kind: type[Engine]):
    end = tuple(ids_of("z"))
    no_end = {end[0]: -100.0}
    cases = {
        "prompt": (thoughts(5, words="so: ", begun=True), {"grammar_after": end}),
        "empty": (thoughts(0, begun=True), {"grammar_after": end}),
        "begins": (
            thoughts(2, anywhere=False),
            {"grammar_after": end, "grammar_unless": tuple(ids_of("q"))},
        ),
        "barred": (thoughts(0), {"grammar_after": end, "grammar_unless": tuple(ids_of("q"))}),
    }
    requests = [
        thinking(name, given, logit_bias={**no_end, ids_of("q")[0]: 40.0}, regex="yes|no", seed=7, **more)
        for name, (given, more) in cases.items()
    ]
    with grammar_engine(folder, kind) as engine:
        got = {
            name: text_of([t for t in ids if t != EOS]) for name, ids in generate(engine, *requests).items()
        }
        engine.check()
    assert re.fullmatch("(?s).*so: z(yes|no)", got["prompt"])
    assert re.fullmatch("z(yes|no)", got["empty"])
    assert re.fullmatch("(?s)q.+z(yes|no)", got["begins"])
    assert re.fullmatch("yes|no", got["barred"])  # it may not think, so it answers


@BOTH
def test_a_grammar_that_has_thoughts_itself_takes_the_forced_end_and_starts_are_barred_in_it(
    folder: Path, kind: type[Engine]
):
    given = thoughts(3, words="so ")
    requests = [
        thinking(f"r{seed}", given, 200, regex="(q[^qz]*z){0,9}(yes|no)", seed=seed, logit_bias={}, top_k=0)
        for seed in range(6)
    ]
    with grammar_engine(folder, kind) as engine:
        got = generate(engine, *requests)
        engine.check()
    for tokens in got.values():
        said = text_of([token for token in tokens if token != EOS])
        assert re.fullmatch("(?s)(q[^qz]*z)*(yes|no)", said)
        assert Story(given, tokens).spent <= 3
    assert any("so z" in text_of(tokens) for tokens in got.values())


def test_forced_tokens_have_the_log_probabilities_of_the_model(folder: Path):
    given = thoughts(2, words="so: ", begun=True)
    request = thinking("r", given, 10, logprobs=2)
    with grammar_engine(folder, LateEngine) as engine:
        engine.inbox.put(request)
        news = finish(engine)
    tokens = tokens_of(news, "r")
    records = [record for event in events_of(news, "r") for record in event.logprobs]
    assert [record.token_id for record in records] == tokens
    at = tokens.index(ids_of("so: z")[0])
    logits = ToyModel().dense_logits([*request.prompt_token_ids, *tokens[:at]])[-1].log_softmax(-1)
    assert records[at].logprob == pytest.approx(float(logits[tokens[at]]), abs=1e-4)
    assert records[at].top[0][0] == int(logits.argmax())


def test_the_first_request_waits_for_the_tokenizer_and_delays_nobody(tmp_path: Path):
    with grammar_engine(tmp_path) as engine:
        pool = engine._rules._thoughts._pool = HeldPool()  # type: ignore[assignment]
        engine.inbox.put(thinking("r", thoughts(3), 8), greedy("free", prompt_of(8), 4))
        first = engine.step()
        assert (len(tokens_of(first, "free")), tokens_of(first, "r")) == (1, [])
        pool.run()
        assert len(tokens_of(finish(engine), "r")) == 8
        engine.inbox.put(thinking("again", thoughts(3), 8))
        assert len(tokens_of(engine.step(), "again")) == 1  # it is known by now
        assert pool.jobs == []
        finish(engine)
        engine.check()


def test_an_engine_without_a_tokenizer_refuses_budgets_and_goes_on(tmp_path: Path):
    with grammar_engine(tmp_path) as engine:
        (tmp_path / "tokenizer" / "tokenizer.json").unlink()
        engine.inbox.put(thinking("r", thoughts(3)), greedy("free", prompt_of(8), 4))
        news = finish(engine)
        engine.check()
    (refused,) = [message for message in news if isinstance(message, Refused)]
    assert (refused.request_id, refused.param) == ("r", "thinking_token_budget")
    assert len(tokens_of(news, "free")) == 4


def test_aborts_in_every_state_keep_the_books(folder: Path):
    rng = random.Random(6)
    with grammar_engine(folder, LateEngine, blocks=60) as engine:
        names: list[str] = []
        for turn, request in enumerate(request for seed in range(8) for request in many(seed, 12)):
            name = f"r{turn}"
            names.append(name)
            more = {"regex": "[a-z ]{20}"} if rng.random() < 0.3 else {}
            sampling = request.sampling.model_copy(update={"max_tokens": 25, **more})
            engine.inbox.put(request.model_copy(update={"request_id": name, "sampling": sampling}))
            if rng.random() < 0.4:
                engine.inbox.put(Abort(request_ids=(rng.choice(names),)))
            engine.step()
            engine._scheduler.check()
        finish(engine)
        engine.check()
        assert engine._rules.num_requests == 0


def test_budgets_of_requests_are_counted_apart(folder: Path):
    given = thoughts(6, begun=True)
    with grammar_engine(folder, LateEngine) as engine:
        got = generate(engine, *(thinking(f"n{at}", given, seed=at) for at in range(4)))
    assert len({json.dumps(tokens) for tokens in got.values()}) == 4
    for tokens in got.values():
        assert Story(given, tokens).spent <= 6


def test_a_mask_of_one_token_has_one_bit():
    for token in (0, 31, 32, 139):
        mask = mask_of_one(token, 140)
        assert [at for at in range(32 * len(mask)) if mask.view("uint32")[at // 32] >> (at % 32) & 1] == [
            token
        ]

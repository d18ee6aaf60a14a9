"""The engine of models that embed or score: who is in a step, what comes back, balanced books."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ostinato.errors import ConfigError, EngineDead, InvalidRequest
from ostinato.runtime.config import EngineConfig, ProfileConfig, SchedulerConfig
from ostinato.runtime.frames import Message
from ostinato.runtime.messages import (
    Abort,
    CallDone,
    EndRequests,
    GenerateRequest,
    KVTarget,
    PoolRequest,
    PoolResult,
    PoolResults,
    Refused,
    SamplingParams,
    Sleep,
    StartProfile,
    StopProfile,
    Wake,
)
from ostinato.runtime.pooling import pool_engine
from ostinato.runtime.pooling.pool_answers import PoolAnswers
from ostinato.runtime.pooling.pool_engine import PoolEngine
from ostinato.runtime.pooling.pool_text import floats
from ostinato.runtime.sleeping_weights import FixedWeights
from tests.support.toy_pool_model import EMBEDS, SCORES, SIZE, ToyPoolModel, numbers


def engine(model: ToyPoolModel | None = None, **scheduler: int) -> PoolEngine:
    limits = {"max_step_tokens": 10, **scheduler}
    return PoolEngine(model or ToyPoolModel(), EngineConfig(scheduler=SchedulerConfig(**limits)))


def ask(name: str, *ids: int, **fields: object) -> PoolRequest:
    return PoolRequest(request_id=name, token_ids=ids, **fields)


def results(news: Sequence[Message]) -> dict[str, PoolResult]:
    return {one.request_id: one for batch in news if isinstance(batch, PoolResults) for one in batch.results}


def drained(engine: PoolEngine) -> dict[str, PoolResult]:
    """Every result until nothing waits."""
    found = results(engine.step())
    while engine.has_work:
        found |= results(engine.step())
    engine.check()
    return found


def test_a_step_takes_whole_inputs_in_order_up_to_its_tokens_and_sequences():
    model = ToyPoolModel()
    with engine(model, max_running=3) as made:
        lengths = (4, 4, 3, 12, 1, 1, 1, 1)
        made.inbox.put(*(ask(f"r{at}", *[5] * n) for at, n in enumerate(lengths)))
        found = drained(made)
    assert model.steps == [[4, 4], [3], [12], [1, 1, 1], [1]]
    assert set(found) == {f"r{at}" for at in range(8)}
    assert (made.stats().steps, made.stats().prompt_tokens, made.stats().waiting) == (5, 27, 0)


def test_better_priority_goes_first_and_the_aborted_never():
    model = ToyPoolModel()
    made = engine(model, max_step_tokens=2)
    made.inbox.put(
        ask("late", 9, 9, priority=1), ask("gone", 8, 8), ask("soon", 7), Abort(request_ids=("gone", "no"))
    )
    assert list(drained(made)) == ["soon", "late"]
    assert model.steps == [[1], [2]]


def test_vectors_are_cut_and_then_normalised():
    made = engine()
    made.inbox.put(ask("whole", 5, 6), ask("cut", 5, 6, dimensions=3), ask("raw", 5, 6, normalize=False))
    found = {name: torch.tensor(floats(one.numbers)) for name, one in drained(made).items()}
    truth = numbers([5, 6])
    assert torch.equal(found["raw"], truth)
    torch.testing.assert_close(found["whole"], truth / truth.norm())
    torch.testing.assert_close(found["cut"], truth[:3] / truth[:3].norm())


def test_scores_go_through_the_models_sigmoid_and_types_reach_it():
    made = engine(ToyPoolModel(SCORES))
    pair = {"token_types": (0, 1)}
    made.inbox.put(ask("as it is", 5, 6, **pair), ask("raw", 5, 6, sigmoid=False, **pair), ask("plain", 5, 6))
    found = {name: floats(one.numbers)[0] for name, one in drained(made).items()}
    logit = float(numbers([5, 6], [0, 1])[0])
    assert found["raw"] == pytest.approx(logit)
    assert found["as it is"] == pytest.approx(1 / (1 + torch.e**-logit))
    assert found["plain"] != found["as it is"]


def test_an_input_that_raises_fails_alone_whoever_is_in_its_step(caplog: pytest.LogCaptureFixture):
    model = ToyPoolModel(broken=7)
    made = engine(model)
    ids = {"good": (5,), "with it": (6, 6), "bad": (7, 7), "after": (8,), "next": (9, 9)}
    made.inbox.put(*(ask(name, *tokens) for name, tokens in ids.items()))
    found = drained(made)
    assert model.steps == [[1, 2, 2, 1, 2], [1, 2], [2, 1, 2], [2], [1, 2]]
    failed = found.pop("bad")
    assert (failed.error, failed.numbers) == ("the step failed: RuntimeError: a broken token", "")
    for name, one in found.items():
        truth = numbers(list(ids[name]))
        assert one.error == ""
        assert floats(one.numbers) == pytest.approx((truth / truth.norm()).tolist()), name
    assert "step 1: the step failed: RuntimeError: a broken token; each half of its 5 inputs" in caplog.text
    assert caplog.text.count("step 1 failed; its input ends with an error") == 1


def test_an_input_has_waited_until_the_first_step_with_it_however_often_that_is_tried():
    model = ToyPoolModel(broken=7)
    made = PoolEngine(
        model,
        EngineConfig(scheduler=SchedulerConfig(max_step_tokens=3)),
        clock=lambda: float(len(model.steps)),  # a try takes a second
    )
    made.inbox.put(*(ask(name, token) for name, token in (("a", 5), ("bad", 7), ("b", 6), ("next", 8))))
    waited = {name: one.queued_s for name, one in drained(made).items()}
    assert model.steps == [[1, 1, 1], [1], [1, 1], [1], [1], [1]]
    assert waited == {"a": 0.0, "bad": 0.0, "b": 0.0, "next": 5.0}


def test_a_device_that_computes_no_more_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    model = ToyPoolModel(broken=7)
    model.device = torch.device("cuda")
    monkeypatch.setattr(pool_engine, "moved", lambda inputs, device: inputs)
    cleared: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append("cleared"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with engine(model) as made:
        made.inbox.put(ask("good", 5), ask("bad", 7))
        assert drained(made)["good"].error == ""
        assert len(cleared) == 2, "before each smaller try, and behind the last"

        def broken(device: torch.device) -> None:
            raise RuntimeError(f"CUDA error: illegal address on {device}\nmore")

        monkeypatch.setattr(torch.cuda, "synchronize", broken)
        made.inbox.put(ask("bad", 7))
        with pytest.raises(EngineDead, match=r"cuda computes no more \(CUDA error: .* on cuda\); start"):
            made.step()


@pytest.mark.parametrize(
    ("request_", "kind", "said"),
    [
        (ask("r"), "InvalidRequest", "the input is empty"),
        (ask("r", *[5] * 17), "ContextTooLong", "17 tokens and this model's maximum context length is 16"),
        (ask("r", 200), "InvalidRequest", "token id 200: ids are from 0 to 199"),
        (ask("r", 5, dimensions=SIZE + 1), "InvalidRequest", "not from 1 to 6"),
        (ask("r", 5, token_types=(0, 1)), "InvalidRequest", "2 types from 0 to 1 for 1 tokens"),
        (
            GenerateRequest(request_id="r", prompt_token_ids=(5,), sampling=SamplingParams()),
            "WrongTask",
            "embed",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused(request_: PoolRequest | GenerateRequest, kind: str, said: str):
    made = engine()
    made.inbox.put(request_, ask("other", 5))
    news = made.step()
    (refused,) = [one for one in news if isinstance(one, Refused)]
    assert (refused.request_id, refused.error) == ("r", kind)
    assert said in refused.message
    assert set(results(news)) == {"other"}


def test_matryoshka_lengths_are_those_of_the_config():
    made = engine(ToyPoolModel(EMBEDS.model_copy(update={"matryoshka": (2, 4)})))
    made.inbox.put(ask("two", 5, dimensions=2), ask("all", 5, dimensions=SIZE), ask("three", 5, dimensions=3))
    news = made.step()
    assert set(results(news)) == {"two", "all"}
    assert [one.message for one in news if isinstance(one, Refused)] == [
        "dimensions: this model was trained for 2, 4 and 6; got 3"
    ]


def test_a_full_queue_refuses_and_a_name_in_use_too():
    made = engine(max_waiting=2)
    made.inbox.put(ask("a", 5), ask("a", 5), ask("b", 5), ask("c", 5))
    news = made.step()
    refused = {one.request_id: one.error for one in news if isinstance(one, Refused)}
    assert refused == {"a": "InvalidRequest", "c": "Overloaded"}
    assert set(results(news)) == {"a", "b"}


def test_asleep_it_keeps_inputs_and_an_operator_may_end_them():
    made = engine()
    made.inbox.put(
        Sleep(call_id=1, level=1), ask("a", 5), ask("b", 5), EndRequests(call_id=2, request_ids=("b", "x"))
    )
    news = made.step()
    done = {one.call_id: one for one in news if isinstance(one, CallDone)}
    assert (done[1].state is not None, done[2].count) == (True, 1)
    assert {name: one.aborted for name, one in results(news).items()} == {"b": True}
    assert (made.stats().asleep, made.stats().waiting) == (1, 1)
    made.inbox.put(Wake(call_id=3), KVTarget(call_id=4, target_bytes=None))
    news = made.step()
    assert set(results(news)) == {"a"}
    (no_kv,) = [one for one in news if isinstance(one, CallDone) and one.call_id == 4]
    assert (no_kv.kind, "no KV memory" in no_kv.error) == ("InvalidRequest", True)


def test_its_steps_are_in_a_profile(tmp_path: Path):
    made = PoolEngine(ToyPoolModel(), EngineConfig(profile=ProfileConfig(folder=str(tmp_path))))
    made.inbox.put(StartProfile(call_id=1), ask("a", 5, 6), ask("b", 7))
    made.step()
    made.inbox.put(StopProfile(call_id=2))
    (done,) = [one for one in made.step() if isinstance(one, CallDone)]
    events = json.loads(Path(done.trace).read_text())["traceEvents"]
    steps = [event["name"] for event in events if event.get("name", "").startswith("step ")]
    assert steps == ["step 1: 2 sequences, 3 tokens"]


async def test_a_name_that_two_inputs_of_a_call_have_is_refused():
    answers = PoolAnswers()
    with pytest.raises(InvalidRequest, match="request_id 'b' is in use"), answers.waiting(["a", "b", "b"]):
        pass
    assert len(answers) == 0


class LostWeights(FixedWeights):
    def wake(self) -> None:
        raise OSError("the disk is gone")


def test_weights_that_do_not_come_back_leave_it_asleep_and_alive():
    made = engine(ToyPoolModel(weights=LostWeights()))
    made.inbox.put(*(Sleep(call_id=at, level=at) for at in (2, 1)), Wake(call_id=3), ask("a", 5))
    lighter, lost = [one for one in made.step() if isinstance(one, CallDone)][1:]
    assert (lighter.kind, "sleeps at level 2 already" in lighter.error) == ("SleepRefused", True)
    assert (lost.kind, lost.error) == (
        "WakeFailed",
        "weights: OSError: the disk is gone; the engine sleeps on",
    )
    assert (made.stats().asleep, made.stats().waiting) == (2, 1)


def test_a_window_over_the_models_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="max_model_len=17: the model takes 16 tokens"):
        PoolEngine(ToyPoolModel(), EngineConfig(max_model_len=17))
    assert PoolEngine(ToyPoolModel(), EngineConfig(max_model_len=7)).info.max_model_len == 7

"""The engine on a toy model whose tokens change with any mistake in KV, prefix reuse or preemption.

The truth is `ToyModel.greedy`: dense attention over the whole sequence, no cache.
"""

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.config import KVConfig, SchedulerConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.messages import EngineStats, Refused, SamplingParams
from tests.support.engine_runs import (
    BLOCK_TOKENS,
    events_of,
    finish,
    generate,
    greedy,
    prompt_of,
    tokens_of,
    toy_config,
    toy_engine,
)
from tests.support.toy_model import CRASH, EOS, POISON, ToyModel

LENGTHS = (1, 15, 16, 17, 32, 33)
TOY = ToyModel()


def requests_of(lengths, max_tokens=8):
    return [greedy(f"r{length}", prompt_of(length, length), max_tokens) for length in lengths]


@pytest.fixture(scope="module")
def truth():
    """Greedy tokens by request id, for the prompts of `requests_of`."""
    lengths = (*LENGTHS, 3, 70, 150)
    return {f"r{n}": TOY.greedy(prompt_of(n, n), 24) for n in lengths}


def test_one_at_a_time_and_all_at_once_give_the_dense_models_tokens(truth):
    requests = requests_of(LENGTHS)
    with toy_engine() as engine:
        alone = {r.request_id: generate(engine, r)[r.request_id] for r in requests}
    with toy_engine() as engine:
        together = generate(engine, *requests)
    assert alone == together == {name: truth[name][:8] for name in alone}


@pytest.mark.parametrize("max_step_tokens", [1, 7, 16])
def test_chunked_prefill_gives_the_same_tokens(truth, max_step_tokens):
    with toy_engine(max_step_tokens=max_step_tokens) as engine:
        got = generate(engine, *requests_of((3, 33, 70), 4))
    assert got == {name: truth[name][:4] for name in got}


def test_prefix_hits_give_the_same_tokens_and_leave_one_token_to_compute():
    with toy_engine() as engine:
        for length in LENGTHS:
            prompt = prompt_of(length, length)
            for turn in range(3):
                engine.inbox.put(greedy(f"{length}-{turn}", prompt))
                news = finish(engine)
                assert tokens_of(news, f"{length}-{turn}") == TOY.greedy(prompt, 8)
                expected = (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS if turn else 0
                assert events_of(news, f"{length}-{turn}")[0].cached_tokens == expected
            longer = [*prompt, 77]
            assert generate(engine, greedy("longer", longer))["longer"] == TOY.greedy(longer, 8)


def test_the_answer_of_one_turn_is_a_prefix_hit_in_the_next():
    prompt = prompt_of(20)
    with toy_engine() as engine:
        answer = generate(engine, greedy("one", prompt, 30))["one"]
        followup = [*prompt, *answer, 5, 6, 7]
        engine.inbox.put(greedy("two", followup))
        news = finish(engine)
        assert events_of(news, "two")[0].cached_tokens == 48  # 49 tokens have KV: 3 full blocks
        assert tokens_of(news, "two") == TOY.greedy(followup, 8)


def test_another_cache_salt_sees_no_hit():
    prompt = prompt_of(40)
    with toy_engine() as engine:
        generate(engine, greedy("a", prompt))
        engine.inbox.put(greedy("b", prompt).model_copy(update={"cache_salt": "tenant"}))
        assert events_of(finish(engine), "b")[0].cached_tokens == 0


def test_preempted_requests_keep_their_tokens(truth):
    requests = requests_of((15, 16, 17, 32, 33), 24)  # need 4 + 4 + 3 + 4 + 4 blocks at their ends
    with toy_engine(blocks=8) as engine:
        got = generate(engine, *requests)
        stats = engine.stats()
        engine.check()
    assert stats.preemptions > 0
    assert stats.blocks_used == 0
    assert got == {name: truth[name] for name in got}


def test_a_nan_row_ends_its_own_request_only_and_does_not_spread_through_reused_blocks(truth):
    with toy_engine(blocks=8) as engine:
        poisoned = [*prompt_of(40), POISON, 9]
        engine.inbox.put(greedy("bad", poisoned), *requests_of((16, 33)))
        news = finish(engine)
        (last,) = events_of(news, "bad")
        assert (last.finish_reason, last.token_ids) == ("error", ())
        assert "NaN" in last.error or "nan" in last.error
        assert tokens_of(news, "r16") == truth["r16"][:8]
        assert tokens_of(news, "r33") == truth["r33"][:8]
        for length in (70, 17):  # all blocks are used again: 0 * NaN in a masked place would show
            assert generate(engine, *requests_of((length,)))[f"r{length}"] == truth[f"r{length}"][:8]


def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on(truth, caplog):
    with toy_engine() as engine:
        engine.inbox.put(greedy("bad", [5, CRASH]), greedy("beside", [7, 8]))
        news = finish(engine)
        for name in ("bad", "beside"):
            (last,) = events_of(news, name)
            assert last.finish_reason == "error"
            assert "RuntimeError: toy model crashed" in last.error
        assert "toy model crashed" in caplog.text
        assert engine.stats().blocks_used == 0
        assert generate(engine, *requests_of((33,)))["r33"] == truth["r33"][:8]


def test_a_crashed_step_leaves_no_half_written_block_in_the_prefix_cache():
    prompt = prompt_of(40)
    with toy_engine() as engine:
        engine.inbox.put(greedy("bad", [*prompt, CRASH]))
        finish(engine)
        engine.inbox.put(greedy("good", prompt))
        news = finish(engine)
        assert events_of(news, "good")[0].cached_tokens == 0
        assert tokens_of(news, "good") == TOY.greedy(prompt, 8)


def test_broken_books_are_fatal(monkeypatch):
    with toy_engine() as engine:

        def broken():
            raise AssertionError("books")

        monkeypatch.setattr(engine, "check", broken)
        engine.inbox.put(greedy("bad", [CRASH]))
        with pytest.raises(AssertionError, match="books"):
            engine.step()


@pytest.mark.parametrize(
    ("request_", "error", "param", "says"),
    [
        (greedy("x", []), "InvalidRequest", "prompt", "empty"),
        (greedy("x", [5, 512]), "InvalidRequest", "prompt", "token id 512: ids are from 0 to 511"),
        (greedy("x", [-1]), "InvalidRequest", "prompt", "token id -1"),
        (greedy("x", prompt_of(512)), "ContextTooLong", "prompt", "512 tokens"),
        (greedy("x", [5], logit_bias={512: 1.0}), "InvalidRequest", "logit_bias", "512"),
        (greedy("x", [5], logit_bias={5: 101.0}), "InvalidRequest", "logit_bias", "-100 to 100"),
        (greedy("x", [5], stop_token_ids=(512,)), "InvalidRequest", "stop_token_ids", "512"),
        (greedy("x", [5], min_tokens=9), "InvalidRequest", "min_tokens", "more than max_tokens=8"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_name(request_, error, param, says):
    with toy_engine() as engine:
        engine.inbox.put(request_, greedy("good", [5, 6]))
        news = finish(engine)
        (refused,) = [message for message in news if isinstance(message, Refused)]
        assert (refused.request_id, refused.error, refused.param) == ("x", error, param)
        assert says in refused.message
        assert tokens_of(news, "good") == TOY.greedy([5, 6], 8)


def test_window_is_an_upper_bound_for_max_tokens():
    with toy_engine(max_model_len=64) as engine:
        engine.inbox.put(greedy("full", prompt_of(63), 10), greedy("four", prompt_of(60), None))
        news = finish(engine)
    assert [event.finish_reason for event in events_of(news, "full")] == ["length"]
    assert tokens_of(news, "four") == TOY.greedy(prompt_of(60), 4)
    assert events_of(news, "four")[-1].finish_reason == "length"


def test_eos_and_stop_tokens_end_a_request_and_are_named():
    first = TOY.greedy([5, 6], 3)
    with toy_engine() as engine:
        engine.inbox.put(
            greedy("eos", [5, 6], logit_bias={EOS: 100.0}, ignore_eos=False),
            greedy("stop", [5, 6], stop_token_ids=(first[2],)),
        )
        news = finish(engine)
    (last,) = events_of(news, "eos")
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == ("stop", EOS, (EOS,))
    assert tokens_of(news, "stop") == first
    assert events_of(news, "stop")[-1].stop_token_id == first[2]


def test_a_full_queue_refuses_what_comes_next():
    config = toy_config(scheduler=SchedulerConfig(max_running=1, max_waiting=2))
    with Engine(ToyModel(), config) as engine:
        engine.inbox.put(*(greedy(f"q{i}", [5, i + 2], 2) for i in range(5)))
        news = finish(engine)
        refused = [message for message in news if isinstance(message, Refused)]
        assert {message.error for message in refused} == {"Overloaded"}
        assert [message.request_id for message in refused] == ["q3", "q4"]
        assert tokens_of(news, "q2") == TOY.greedy([5, 4], 2)


@pytest.mark.parametrize("max_step_tokens", [7, 512])
def test_log_probabilities_are_those_of_the_dense_model_for_prompt_and_answer(max_step_tokens):
    prompt = prompt_of(40)
    with toy_engine(max_step_tokens=max_step_tokens) as engine:
        generate(engine, greedy("warm", prompt))  # fills the prefix cache, which must not hide prompt rows
        engine.inbox.put(
            greedy("scored", prompt, 3, logprobs=2, prompt_logprobs=1), greedy("beside", [5, 6], 3)
        )
        events = events_of(finish(engine), "scored")
    ids = [*prompt, *(token for event in events for token in event.token_ids)]
    truth = TOY.dense_logits(ids).double().log_softmax(-1)
    prompt_logprobs = events[0].prompt_logprobs
    assert [event.prompt_logprobs for event in events[1:]] == [None, None]
    assert prompt_logprobs[0] is None
    records = [*prompt_logprobs[1:], *(event.logprobs[0] for event in events)]
    assert [record.token_id for record in records] == ids[1:]
    for at, record in enumerate(records):
        assert record.logprob == pytest.approx(truth[at, ids[at + 1]].item(), abs=1e-4)
        assert record.top[0][0] == truth[at].argmax().item()
    assert {len(record.top) for record in prompt_logprobs[1:]} == {1}
    assert {len(event.logprobs[0].top) for event in events} == {2}


@pytest.mark.parametrize("length", LENGTHS)
def test_prompt_log_probabilities_are_whole_and_the_same_when_the_prompt_is_cached(length):
    """Case B61: three choices of one token each, twice, behind a request that filled the cache."""
    prompt = prompt_of(length, length)
    truth = TOY.dense_logits(prompt).log_softmax(-1)
    wanted = [truth[at, token].item() for at, token in enumerate(prompt[1:])]
    with toy_engine() as engine:
        generate(engine, greedy("warm", prompt))
        for turn in range(2):
            names = [f"{turn}-{choice}" for choice in range(3)]
            engine.inbox.put(*(greedy(name, prompt, 1, prompt_logprobs=0) for name in names))
            news = finish(engine)
            for name in names:
                (event,) = events_of(news, name)
                assert event.prompt_logprobs[0] is None
                got = [record.logprob for record in event.prompt_logprobs[1:]]
                assert got == pytest.approx(wanted, abs=1e-4)
                assert list(event.token_ids) == TOY.greedy(prompt, 1)


def test_prompt_log_probabilities_are_whole_after_a_preemption():
    prompt = prompt_of(40)
    with toy_engine(blocks=8) as engine:
        alone = greedy("alone", prompt, 2, prompt_logprobs=0)
        engine.inbox.put(alone)
        truth = events_of(finish(engine), "alone")[0].prompt_logprobs
        scored = greedy("scored", prompt, 30, prompt_logprobs=0).model_copy(update={"priority": 1})
        engine.inbox.put(scored, *requests_of((16, 17), 24))
        news = finish(engine)
        assert engine.stats().preemptions > 0
    got = [event.prompt_logprobs for event in events_of(news, "scored")]
    assert [record.token_id for record in got[0][1:]] == prompt[1:]
    assert [r.logprob for r in got[0][1:]] == pytest.approx([r.logprob for r in truth[1:]], abs=1e-4)
    assert set(got[1:]) == {None}
    assert tokens_of(news, "scored") == TOY.greedy(prompt, 30)


def test_kv_memory_grows_with_need_and_shrinks_to_its_start_at_rest():
    with toy_engine() as engine:
        start = engine.stats()
        requests = [greedy(f"r{i}", prompt_of(500, i), 2) for i in range(12)]  # 32 blocks each
        got = generate(engine, *requests)
        grown = engine.stats()
        assert start.blocks_committed < 12 * 32 <= grown.blocks_committed
        assert grown.kv_bytes_committed > start.kv_bytes_committed
        assert all(got[r.request_id] == TOY.greedy(r.prompt_token_ids, 2) for r in requests[::4])
        engine._sizer.shrink()
        engine.check()
        end = engine.stats()
        assert (end.blocks_committed, end.kv_bytes_committed) == (
            start.blocks_committed,
            start.kv_bytes_committed,
        )
        assert generate(engine, requests[0])["r0"] == got["r0"]


def test_a_window_larger_than_the_models_or_the_memorys_is_refused():
    with pytest.raises(ConfigError, match=r"max_model_len=513: the model's window is 512 tokens"):
        toy_engine(max_model_len=513)
    with pytest.raises(ConfigError, match=r"max_model_len=512: KV memory holds at most 128.*kv.max_gib"):
        toy_engine(max_model_len=512, blocks=8)


def test_the_models_window_is_cut_to_the_memory_with_a_warning(caplog):
    with toy_engine(blocks=8) as engine:
        assert engine.info.max_model_len == 128
    assert "context window: 128 tokens instead of 512" in caplog.text


def test_info_names_the_model_as_served():
    with toy_engine() as engine:
        assert (engine.info.model, engine.info.vocab_size, engine.info.eos_token_ids) == ("toy", 512, (EOS,))


def test_default_sampling_draws_the_same_tokens_in_any_company():
    params = SamplingParams(seed=11, max_tokens=12, ignore_eos=True)
    drawn = greedy("drawn", [5, 6]).model_copy(update={"sampling": params})
    with toy_engine() as engine:
        alone = generate(engine, drawn)["drawn"]
        company = generate(engine, *requests_of((3, 33)), drawn)["drawn"]
        other = generate(
            engine, drawn.model_copy(update={"sampling": params.model_copy(update={"seed": 12})})
        )
    assert alone == company
    assert alone != other["drawn"]
    assert alone != TOY.greedy([5, 6], 12)


def test_an_idle_engine_says_so_checks_its_books_and_gives_memory_back():
    class Outlet:
        def __init__(self):
            self.sent, self.idled = [], 0

        def send(self, messages):
            self.sent.extend(messages)
            if self.idled:  # these are the books after shrinking
                engine.inbox.close()

        def idle(self):
            self.idled += 1

    kv = KVConfig(initial_mib=1, max_gib=0.02, headroom_gib=0, idle_shrink_s=0.1)
    with Engine(ToyModel(), toy_config(kv=kv)) as engine:
        engine.inbox.put(*(greedy(f"r{i}", prompt_of(500, i), 2) for i in range(12)))
        outlet = Outlet()
        engine.serve(outlet)
        assert outlet.idled == 1
        stats = [message for message in outlet.sent if isinstance(message, EngineStats)]
        assert (stats[-1].running, stats[-1].blocks_used) == (0, 0)
        assert stats[-1].blocks_committed < 12 * 32 <= stats[-2].blocks_committed


def test_broken_books_of_an_idle_engine_end_it(monkeypatch):
    class Outlet:
        def send(self, messages):
            pass

        def idle(self):
            engine._blocks.allocate(1)  # a leak

    with toy_engine() as engine:
        engine.inbox.put(greedy("r", [5], 1))
        with pytest.raises(AssertionError, match="blocks held"):
            engine.serve(Outlet())

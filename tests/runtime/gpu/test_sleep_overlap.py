"""Sleep of an engine that is one step behind its device: what is in flight is settled first, once."""

from ostinato.runtime.messages import CallDone, Sleep, Wake
from tests.support.engine_runs import events_of, finish, tokens_of
from tests.support.no_gpu import TOKEN, HostEngine, NoModel, config, request


def test_steps_in_flight_are_settled_before_sleep_and_no_token_is_lost_or_doubled():
    with HostEngine(NoModel(), config()) as engine:
        engine.inbox.put(*(request(f"r{at}", 20) for at in range(5)))
        news = [message for _ in range(6) for message in engine.step()]
        assert len(engine._in_flight) == 1  # launched, not read yet
        for turn in range(3):
            engine.inbox.put(Sleep(call_id=turn, level=1 + turn % 2))
            news += engine.step()
            stats = engine.stats()
            assert (len(engine._in_flight), stats.running, stats.waiting, stats.blocks_used) == (0, 0, 5, 0)
            engine.check()
            engine.inbox.put(Wake(call_id=10 + turn))
            news += engine.step() + engine.step()
        news += finish(engine)
        assert [done.error for done in news if isinstance(done, CallDone)] == [""] * 6
        for at in range(5):
            assert tokens_of(news, f"r{at}") == [TOKEN] * 20
            assert [e.finish_reason for e in events_of(news, f"r{at}")][-1] == "length"
        engine.check()


def test_replays_and_steps_without_a_graph_are_counted_by_reason():
    with HostEngine(NoModel(), config()) as engine:
        engine.inbox.put(request("small", 5), request("scored", 2, prompt_logprobs=0))
        engine.inbox.put(request("long", 2, prompt=2500))
        finish(engine)
        stats = engine.stats()
        assert stats.eager_steps["prompt_logprobs"] == 1
        assert stats.graph_replays == stats.steps - sum(stats.eager_steps.values()) > 0

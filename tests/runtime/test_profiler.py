"""Profiles of an engine: what is in the trace, when one is refused, how it ends by itself."""

import json
from pathlib import Path

import pytest
import torch

from ostinato.errors import InvalidRequest, ProfileRefused
from ostinato.runtime.config import ProfileConfig
from ostinato.runtime.messages import CallDone, StartProfile, StopProfile
from ostinato.runtime.profiler import Profiler
from ostinato.runtime.program import Program, Step, bind
from tests.support.engine_runs import finish, generate, greedy, toy_engine


def call(engine, message):
    engine.inbox.put(message)
    (done,) = [news for news in engine.step() if isinstance(news, CallDone)]
    return done


def names_in(trace: str) -> set[str]:
    return {event.get("name", "") for event in json.loads(Path(trace).read_text())["traceEvents"]}


def profiler(folder, named=None, **config):
    return Profiler(
        ProfileConfig(folder=str(folder), **config),
        torch.device("cpu"),
        name_calls=(named if named is not None else []).append,
        wake=lambda: None,
    )


def test_a_profile_has_the_steps_and_operators_between_start_and_stop_and_is_a_whole_file(tmp_path):
    folder = tmp_path / "traces" / "made"
    with toy_engine(profile=ProfileConfig(folder=str(folder), max_seconds=20)) as engine:
        generate(engine, greedy("before", [5, 6], 1))
        assert call(engine, StartProfile(call_id=1)).limit_s == 20
        engine.inbox.put(greedy("a", [5, 6, 7], 2))
        finish(engine)
        done = call(engine, StopProfile(call_id=2))
        generate(engine, greedy("behind", [5], 3))
        names = names_in(done.trace)
        second = call(engine, StartProfile(call_id=3, seconds=0.5))
        assert second.limit_s == 0.5
        other = call(engine, StopProfile(call_id=4)).trace
    steps = {name for name in names if name.startswith("step ")}
    assert steps == {"step 2: 1 sequences, 3 tokens", "step 3: 1 sequences, 1 tokens"}
    assert any(name.startswith("aten::") for name in names)
    assert sorted(map(str, folder.iterdir())) == sorted([done.trace, other])
    assert Path(done.trace).is_absolute()


def test_a_profile_is_refused_where_none_can_be_taken_or_stopped_and_nothing_changes(tmp_path):
    with toy_engine() as engine:
        done = call(engine, StartProfile(call_id=1))
        assert (done.kind, done.state) == ("ProfileRefused", None)
        assert "profile.folder is not set" in done.error
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ProfileRefused, match=r"profile\.folder=.*file"):
        profiler(blocked).start(None)
    named = []
    ours = profiler(tmp_path, named, max_seconds=2)
    with pytest.raises(ProfileRefused, match="no profile is running"):
        ours.stop()
    for seconds in (0.0, -1.0, 2.5, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match=r"profile\.max_seconds=2"):
            ours.start(seconds)
    assert named == []
    ours.start(1.0)
    with pytest.raises(ProfileRefused, match="running already"):
        ours.start(1.0)
    ours.stop()
    assert named == [True, False]
    with pytest.raises(ProfileRefused, match="the last one was written to"):
        ours.stop()


def test_a_profile_ends_by_itself_and_wakes_a_resting_engine_for_it(tmp_path):
    with toy_engine(profile=ProfileConfig(folder=str(tmp_path))) as engine:
        call(engine, StartProfile(call_id=1, seconds=0.02))
        while not list(tmp_path.glob("*.json")):
            assert engine.inbox.wait(10)
            engine.step()
        assert call(engine, StopProfile(call_id=2)).kind == "ProfileRefused"
        call(engine, StartProfile(call_id=3))
    assert len(list(tmp_path.glob("*.json"))) == 2, "closing an engine writes what there is"


def test_a_trace_that_cannot_be_written_is_lost_with_a_reason_and_leaves_nothing(tmp_path):
    folder = tmp_path / "goes"
    ours = profiler(folder)
    ours.start(None)
    folder.rmdir()
    with pytest.raises(ProfileRefused, match="cannot be written"):
        ours.stop()
    ours.start(None)
    assert Path(ours.stop()).exists()


def test_native_kernels_have_their_names_in_a_profile_and_cost_nothing_outside():
    program = Program(
        step_inputs=("x",),
        kv=(),
        weights={},
        steps=(
            Step(op="ostinato.silu_mul.default", args=[{"ref": "x"}, {"ref": "x"}], out="y"),
            Step(op="aten.neg.default", args=[{"ref": "y"}], out="z"),
        ),
        result="z",
    )

    def kernel(gate, up):
        return gate + up

    bound = bind(program, {}, native={"ostinato::silu_mul": kernel}, device=torch.device("cpu"))
    one = torch.ones(2)
    for named in (False, True, False):
        bound.name_calls(named)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            assert bound((one,), ()).tolist() == [-2.0, -2.0]
        names = {event.name for event in seen.events()}
        assert ("ostinato::silu_mul" in names) == named
        assert "aten::neg" in names

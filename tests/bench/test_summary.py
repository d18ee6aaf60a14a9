"""Numbers of a run from its records, with times that can be checked by hand."""

import json
import statistics

import pytest

from ostinato.bench.compare import compare, regressions
from ostinato.bench.confidence import over_runs, t95
from ostinato.bench.plots import plot_run
from ostinato.bench.request_record import RequestRecord
from ostinato.bench.results import OutputSettings, find_result, make_result, save_result
from ostinato.bench.summary import SummarySettings, concurrency_steps, read_goodput, summarize
from ostinato.errors import ConfigError


def record(start, first, end, tokens, index=0, **more):
    """An answer whose tokens come evenly from `first` to `end`, seconds after its start."""
    gap = (end - first) / (tokens - 1) if tokens > 1 else 0.0
    given = {
        "start_s": start,
        "planned_s": start,
        "ok": True,
        "first_token_at": first,
        "end_at": end,
        "token_times_at": [first + gap * i for i in range(tokens)],
        "output_tokens": tokens,
        "output_tokens_from": "usage",
        "prompt_tokens": 10,
    }
    return RequestRecord(index, **{**given, **more})


FAILED = RequestRecord(9, start_s=1.0, planned_s=0.5, error="status 500: no", end_at=0.5)
RUN = [record(0.0, 0.5, 1.5, 11), record(1.0, 0.25, 2.25, 21, cached_tokens=5), FAILED]


def test_counts_rates_and_latencies_of_a_run():
    found = summarize(RUN, SummarySettings(percentiles=(50,)))
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"status 500: no": 1})
    assert found["duration_s"] == 3.25
    assert found["request_per_s"] == pytest.approx(2 / 3.25)
    assert found["output_tok_s"] == pytest.approx(32 / 3.25)
    assert found["total_tok_s"] == pytest.approx(52 / 3.25)
    assert (found["cached_tokens"], found["cached_fraction"]) == (5, 0.25)
    assert found["mean_concurrency"] == pytest.approx((1.5 + 2.25 + 0.5) / 3.25)
    assert found["peak_concurrency"] == 3
    assert found["ttft_ms"] == {"mean": 375.0, "std": 125.0, "min": 250.0, "max": 500.0, "p50": 375.0}
    assert found["tpot_ms"]["mean"] == pytest.approx(100.0)
    assert found["itl_ms"]["p50"] == pytest.approx(100.0)
    assert found["latency_ms"]["mean"] == pytest.approx(1875.0)
    assert found["start_delay_ms"]["max"] == 500.0
    assert found["content_ttft_ms"] is None
    assert found["goodput_per_s"] is None
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("records", [[], [FAILED], [record(0.0, 0.1, 0.1, 1)], [record(0.0, 0.0, 0.0, 0)]])
def test_runs_without_answers_tokens_or_time_divide_by_nothing(records):
    found = summarize(records, SummarySettings(goodput=("ttft:500",)))
    json.dumps(found, allow_nan=False)
    assert found["tpot_ms"] is None
    if not records:
        assert (found["request_per_s"], found["goodput_fraction"]) == (None, None)


def test_the_running_requests_over_time():
    assert concurrency_steps(RUN) == [(0.0, 1), (1.0, 2), (1.0, 3), (1.5, 2), (1.5, 1), (3.25, 0)]


def test_the_steady_state_leaves_out_the_ramps():
    # 0: alone for 1 s; then two at once until 3 s; then alone.  20 tokens/s and 10 tokens/s.
    run = [record(0.0, 0.05, 3.0, 60), record(1.0, 0.1, 4.0, 40)]
    steady = summarize(run, SummarySettings())["steady"]
    assert (steady["begin_s"], steady["end_s"], steady["completed"]) == (1.0, 3.0, 1)
    assert steady["output_tok_s"] == pytest.approx(30, abs=1)
    assert steady["request_per_s"] == 0.5


def test_goodput_counts_requests_within_every_limit():
    run = [record(0.0, 0.5, 1.5, 11), record(0.0, 0.2, 2.2, 11), record(0.0, 0.1, 0.1, 1), FAILED]

    def good(*limits):
        return summarize(run, SummarySettings(goodput=limits))["goodput_fraction"]

    assert good("ttft:500") == 3 / 4
    assert good("ttft:300") == 2 / 4
    assert good("ttft:500", "tpot:150") == 2 / 4  # one token has no TPOT, so it breaks no limit of it
    assert good("e2el:1600", "itl:100.001") == 2 / 4
    assert read_goodput(["e2el:100", "tpot:2.5"]) == {"latency": 0.1, "tpot": 0.0025}
    for wrong in ("ttft", "ttft:", "speed:3", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="--goodput"):
            read_goodput([wrong])


def test_several_runs_give_an_interval():
    found = over_runs([{"a": 1.0, "b": {"p50": 2}, "n": None}, {"a": 3.0, "b": {"p50": 2}, "n": None}])
    assert set(found) == {"a", "b.p50"}
    half = 12.706 * statistics.stdev([1.0, 3.0]) / 2**0.5
    assert found["a"] == {"mean": 2.0, "ci95": pytest.approx(half)}
    assert found["b.p50"] == {"mean": 2.0, "ci95": 0.0}
    assert over_runs([{"a": 1.0}])["a"] == {"mean": 1.0, "ci95": None}
    assert [t95(n) for n in (1, 15, 16, 20, 29, 30, 500)] == [
        12.706,
        2.131,
        2.131,
        2.086,
        2.086,
        2.042,
        1.980,
    ]


def result(tok_s, ttft, *, label="", ci95=None, **point):
    numbers = {"output_tok_s": {"mean": tok_s, "ci95": ci95}, "ttft_ms.p50": {"mean": ttft, "ci95": ci95}}
    points = [{"request_rate": "inf", "max_concurrency": 8, "runs": [], "over_runs": numbers, **point}]
    return make_result(
        "serve", {"rate": float("inf")}, points, OutputSettings(label=label, metadata=("gpu=none",))
    )


def test_compare_says_better_or_worse_only_beyond_both_intervals():
    def verdicts(before, after):
        return [change.verdict for change in compare(before, after)]

    assert verdicts(result(100, 5, ci95=1.0), result(120, 9, ci95=1.0)) == ["better", "worse"]
    assert verdicts(result(100, 5, ci95=1.0), result(101.5, 4.0, ci95=1.0)) == ["same", "same"]
    assert verdicts(result(100, 5), result(120, 5)) == ["?", "same"]
    changes = compare(result(100, 5), result(90, 5.2))
    assert [change.ratio for change in changes] == [0.9, pytest.approx(1.04)]
    assert [change.number for change in regressions(changes, 5.0)] == ["output_tok_s"]
    assert len(regressions(changes, 3.0)) == 2
    assert regressions(compare(result(100, 5), result(110, 4)), 0.0) == []
    with pytest.raises(ConfigError, match="no point in common"):
        compare(result(1, 1), result(1, 1, max_concurrency=9))


def test_results_are_saved_appended_and_found_by_label(tmp_path):
    path = tmp_path / "new" / "r.json"
    for label in ("one", "two"):
        save_result(result(1, 2, label=label), OutputSettings(save=str(path), append=True))
    assert find_result(str(path))["label"] == "two"
    found = find_result(f"{path}#one")
    assert (found["label"], found["metadata"], found["settings"]) == ("one", {"gpu": "none"}, {"rate": "inf"})
    save_result(result(1, 2, label="three"), OutputSettings(save=str(path)))
    with pytest.raises(ConfigError, match="no result with the label 'one'; the file has three"):
        find_result(f"{path}#one")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a result of `ostinato bench`"):
        find_result(str(tmp_path / "other.json"))
    with pytest.raises(ConfigError, match="must be NAME=VALUE"):
        make_result("serve", {}, [], OutputSettings(metadata=("gpu",)))


def test_a_key_on_the_command_line_is_not_saved(monkeypatch):
    words = ["x", "bench", "serve", "--api-key", "abc", "--headers=Cookie:abc", "--url", "http://x"]
    monkeypatch.setattr("sys.argv", words)
    header = make_result("serve", {}, [], OutputSettings())["header"]
    assert "abc" not in header["command"]
    assert header["command"].endswith("--headers=***' --url http://x")


def test_pictures_of_a_run(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib, the extra `bench`")
    for name, records in (("run", RUN), ("failed", [FAILED])):
        made = plot_run(records, tmp_path, name)
        assert [path.name for path in made] == [f"{name}-latency.png", f"{name}-timeline.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000 for path in made)


def test_pictures_need_matplotlib_and_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'ostinato\[bench\]'"):
        plot_run(RUN, tmp_path, "run")

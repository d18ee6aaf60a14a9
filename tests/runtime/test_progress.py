"""Progress of a compile where there is no terminal: a line per stage that took time."""

import pytest

from ostinato.runtime import progress


def test_a_stage_is_one_line_and_one_that_took_no_time_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    now = iter([10.0, 12.5, 20.0, 20.01, 30.0, 31.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    with progress.compile_progress("toy") as report:
        for stage in ("read", "kernels", "weights"):
            report(stage, 0.0)
            report(stage, 1.0)
    assert capsys.readouterr().err.splitlines() == [
        "compiling toy: reading the model, 2.5 s",
        "compiling toy: packing weights, 1.0 s",
    ]

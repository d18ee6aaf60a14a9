"""The script for GPU machines: limits, verdicts, tests dealt out, records carried to another machine."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support import gpu_check
from tests.support.gpu_check import PARTS, Part, chosen, collect, deal, main


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(gpu_check, "RESULTS", folder)
    return folder


def test_each_part_ends_with_one_line_and_records_travel_in_the_file(
    results: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (results / "old.json").write_text("{}")
    write = f"open({str(results / 'speed.json')!r}, 'w').write('{{\"rows\": [1]}}'); print('all well')"
    parts = [
        Part("good", 60, command=python(write)),
        Part("bad", 60, command=python("print('3 failed'); raise SystemExit(1)")),
        Part("slow", 1, command=python("import time; print('begins', flush=True); time.sleep(60)")),
        Part("refused", 60, command=python("print('Error: Device not supported'); raise SystemExit(1)")),
    ]
    out = tmp_path / "told.json"
    assert main(["--out", str(out), "--budget", "100"], parts) == 1
    states = [
        line.split("  ")[0].split()[0] for line in capsys.readouterr().out.splitlines() if " s  " in line
    ]
    assert states == ["good", "bad", "slow", "refused"]
    told = json.loads(out.read_text())
    assert [v["state"] for v in told["verdicts"]] == ["ok", "failed", "out of time", "cannot run here"]
    assert [v["said"] for v in told["verdicts"]][:3] == ["all well", "3 failed", "begins"]
    assert told["records"] == {"speed.json": {"rows": [1]}}
    (results / "speed.json").unlink()
    assert main(["--unpack", str(out)], parts) == 0
    assert json.loads((results / "speed.json").read_text()) == {"rows": [1]}


def test_what_does_not_fit_into_the_budget_is_not_begun(results: Path, tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    parts = [Part("long", 60, command=python("print('ran')"))]
    assert main(["--out", str(out), "--budget", "5"], parts) == 0
    assert json.loads(out.read_text())["verdicts"][0]["state"] == "not begun"
    with pytest.raises(SystemExit):
        main(["no-such-part"], parts)


def test_all_tests_for_a_gpu_are_in_exactly_one_hand() -> None:
    ids = collect(["tests/ops/test_silu_mul.py", "tests/ops/test_kv_write.py"])
    assert len(ids) > 8
    hands = deal(ids, 3)
    assert sorted(name for hand in hands for name in hand) == sorted(ids)
    assert deal(ids[:1], 12) == [ids[:1]]
    some = chosen(ids, Part("check", 1, per_file=2, checker="memcheck", only=("kv_write",)))
    assert len(some) == 2
    assert all("test_kv_write" in name for name in some)


def test_a_race_is_dealt_to_as_many_processes_as_it_has_seeds() -> None:
    race = next(part for part in PARTS if part.name == "race")
    names = chosen(collect(race.tests, os.environ | dict(race.environment)), race)
    assert len(names) == len(set(names)) == race.processes == 4
    assert all("random_arrivals" in name for name in names)
    assert sum(float(dict(race.environment)["OSTINATO_RACE_S"]) for _ in names) == 600


def test_every_part_with_tests_or_a_benchmark_names_what_exists() -> None:
    root = gpu_check.ROOT
    for part in PARTS:
        words = [word for word in (*part.command, *part.tests) if word.startswith("tests/")]
        assert all((root / word).exists() for word in words), part.name
        modules = [word for word in part.command if word.startswith("benchmarks.")]
        assert all((root / f"{word.replace('.', '/')}.py").is_file() for word in modules), part.name
        assert words or modules, part.name

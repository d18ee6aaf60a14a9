"""`ostinato bench` as it is typed: flags, what is printed and saved, exit codes."""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from ostinato.bench.data_settings import DataSettings
from ostinato.bench.load import LoadSettings
from ostinato.bench.target import TargetSettings
from ostinato.errors import ConfigError
from ostinato.tools import bench, bench_compare, bench_offline, bench_serve, bench_startup, main
from ostinato.tools.bench_flags import read_section
from tests.support.scripted_http import event, plays, scripted, used

TEXT = "/v1/completions"
CHUNK = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}


@contextmanager
def server():
    """A scripted server on a thread of its own: the command runs a loop itself."""
    ready, stop, url = threading.Event(), asyncio.Event(), []

    async def run():
        async with scripted({TEXT: plays([(0, event(CHUNK)), (0, event(used(1)))])}) as served:
            url.append(served.url)
            loops.append(asyncio.get_running_loop())
            ready.set()
            await stop.wait()

    loops = []
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(10)
    try:
        yield url[0]
    finally:
        loops[0].call_soon_threadsafe(stop.set)
        thread.join(10)


def parsed(tool, *words):
    parser = argparse.ArgumentParser()
    tool.add_arguments(parser)
    return parser.parse_args(words)


def test_serve_prints_a_table_and_saves_what_compare_reads(tmp_path, capsys, monkeypatch):
    path = tmp_path / "r.json"
    with server() as url:
        words = ["bench", "serve", f"--url={url}", "--backend=openai", "--num-prompts=5", f"--save={path}"]
        words += [
            "--append",
            "--runs=2",
            "--request-rate",
            "200",
            "inf",
            "--label=one",
            "--goodput",
            "ttft:9000",
        ]
        monkeypatch.setattr(sys, "argv", ["ostinato", *words])
        assert main.main(words) == 0
        assert main.main([*words[:-4], "--label=two"]) == 0
    out = capsys.readouterr().out
    assert "request_rate=200.0 max_concurrency=0, 2 runs, mean ± 95 % interval" in out
    assert re.search(r"requests answered +5 ± 0", out)
    assert re.search(r"requests within all limits +1 ± 0", out)
    assert re.search(r"time to first token, ms +[\d.]+ ±", out)
    saved = json.loads(path.read_text())
    assert [result["label"] for result in saved["results"]] == ["one", "two"]
    assert saved["results"][0]["settings"]["target"]["model"] == "toy"
    assert saved["results"][0]["settings"]["load"]["request_rate"] == [200.0, "inf"]
    words = ["bench", "compare", f"{path}#one", f"{path}#two"]
    monkeypatch.setattr(sys, "argv", ["ostinato", *words])
    assert main.main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"output_tok_s +[\d.]+ +[\d.]+ +\d\.\d{3}  (same|better|worse)", out)
    assert main.main([*words, "--fail-over", "1e9"]) == 0


def test_a_run_without_any_answer_ends_with_1(tmp_path, monkeypatch, capsys):
    words = [
        "bench",
        "serve",
        "--url=http://127.0.0.1:9",
        "--model=x",
        "--num-prompts=2",
        "--ready-timeout-s=0",
    ]
    monkeypatch.setattr(sys, "argv", ["ostinato", *words])
    assert main.main(words) == 1
    assert "2 x ClientConnectorError" in capsys.readouterr().out


def test_compare_fails_when_a_number_got_worse(tmp_path, capsys):
    for name, value in (("a", 100.0), ("b", 90.0)):
        number = {"output_tok_s": {"mean": value, "ci95": None}}
        result = {"kind": "offline", "label": "", "points": [{"runs": [], "over_runs": number}]}
        file = {"format": "ostinato-bench/1", "results": [result]}
        (tmp_path / f"{name}.json").write_text(json.dumps(file))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert bench_compare.run(parsed(bench_compare, *files, "--fail-over=5")) == 1
    assert "worse by more than 5 %: all output_tok_s" in capsys.readouterr().out
    assert bench_compare.run(parsed(bench_compare, *files, "--fail-over=15")) == 0


def test_flags_are_the_settings():
    given = parsed(
        bench_serve, "--request-rate", "1,2", "4", "--max-concurrency=8", "--no-stream", "--seed=3"
    )
    load = read_section(given, LoadSettings)
    assert (load.request_rate, load.max_concurrency, load.burstiness) == ((1.0, 2.0, 4.0), (8,), 1.0)
    assert (
        read_section(given, TargetSettings, api_key="from the environment").api_key == "from the environment"
    )
    assert not read_section(given, TargetSettings).stream
    assert read_section(given, DataSettings).seed == 3
    for words, said in (
        (("--burstiness=0",), "--burstiness 0: Input should be greater than 0"),
        (("--dataset=songs",), "--dataset songs: Input should be 'random'"),
        (("--request-rate=fast",), "--request-rate fast: "),
        (("--request-rate=-1",), "--request-rate -1: "),
        (("--request-rate=nan",), "--request-rate nan: "),
        (("--max-concurrency=8,-1",), "--max-concurrency -1: "),
        (("--percentiles=101",), "--percentiles 101: "),
    ):
        given = parsed(bench_serve, *words)
        with pytest.raises(ConfigError, match=re.escape(said)):
            [read_section(given, section) for section in bench_serve.SECTIONS]


def test_startup_and_offline_refuse_what_makes_no_sense(tmp_path):
    with pytest.raises(ConfigError, match="bench startup chooses them"):
        bench_startup.run(parsed(bench_startup, "x", "--serve-flags=--server.port=1"))
    with pytest.raises(ConfigError, match="ended with 2 before it was ready"):
        bench_startup.run(parsed(bench_startup, str(tmp_path / "absent"), "--runs=1"))
    with pytest.raises(ConfigError, match="takes single prompts; use bench serve"):
        bench_offline.run(parsed(bench_offline, "x", "--dataset=multi_turn"))


def test_startup_measures_from_the_process_to_the_first_token(tmp_path):
    """A stand-in for `ostinato serve` that is ready after 0.3 s and takes 0.2 s for its token."""
    script = (
        "import asyncio, sys\n"
        "from aiohttp import web\n"
        "async def text(request):\n"
        "    await asyncio.sleep(0.2)\n"
        f"    return web.Response(body={event(CHUNK)!r}, content_type='text/event-stream')\n"
        "async def models(request): return web.json_response({'data': [{'id': 'toy'}]})\n"
        "app = web.Application()\n"
        "app.router.add_post('/v1/completions', text)\n"
        "app.router.add_get('/v1/models', models)\n"
        "import time; time.sleep(0.3)\n"
        "web.run_app(app, host='127.0.0.1', port=int(sys.argv[-1].split('=')[1]), print=None)\n"
    )
    found = bench_startup.start_once([sys.executable, "-c", script], "Hello", 60.0)
    assert found["ready_s"] >= 0.3
    assert 0.2 <= found["first_token_s"] < 2.0
    assert found["total_s"] == found["ready_s"] + found["first_token_s"]


def test_only_the_kind_that_runs_is_imported():
    code = (
        "import sys; from ostinato.tools import main\n"
        "sys.argv = ['ostinato', 'bench', 'serve', '--help']\n"
        "try: main.main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'matplotlib', 'ostinato.runtime.llm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--request-rate X [X ...]" in done.stdout
    assert bench.KINDS.keys() == {"serve", "offline", "startup", "compare"}

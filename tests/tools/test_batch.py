"""`ostinato batch` against a server with a scripted engine behind it."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
from aiohttp import web

from ostinato.errors import Overloaded
from ostinato.runtime.messages import GenerateRequest
from ostinato.tools import main
from tests.support.fake_engine import say
from tests.support.scripted_http import scripted
from tests.support.serving import serving

CHAT = {"model": "toy", "messages": [{"role": "user", "content": "Hello"}]}


def line(custom_id: str, url: str = "/v1/chat/completions", **body: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**CHAT, **body}}


def write(path: Path, *lines: object) -> None:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))


def read(path: Path) -> dict[object, dict]:
    return {record["custom_id"]: record for record in map(json.loads, path.read_text().splitlines())}


async def batch(url: str, tmp_path: Path, *more: str) -> int:
    """The command in a thread, as a user runs it."""
    words = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), url, *more]
    return await asyncio.to_thread(main.main, words)


async def test_every_route_is_answered_and_every_error_has_its_line(tmp_path, capfd):
    write(
        tmp_path / "in.jsonl",
        line("chat"),
        line("wrong", temperature=-1),
        {**line("text", "/v1/completions"), "body": {"prompt": "Hello", "max_tokens": 3}},
        {**line("response", "/v1/responses"), "body": {"input": "Hello"}},
        line("message", "/v1/messages", max_tokens=3),
        "",
        "{",
        line("get") | {"method": "GET"},
        line("elsewhere", "/admin/sleep"),
        line("streamed", stream=True),
        line("more") | {"priority": 1},
    )
    async with serving(say([70, 71])) as served:
        assert await batch(served.url, tmp_path) == 1
    answers = read(tmp_path / "out.jsonl")
    status = {name: got["response"]["status_code"] for name, got in answers.items() if got["response"]}
    assert status == {"chat": 200, "wrong": 400, "text": 200, "response": 200, "message": 200}
    assert answers["chat"]["response"]["body"]["object"] == "chat.completion"
    assert answers["chat"]["error"] is None
    assert answers["wrong"]["response"]["body"]["error"]["param"] == "temperature"
    assert len({got["response"]["request_id"] for got in answers.values() if got["response"]}) == 5
    said = {name: got["error"]["message"] for name, got in answers.items() if got["error"]}
    assert said[None].startswith("line 7: it is not valid JSON")
    assert "method: must be POST; got 'GET'" in said["get"]
    assert "url: must be one of" in said["elsewhere"]
    assert "body.stream" in said["streamed"]
    assert "priority: is not a known field" in said["more"]
    assert "4 answered, 6 failed, 0 had their answer already" in capfd.readouterr().err


async def test_a_second_run_asks_only_what_has_no_answer(tmp_path):
    write(tmp_path / "in.jsonl", *(line(str(number)) for number in range(6)), "not json")
    kept = {"id": "x", "custom_id": "0", "response": {"status_code": 200, "body": "kept"}, "error": None}
    busy = {"id": "x", "custom_id": "1", "response": {"status_code": 503, "body": {}}, "error": None}
    lost = {"id": "x", "custom_id": "2", "response": None, "error": {"code": "connection_error"}}
    bad = {"id": "x", "custom_id": "3", "response": {"status_code": 400, "body": "kept"}, "error": None}
    write(tmp_path / "out.jsonl", kept, busy, lost, bad)
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write(json.dumps({**kept, "custom_id": "4"}))  # no line end: a crash cut it short
    async with serving(say([70, 71])) as served:
        assert await batch(served.url, tmp_path, "--model", "toy") == 1
        assert len(served.engine.requests) == 4
        first = (tmp_path / "out.jsonl").read_text().splitlines()
        assert await batch(served.url, tmp_path) == 1
        assert len(served.engine.requests) == 4
    answers = read(tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(first) == 7
    assert [answers[name]["response"]["body"] for name in ("0", "3")] == ["kept", "kept"]
    assert {answers[str(number)]["response"]["status_code"] for number in (1, 2, 4, 5)} == {200}
    assert not (tmp_path / "out.jsonl.resuming").exists()


async def test_what_fails_in_passing_is_tried_again(tmp_path, monkeypatch):
    asked = 0

    def busy(request: GenerateRequest) -> list:
        nonlocal asked
        asked += 1
        return [Overloaded("the queue is full")] if asked <= 2 else say([70])(request)

    monkeypatch.setattr("ostinato.runtime.batch_run.LONGEST_WAIT_S", 0.01)
    write(tmp_path / "in.jsonl", line("one", model="gpt-4o"))
    async with serving(busy) as served:
        assert await batch(served.url, tmp_path, "--model", "toy", "--retries", "2") == 0
    assert asked == 3
    write(tmp_path / "in.jsonl", line("one"), line("two"))
    assert await batch(served.url, tmp_path, "--retries", "1") == 1  # the server has gone
    assert read(tmp_path / "out.jsonl")["two"]["error"]["code"] == "connection_error"


async def test_no_more_requests_run_at_once_than_wanted(tmp_path):
    write(tmp_path / "in.jsonl", *(line(str(number)) for number in range(9)))
    most = 0

    def watch(request: GenerateRequest) -> list:
        nonlocal most
        most = max(most, len(served.engine.running))
        return say([70, 71, 72])(request)

    async with serving(watch) as served:
        served.engine.step_s = 0.002
        assert await batch(served.url, tmp_path, "--concurrency", "3") == 0
    assert most == 3


@pytest.mark.parametrize(
    ("lines", "out", "says"),
    [
        ([line("a"), line("b"), line("a")], None, "lines 1 and 3 have the same custom_id 'a'"),
        (
            [line("a")],
            {"custom_id": "z", "response": {"status_code": 200}},
            "'z', which the input does not ask",
        ),
        ([line("a")], line("a"), "line 1 is no answer of a batch"),
        ([line("a")], "precious notes", "line 1 is no answer of a batch"),
        ([line("a")], "[" * 100_000, "line 1 is no answer of a batch"),
        (None, None, "No such file"),
    ],
)
def test_files_that_do_not_fit_are_refused_before_anything_is_asked(tmp_path, capsys, lines, out, says):
    if lines is not None:
        write(tmp_path / "in.jsonl", *lines)
    if out is not None:
        write(tmp_path / "out.jsonl", out)
    words = [
        "batch",
        "-i",
        str(tmp_path / "in.jsonl"),
        "-o",
        str(tmp_path / "out.jsonl"),
        "http://127.0.0.1:1",
    ]
    assert main.main(words) == 2
    assert says in capsys.readouterr().err
    assert (out is None) == (not (tmp_path / "out.jsonl").exists())
    assert not (tmp_path / "out.jsonl.resuming").exists()
    if out is not None:
        assert (tmp_path / "out.jsonl").read_text() == (
            out if isinstance(out, str) else json.dumps(out)
        ) + "\n"


def test_the_input_and_files_that_cannot_be_written_are_no_output(tmp_path, capsys):
    asked = tmp_path / "in.jsonl"
    asked.write_text(json.dumps(line("a")))  # one line without an end, as if a crash had cut it short
    (tmp_path / "link").symlink_to(asked)
    (tmp_path / "notes").write_text("precious, and no line end")
    for out, says in (
        ("in.jsonl", "is the input, too"),
        ("link", "is the input, too"),
        ("notes", "line 1 is no answer of a batch"),
        (".", "Is a directory"),
        ("/dev/full", "No space left on device"),
    ):
        words = ["batch", "-i", str(asked), "-o", str(tmp_path / out), "http://127.0.0.1:1", "--retries", "0"]
        assert main.main(words) == 2
        assert says in capsys.readouterr().err
    assert asked.read_text() == json.dumps(line("a"))
    assert (tmp_path / "notes").read_text() == "precious, and no line end"


async def test_answers_that_are_no_json_are_told_and_end_nothing_else(tmp_path):
    def sends(body: bytes):
        async def answer(request: web.Request, asked: object) -> web.Response:
            return web.Response(body=body, content_type="application/json", charset="utf-8")

        return answer

    half = b'{"choices": [{"text": "\\ud83d"}]}'  # of a surrogate pair: JSON, and not to be said in UTF-8
    bodies = {
        "/v1/chat/completions": b'{"a": "\xff"}',
        "/v1/embeddings": b"[" * 100_000,
        "/v1/rerank": b'{"a": NaN}',
        "/v1/completions": half,
    }
    write(tmp_path / "in.jsonl", *(line(path, path) for path in bodies))
    async with scripted({path: sends(body) for path, body in bodies.items()}) as served:
        assert await batch(served.url, tmp_path, "--retries", "0") == 1
    answers = read(tmp_path / "out.jsonl")
    assert answers.pop("/v1/completions")["response"]["body"] == json.loads(half)
    assert len(answers) == 3
    assert {record["error"]["code"] for record in answers.values()} == {"invalid_answer"}


@pytest.fixture
def told(monkeypatch):
    """What a run says in the log, line by line."""
    log, handler, lines = logging.getLogger("ostinato.runtime.batch_run"), logging.Handler(), []
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(log, "propagate", False)
    monkeypatch.setattr(log, "handlers", [handler])
    return lines


async def test_a_server_that_is_not_there_is_told_once_before_anything_is_tried_again(
    tmp_path, told, monkeypatch
):
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append((seconds, [*told]))

    monkeypatch.setattr("ostinato.runtime.batch_run.asyncio.sleep", sleep)
    write(tmp_path / "in.jsonl", *(line(str(number)) for number in range(4)))
    assert await batch("http://127.0.0.1:1", tmp_path) == 1
    says = (
        "no connection to http://127.0.0.1:1: Connection refused; each request is tried again for 31 s. "
        "Start the server, or give its address"
    )
    assert waits[0] == (1.0, [says])
    assert [seconds for seconds, _ in waits].count(16.0) == 4
    assert told == [says]
    assert {one["error"]["code"] for one in read(tmp_path / "out.jsonl").values()} == {"connection_error"}


async def test_a_wrong_key_is_told_once_not_tried_again_and_asked_anew_by_the_next_run(
    tmp_path, told, monkeypatch
):
    write(tmp_path / "in.jsonl", *(line(str(number)) for number in range(4)))
    async with serving(say([70, 71]), api_key=("right",)) as served:
        for key, says in (
            (None, "without a key (status 401: "),
            ("wrong", "with the key of OPENAI_API_KEY (status 401: "),
        ):
            monkeypatch.delenv("OPENAI_API_KEY", raising=False)
            if key is not None:
                monkeypatch.setenv("OPENAI_API_KEY", key)
            before = len(told)
            assert await batch(served.url, tmp_path) == 1
            (said,) = told[before:]
            assert said.startswith(f"{served.url} refuses requests {says}")
            assert "set OPENAI_API_KEY to" in said
            answers = read(tmp_path / "out.jsonl").values()
            assert [one["response"]["status_code"] for one in answers] == [401] * 4
        monkeypatch.setenv("OPENAI_API_KEY", "right")
        assert await batch(served.url, tmp_path) == 0
    assert {one["response"]["status_code"] for one in read(tmp_path / "out.jsonl").values()} == {200}


async def test_the_first_failure_of_each_kind_is_told_with_its_reason(tmp_path, told, monkeypatch):
    monkeypatch.setattr("ostinato.runtime.batch_run.LONGEST_WAIT_S", 0.01)
    full = [Overloaded("the queue is full")]
    write(
        tmp_path / "in.jsonl",
        line("a", temperature=-1),
        line("b", temperature=-1),
        line("c", stream=True),
        line("d", model="nothing"),
        line("e"),
    )
    async with serving(lambda request: full) as served:
        assert await batch(served.url, tmp_path, "--retries", "1", "--concurrency", "1") == 1
        bad, line_, model, busy = told
    assert bad.startswith("request 'a' has failed: status 400: temperature: ")
    assert line_.startswith("request 'c' has failed: line 3: body.stream: has no place in a batch")
    assert model.startswith("request 'd' has failed: status 404: ")
    assert busy == f"{served.url} answers with status 429: the queue is full; what fails so is tried again"

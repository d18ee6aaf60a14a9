"""`ostinato batch` with a compiled model: a server comes and goes with the run."""

import json
from pathlib import Path

from tests.support.server_process import run_command


def test_a_file_is_answered_by_an_artifact_and_then_complete(tiny_artifact: Path, tmp_path: Path):
    fields = {"prompt": "hello there", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
    lines = [
        {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": {**fields, "seed": at}}
        for at in range(20)
    ]
    asked, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("batch", "-i", str(asked), "-o", str(answers), str(tiny_artifact))
    ended = run_command(*words, folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    got = [json.loads(line) for line in answers.read_text().splitlines()]
    assert {record["custom_id"] for record in got} == {str(at) for at in range(20)}
    bodies = [record["response"]["body"] for record in got]
    assert len({body["choices"][0]["text"] for body in bodies}) == 1
    assert {body["usage"]["completion_tokens"] for body in bodies} == {8}
    again = run_command(*words, folder=tmp_path)
    assert "0 answered, 0 failed, 20 had their answer already" in again.stderr

"""The demo model: transformers' tokens in float32, a right answer through the official client, the tools.

The tokens come from golden_smollm2.json, which make_golden.py writes with transformers' own `generate`.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

import ostinato
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from tests.support.server_process import ServerProcess, run_command, serving

pytestmark = pytest.mark.demo

GOLDEN = json.loads(Path(__file__).with_name("golden_smollm2.json").read_text())["cases"]
PROMPTS = [case["prompt"] for case in GOLDEN]
WANTS = [case["new"] for case in GOLDEN]
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def tokens(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_golden_file_holds_twenty_prompts_without_near_ties():
    lengths = [len(prompt) for prompt in PROMPTS]
    assert len(lengths) == 20
    assert (min(lengths), max(lengths)) == (5, 900)
    assert all(len(want) == 64 for want in WANTS)
    assert min(case["margin"] for case in GOLDEN) > 1e-3  # ten times what float32 errs by here


@pytest.mark.slow
def test_greedy_tokens_equal_transformers_one_at_a_time_and_again_with_prefix_hits(demo_artifact):
    with LLM(demo_artifact) as llm:
        assert llm.info.dtype == "float32"
        assert tokens([llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]) == WANTS
        again = llm.generate(PROMPTS, GREEDY)
    assert tokens(again) == WANTS
    assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("step_tokens", [512, 48], ids=["all at once", "chunked prefill"])
def test_greedy_tokens_equal_transformers_all_at_once(demo_artifact, step_tokens):
    scheduler = {"max_step_tokens": step_tokens}
    with LLM(demo_artifact, kv={"prefix_cache": False}, scheduler=scheduler) as llm:
        assert tokens(llm.generate(PROMPTS, GREEDY)) == WANTS


@pytest.fixture(scope="module")
def server(demo_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("server"), demo_artifact, "--server.served-name=smollm2") as running:
        yield running
        running.wait_idle()


def test_the_official_client_is_told_that_paris_is_the_capital_of_france(server):
    asked = {"model": "smollm2", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
    with OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=5)
        streamed = client.chat.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    choice = whole.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert text == choice.message.content
    for entry in choice.logprobs.content:
        assert len(entry.top_logprobs) == 5
        assert all(math.isfinite(top.logprob) and top.logprob <= 0 for top in entry.top_logprobs)
        assert entry.logprob == entry.top_logprobs[0].logprob


def test_an_agent_s_round_trip_with_tools_and_a_typed_answer(demo_artifact, tmp_path):
    """What agent frameworks send, with the template that docs/api.md names for this model."""
    template = Path(ostinato.__file__).with_name("docs") / "chatml_tools.jinja"
    integers = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
    integers |= {"required": ["a", "b"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "add", "strict": True, "parameters": integers}}]
    wanted = {"type": "json_schema", "json_schema": {"name": "sum", "schema": integers, "strict": True}}
    messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
    asked: dict[str, Any] = {"model": "smollm2", "tools": tools, "temperature": 0, "max_tokens": 60}
    flags = ("--server.served-name=smollm2", f"--server.chat-template={template}")
    with (
        serving(tmp_path, demo_artifact, *flags) as server,
        OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client,
    ):
        ask = client.chat.completions.create
        named = {"type": "function", "function": {"name": "add"}}
        first = ask(**asked, messages=messages, tool_choice=named, response_format=wanted).choices[0]
        assert first.finish_reason == "tool_calls"
        (call,) = first.message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        free = ask(**asked, messages=messages, response_format=wanted).choices[0]
        said = free.message.tool_calls
        text = free.message.content if not said else said[0].function.arguments
        assert json.loads(text).keys() == {"a", "b"}  # it may do either, and nothing else
        server.wait_idle()


def test_the_printed_curl_line_works(server):
    line = server.out[server.out.index("curl -s http") :].strip()
    (body,) = (part for part in line.split("'") if part.startswith("{"))
    status, answer = server.post("/v1/chat/completions", body.encode())
    assert status == 200
    assert answer["choices"][0]["message"]["content"]


def test_chat_in_a_pipe_answers_each_line_and_remembers(demo_artifact, tmp_path):
    given = "What is the capital of France?\nAnd of Italy?\n/clear\n/exit\nnot read\n"
    done = run_command(
        "chat", str(demo_artifact), "--temperature=0", "--max-tokens=40", folder=tmp_path, given=given
    )
    assert (done.returncode, done.stderr) == (0, "")
    france, italy = done.stdout.strip().splitlines()
    assert "Paris" in france
    assert "Rome" in italy  # said only when it knows what is asked for


def test_inspect_prints_tables_layers_and_checks(demo_artifact, tmp_path):
    done = run_command("inspect", str(demo_artifact), "--verify", "--weights", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split()[1:3] for line in done.stdout.splitlines() if line.strip()}
    assert rows["model"] == ["LlamaForCausalLM", "from"]
    for name, count in {"merge_linears": 60, "rms_norm": 61, "silu_mul": 30, "rope_kv_write": 30}.items():
        assert rows[name] == [str(count), str(count)]
    assert rows["verified:"][1] == "files;"


@pytest.mark.parametrize(
    ("which", "there", "gone"),
    [
        ("before", ("aten.rsqrt", "aten.silu", "ostinato.kv_write"), "ostinato.rms_norm"),
        ("after", ("ostinato.add_rms_norm", "ostinato.silu_mul", "ostinato.rope_kv_write"), "aten.rsqrt"),
    ],
)
def test_inspect_prints_the_code_of_one_layer(demo_artifact, tmp_path, which, there, gone):
    done = run_command("inspect", str(demo_artifact), "--graph", which, "--layer=3", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in there)
    assert gone not in done.stdout
    assert "layers_3_" in done.stdout
    assert "layers_5_" not in done.stdout

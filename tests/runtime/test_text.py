"""Tokenizer, chat template and defaults of an artifact's tokenizer folder."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ostinato.errors import ArtifactError, InvalidRequest
from ostinato.runtime.http.chat_messages import ChatMessage, template_messages
from ostinato.runtime.text import TextFrontEnd
from tests.support.toy_text import BOS, CHATML, EOS, front_end, tokenizer, tokenizer_json

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    config = {"bos_token": {"content": BOS, "special": True}, "eos_token": EOS, "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def messages(*raw: dict[str, object]) -> list[ChatMessage]:
    return [ChatMessage.model_validate(message) for message in raw]


def test_folder_is_read(folder: Path):
    (folder / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}'
    )
    text = TextFrontEnd.load(folder)
    assert text.render_chat(HELLO) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert text.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert text.defaults.model_dump(exclude_none=True) == {"temperature": 0.6, "top_k": 20}
    assert text.decode(text.encode("naïve 😀 café")) == "naïve 😀 café"


def test_template_file_wins_over_the_one_in_the_config(folder: Path):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert TextFrontEnd.load(folder).render_chat(HELLO) == "Hello!"


def test_named_default_template_is_used(folder: Path):
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert TextFrontEnd.load(folder).render_chat(HELLO) == "yes"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "not a readable tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("generation_config.json", '{"top_p": 3}', "top_p"),
        ("chat_template.jinja", "{% if %}", "chat template, line 1"),
    ],
)
def test_broken_folder_names_the_file(folder: Path, name: str, content: str | None, reason: str):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ArtifactError, match=reason):
        TextFrontEnd.load(folder)


def test_chat_prompt_has_one_bos_although_the_tokenizer_adds_one():
    text = front_end(template="{{ bos_token }}{{ messages[0].content }}", add_bos=True)
    bos = tokenizer().token_to_id(BOS)
    ids = text.encode_chat(HELLO)
    assert ids == tokenizer().encode(BOS + "Hello", add_special_tokens=False).ids
    assert ids.count(bos) == 1


def test_plain_prompt_gets_bos_once_even_if_it_brings_its_own():
    text = front_end(add_bos=True)
    bos = tokenizer().token_to_id(BOS)
    assert text.encode("Hello")[0] == bos
    assert text.encode(BOS + "Hello") == text.encode("Hello")
    assert bos not in text.encode("Hello", add_special_tokens=False)


def test_bos_that_only_the_config_asks_for_is_added():
    text = TextFrontEnd(tokenizer(), special_tokens={"bos_token": BOS}, add_bos=True)
    assert text.encode("Hello") == [tokenizer().token_to_id(BOS), *tokenizer().encode("Hello").ids]


def test_what_the_template_objects_to_reaches_the_client():
    text = front_end(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        text.render_chat(HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[5].content.x }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_can_only_refuse_never_break_out(template: str):
    with pytest.raises(InvalidRequest):
        front_end(template=template).render_chat(HELLO)


def test_template_sees_what_transformers_gives_it():
    template = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m | tojson }}{% endgeneration %}{% endfor %}{{ eos_token }}{{ mood }}"
    )
    rendered = front_end(template=template).render_chat(
        [*HELLO, {"role": "user", "content": "<é>"}], template_kwargs={"mood": "glad"}
    )
    assert rendered == '{"role": "user", "content": "<é>"}' + EOS + "glad"


@pytest.mark.parametrize("name", ["messages", "conversations", "chat_template", "template", "self"])
def test_reserved_template_argument_is_refused(name: str):
    with pytest.raises(InvalidRequest, match=f"{name} is set by the server") as caught:
        front_end().render_chat(HELLO, template_kwargs={name: []})
    assert caught.value.param == "chat_template_kwargs"


def test_model_without_a_template_says_where_to_go():
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        front_end(template=None).render_chat(HELLO)


def test_parts_of_text_reach_the_front_end_as_they_are_and_developer_becomes_system():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    shown = template_messages(
        messages({"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}), CHATML
    )
    assert shown == [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    assert "user\none\ntwo<" in front_end().render_chat(shown)


def call(arguments: str) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }


def test_tool_arguments_reach_the_template_as_a_mapping():
    shown = template_messages(messages(call('{"city": "Köln", "days": [1, 2]}')), CHATML)
    rendered = front_end().render_chat(shown, add_generation_prompt=False)
    assert '<tool_call>{"city": "Köln", "days": [1, 2]}</tool_call>' in rendered


READS_PAIRS = """{% for m in messages %}{% for call in m.tool_calls or [] %}
{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}
{% endfor %}{{ m.content }}{% endfor %}"""


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "null", '"x"', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000]
)
def test_tool_arguments_that_are_no_object_are_shown_as_they_are_where_the_template_can(arguments: str):
    shown = template_messages(messages(call(arguments)), CHATML)
    rendered = front_end().render_chat(shown, add_generation_prompt=False)
    assert f"<tool_call>{json.dumps(arguments)}</tool_call>" in rendered
    with pytest.raises(InvalidRequest) as caught:
        template_messages(messages(call(arguments)), READS_PAIRS)
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


def test_empty_tool_arguments_are_an_empty_object():
    shown = template_messages(messages(call("")), CHATML)
    assert shown[0]["tool_calls"][0]["function"]["arguments"] == {}


def test_tool_calls_are_refused_when_the_template_never_reads_them():
    with pytest.raises(InvalidRequest, match="cannot show tool calls"):
        template_messages(messages(call("{}")), "{{ messages }}")


def test_dumped_answer_can_be_sent_back():
    dumped = {
        "content": "hi", "refusal": None, "role": "assistant", "annotations": None, "audio": None,
        "function_call": None, "tool_calls": None,
    }  # fmt: skip
    assert template_messages(messages(dumped), CHATML) == [{"role": "assistant", "content": "hi"}]


async def test_long_prompt_is_encoded_off_the_loop():
    text = front_end()
    long = "the quick brown fox jumps over the lazy dog " * 10_000
    worst, last = 0.0, time.monotonic()
    encoding = asyncio.ensure_future(text.off_loop(lambda: text.encode(long)))
    began = last
    while not encoding.done():
        await asyncio.sleep(0.001)
        worst, last = max(worst, time.monotonic() - last), time.monotonic()
    assert len(await encoding) > 10_000
    # The loop goes on: its longest pause is a part of the encoding, not all of it.
    assert worst < 0.5 * (last - began)
    text.close()


def test_front_end_and_server_import_neither_torch_nor_models(folder: Path):
    code = f"""
import sys
from pathlib import Path
import ostinato.runtime.http.server, ostinato.runtime.http.serve_app
from ostinato.runtime.text import TextFrontEnd
text = TextFrontEnd.load(Path({str(folder)!r}))
text.encode_chat([{{"role": "user", "content": "x"}}])
names = sys.modules
print([m for m in names if m.split(".")[0] in ("torch", "triton") or m.startswith("transformers.models")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr

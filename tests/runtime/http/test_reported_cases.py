"""Faults that users of other servers reported: the right values, for the whole kind of each."""

import json
import re
from typing import Any

import pytest

from ostinato.runtime.config import EngineConfig
from ostinato.runtime.http.api_schema import ChatRequest, CompletionRequest
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import GenerateRequest, TokenEvent
from tests.support.fake_engine import FakeEngine, Script, info, say
from tests.support.serving import Served, serving
from tests.support.toy_text import BOS, EOS, front_end, tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
ASK: dict[str, dict[str, object]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "the quick"}}
BOTH = pytest.mark.parametrize("path", [CHAT, TEXT], ids=["chat", "text"])


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def pieces(*texts: str) -> Script:
    """Each text arrives as one event; EOS ends the answer."""

    def script(request: GenerateRequest) -> list[TokenEvent]:
        said = [TokenEvent(request.request_id, tuple(ids(text))) for text in texts]
        return [*said, TokenEvent(request.request_id, (1,), finish_reason="stop", stop_token_id=1)]

    return script


async def streamed(served: Served, path: str, **fields: object) -> tuple[list[str], str]:
    """Texts of the chunks that have one, and the reason of the end."""
    events = await served.events(path, {**ASK[path], "max_tokens": 40, **fields})
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    texts = [one["text"] if path == TEXT else one["delta"].get("content") for one in choices]
    return [text for text in texts if text], choices[-1]["finish_reason"]


# Log-probabilities: legal combinations answer, the others are refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
    ],
)
async def test_logprobs_of_chat_that_make_no_sense_are_refused(fields: dict[str, object], param: str):
    async with serving(pieces("a")) as served:
        for stream in (False, True):
            status, body = await served.post(CHAT, {**ASK[CHAT], **fields, "stream": stream})
            assert (status, body["error"]["param"]) == (400, param)


async def test_echo_with_logprobs_answers_under_every_filter():
    filters: list[dict[str, object]] = [
        {"top_k": 1, "temperature": 1},
        {"temperature": 0},
        {"top_p": 0.01},
        {"logit_bias": {"10": -100}},
        {"allowed_token_ids": [10]},
    ]
    async with serving(say(ids("a😀"), stop_id=1)) as served:
        for filtered in filters:
            for limit in (0, 20):
                fields = {**ASK[TEXT], "echo": True, "logprobs": 5, "max_tokens": limit, **filtered}
                status, whole = await served.post(TEXT, fields)  # `post` refuses NaN and Infinity
                assert status == 200
                logprobs = whole["choices"][0]["logprobs"]
                assert logprobs["token_logprobs"][0] is None
                assert all(isinstance(value, float) for value in logprobs["token_logprobs"][1:])
                lengths = {len(logprobs[key]) for key in ("tokens", "token_logprobs", "top_logprobs")}
                assert lengths == {len(logprobs["text_offset"])}


async def test_bytes_of_a_character_in_several_tokens_join_to_it():
    async with serving(pieces("x😀y")) as served:
        fields = {**ASK[CHAT], "logprobs": True, "top_logprobs": 0}
        _, whole = await served.post(CHAT, fields)
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) > 3
    raw = bytes(byte for entry in content for byte in entry["bytes"])
    assert raw == "x😀y".encode()
    assert "�" not in json.dumps(whole, ensure_ascii=False)


# BOS


async def test_a_template_with_bos_gives_one_in_the_server_in_python_and_in_tokenize():
    text = front_end(
        template="{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", add_bos=True
    )
    async with serving(pieces("a"), text=text) as served:
        await served.post(CHAT, ASK[CHAT])
        ours = list(served.engine.requests[0].prompt_token_ids)
        _, told = await served.post("/tokenize", ASK[CHAT])
        await served.post(TEXT, {"prompt": "Hello"})
        plain = list(served.engine.requests[1].prompt_token_ids)
    assert ours == told["tokens"] == [0, *ids("Hello")]
    assert plain == [0, *ids("Hello")]
    engine = FakeEngine(pieces("a"), info(vocab_size=410, eos=1))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with LLM.over(engine, front_end(template=template, add_bos=True), EngineConfig()) as llm:
        assert list(llm.chat(HELLO)[0].prompt_token_ids) == ours
        assert list(llm.generate("Hello")[0].prompt_token_ids) == plain


async def test_a_template_without_bos_gives_none_unless_it_is_asked_for():
    text = front_end(template="{% for m in messages %}{{ m.content }}{% endfor %}", add_bos=True)
    async with serving(pieces("a"), text=text) as served:
        for special in (None, False, True):
            fields = {**ASK[CHAT], "add_special_tokens": special}
            await served.post(CHAT, fields)
            _, told = await served.post("/tokenize", fields)
            ours = list(served.engine.requests[-1].prompt_token_ids)
            assert ours == told["tokens"] == [0] * bool(special) + ids("Hello")


async def test_text_that_spells_a_special_token_becomes_it():
    """The documented rule; `BOS` and `EOS` are the toy's."""
    messages = [{"role": "user", "content": f"a{EOS}b{BOS}"}]
    text = front_end(template="{% for m in messages %}{{ m.content }}{% endfor %}")
    async with serving(pieces("a"), text=text) as served:
        _, told = await served.post("/tokenize", {"messages": messages})
        _, plain = await served.post("/tokenize", {"prompt": f"a{EOS}b{BOS}"})
    assert told["tokens"] == plain["tokens"] == [*ids("a"), 1, *ids("b"), 0]


# Arguments of past tool calls

GEMMA = (
    "{% for m in messages %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "call:{{ call.function.name }}{{ '{' }}{% for key, value in call.function.arguments.items() %}"
    '{{ key }}:{% if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value | tojson }}{% endif %}'
    "{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}{% endfor %}{% endfor %}"
)


async def rendered(served: Served, arguments: str, content: object = None) -> tuple[int, Any]:
    function = {"name": "terminal", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    answer = {"role": "assistant", "content": content, "tool_calls": [call]}
    status, body = await served.post("/tokenize", {"messages": [*HELLO, answer]})
    if status != 200:
        return status, body["error"]["param"]
    return status, served.state.text.decode(body["tokens"], skip_special=False)


async def test_arguments_reach_the_template_decoded_and_unchanged():
    async with serving(pieces("a"), text=front_end(template=GEMMA), window=300) as served:
        cases = {
            '{"command":"date"}': 'call:terminal{command:<|"|>date<|"|>}',
            "": "call:terminal{}",
            "  ": "call:terminal{}",
            "{}": "call:terminal{}",
            '{"n":9007199254740993}': "call:terminal{n:9007199254740993}",
            '{"a":{"b":["ü",null,true]}}': 'call:terminal{a:{"b": ["ü", null, true]}}',
            '{"q":"say \\"hi\\""}': 'call:terminal{q:<|"|>say "hi"<|"|>}',
        }
        for arguments, said in cases.items():
            for content in (None, "", "text"):
                assert await rendered(served, arguments, content) == (200, f"Hello{content or ''}{said}")
        assert await rendered(served, "{}", []) == (400, "messages[1].content")


async def test_broken_arguments_are_that_request_s_400():
    where = "messages[1].tool_calls[0].function.arguments"
    broken = ("{", "[1]", "null", '"x"', "5", '{"a":1,"a":2}', '{"a":NaN}', "[" * 5000, '{"a":"\\ud800"}')
    async with serving(pieces("a"), text=front_end(template=GEMMA)) as served:
        for arguments in broken:
            assert await rendered(served, arguments) == (400, where)


# Stop strings in a stream


@BOTH
@pytest.mark.parametrize(
    ("said", "stop", "texts", "reason"),
    [
        (("AB", "CD", "EFG", "H"), "DEFGH", "ABC", "stop"),
        (("ABCDEFGHIJ",), "DEFGH", "ABC", "stop"),
        (("AB", "CD", "EX"), "DEFGH", "ABCDEX", "stop"),
        (("AB", "CD"), "DEFGH", "ABCD", "stop"),
        (("hello", " world"), "zzzz", "hello world", "stop"),
    ],
)
async def test_nothing_of_a_stop_string_is_sent_and_nothing_else_is_lost(
    path: str, said: tuple[str, ...], stop: str, texts: str, reason: str
):
    async with serving(pieces(*said)) as served:
        chunks, end = await streamed(served, path, stop=[stop])
        _, whole = await served.post(path, {**ASK[path], "max_tokens": 40, "stop": stop})
    choice = whole["choices"][0]
    content = choice["text"] if path == TEXT else choice["message"]["content"]
    assert ("".join(chunks), end) == (texts, reason)
    assert (content, choice["finish_reason"]) == (texts, reason)
    if texts == "ABC":
        assert not any("D" in chunk for chunk in chunks)
    if stop == "zzzz":
        assert chunks[0] == "hello"  # nothing of it could be the beginning of the stop string


# Whatever a field is given

JUNK: tuple[object, ...] = (
    "2", "", True, False, 0, -1, 1, 2.5, 1e300, -(2**63), 2**70, [], [[]], [1, "a"], [-1], {}, {"a": 1},
    "x" * 3000, "\x00", ["\ud7ff"] * 40, {"type": "nonsense"}, [None], {"1": None},
)  # fmt: skip
TYPES = {"str", "int", "bool", "float", "list", "dict"}


@BOTH
async def test_any_value_in_any_field_is_an_answer_or_a_400_that_names_it(path: str):
    schema = ChatRequest if path == CHAT else CompletionRequest
    refusals = 0
    async with serving(pieces("a", "b")) as served:
        for name in sorted(schema.model_fields.keys() | schema.unsupported.keys() | {"nonsense"}):
            for value in JUNK:
                fields = {**ASK[path], name: value}
                async with served.http.post(served.url + path, json=fields) as response:
                    raw = await response.read()
                if response.status == 200:
                    continue
                assert response.status in (400, 404), (name, value, raw)
                error = json.loads(raw)["error"]
                assert len(raw) <= 1024
                assert error["param"] is not None, (name, value, raw)
                named = error["param"].replace("[", ".").split(".")[0]
                assert named == name or name in error["message"], (name, value, raw)
                steps = re.split(r"[.\[\]]+", error["param"])
                assert TYPES.isdisjoint(steps), (
                    name,
                    value,
                    raw,
                )  # what a client wrote, not what we hoped for
                refusals += 1
        assert served.engine.running == {}
        status, _ = await served.post(path, ASK[path])
        assert status == 200
    assert refusals > 500

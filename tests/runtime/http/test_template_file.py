"""`server.chat_template`: the operator's own template in place of the model's."""

import logging
from pathlib import Path

import pytest

import ostinato
from ostinato.errors import ConfigError
from ostinato.runtime.config import ServerConfig
from ostinato.runtime.http.server import make_app
from tests.support.fake_engine import FakeEngine, info, say
from tests.support.serving import serving
from tests.support.tool_serving import ASK, CALL, CHAT, WEATHER, writes
from tests.support.toy_text import CHATML, front_end

SHIPPED = Path(ostinato.__file__).with_name("docs") / "chatml_tools.jinja"
ALL_AT_ONCE = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER], "max_tokens": 4}


@pytest.mark.parametrize("own", [CHATML, None], ids=["a template without tools", "no template"])
async def test_the_shipped_template_lets_a_model_call_and_be_told_the_result(own: str | None):
    text = front_end(template=own)
    async with serving(writes(CALL), text=text, window=1024, chat_template=str(SHIPPED)) as server:
        _, body = await server.post(CHAT, ASK)
        (choice,) = body["choices"]
        assert choice["finish_reason"] == "tool_calls"
        said = choice["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "rain"}
        asked = [{"role": "system", "content": "Be brief."}, *ASK["messages"], said, result]
        status, _ = await server.post(CHAT, {**ASK, "messages": asked})
        assert status == 200
        first, second = (
            text.decode(list(request.prompt_token_ids), skip_special=False)
            for request in server.engine.requests
        )
    assert '"name": "get_weather"' in first
    assert first.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert second.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert second.endswith(
        "<|im_start|>user\nHello<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": '
        '{"city": "Köln 😀", "days": 9007199254740993}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_without_tools_the_shipped_template_is_plain_chatml():
    async with serving(say([10]), window=1024, chat_template=str(SHIPPED)) as server:
        _, body = await server.post("/tokenize", {"messages": ASK["messages"]})
        text = server.state.text.decode(body["tokens"], skip_special=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        (b"{% if %}", "chat template, line 1: "),
        (b"\xff", "can't decode"),
    ],
)
def test_a_file_that_is_no_template_is_an_error_at_start(tmp_path: Path, content: bytes | None, says: str):
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    config = ServerConfig(chat_template=str(file))
    with pytest.raises(ConfigError) as caught:
        make_app(FakeEngine(say([10]), info(vocab_size=410)), config, front_end())
    assert str(caught.value).startswith(f"server.chat_template={file}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize("parser", ["auto", "none", "hermes"])
async def test_tools_that_are_not_shown_are_refused_with_the_way_out(
    parser: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        async with serving(say([10]), window=1024, tool_parser=parser) as server:
            for path, tools in ((CHAT, [WEATHER]), ("/v1/messages", [{"name": "f", "input_schema": {}}])):
                status, body = await server.post(path, {**ALL_AT_ONCE, "tools": tools})
                assert (status, body["error"]["param"]) == (400, "tools")
                assert "server.chat_template" in body["error"]["message"]
    assert ("server.tool_parser=hermes: no effect" in caplog.text) == (parser == "hermes")

"""A thinking budget given to `LLM`: marks and settings are those of the server."""

from pathlib import Path

import pytest

from ostinato.errors import ConfigError, InvalidRequest
from ostinato.runtime.config import EngineConfig, ServerConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from tests.support import toy_text
from tests.support.engine_runs import toy_config
from tests.support.thinking_text import SENTENCE, front_end, tokenizer_json
from tests.support.toy_model import ToyModel

HELLO = [{"role": "user", "content": "Hello"}]


def load(path: Path, config: EngineConfig) -> ToyModel:
    return ToyModel(path)


def test_chat_and_text_have_a_budget_where_the_prompt_has_begun_to_think(tmp_path: Path):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(tokenizer_json(), encoding="utf-8")
    config = toy_config(server=ServerConfig(reasoning_end_str=SENTENCE))
    params = SamplingParams(seed=1, max_tokens=80, thinking_token_budget=6, skip_special_tokens=False)
    with LLM.over(EngineThread(tmp_path, config, load=load), front_end(), config) as llm:
        encode = llm.text.encode
        closing = encode(SENTENCE.removesuffix("</think>"), add_special_tokens=False) + encode("</think>")
        (said,) = llm.chat(HELLO, params)
        assert list(said.outputs[0].token_ids[6 : 6 + len(closing)]) == closing
        begun, closed = llm.generate(["<think>a", "<think>a</think>b"], params, n=1)
        assert list(begun.outputs[0].token_ids[6 : 6 + len(closing)]) == closing
        assert "Considering" not in closed.outputs[0].text


def test_a_model_that_does_not_think_and_a_wrong_setting_are_told(tmp_path: Path):
    config = toy_config()
    with (
        LLM.over(EngineThread(tmp_path, config, load=load), toy_text.front_end(), config) as llm,
        pytest.raises(InvalidRequest, match="thinking_token_budget: it is not known how"),
    ):
        llm.generate("a", SamplingParams(thinking_token_budget=3))
    config = toy_config(server=ServerConfig(reasoning_end_str="stop"))
    with pytest.raises(ConfigError, match=r"server.reasoning_end_str='stop': must close with '</think>'"):
        LLM.over(EngineThread(tmp_path, config, load=load), front_end(), config)

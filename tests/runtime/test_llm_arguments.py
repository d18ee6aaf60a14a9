"""Arguments of `LLM`'s methods: what is refused, in which words; prompts are tested through `LLM`."""

import pytest

from ostinato.errors import ConfigError, InvalidRequest
from ostinato.runtime.config import EngineConfig
from ostinato.runtime.llm import LLM
from ostinato.runtime.llm_arguments import check_n, read_conversations, read_template_kwargs


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", True, None])
def test_a_wrong_n_is_refused(n):
    with pytest.raises(InvalidRequest, match=r"n: got .*; give an int from 1 to 128"):
        check_n(n)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", r"messages: got 'hi' \(str\); give a list like \[{\"role\""),
        (None, r"messages: got None"),
        ({"role": "user", "content": "hi"}, r"messages: got .*\(dict\)"),
        ([], r"messages: empty"),
        ([[]], r"messages\[0\]: empty"),
        (["hi"], r"messages\[0\]: got 'hi' \(str\); a message is a dict"),
        ([[{"role": "user", "content": "hi"}], None], r"messages\[1\]: got None"),
    ],
)
def test_wrong_messages_are_refused(messages, says):
    with pytest.raises(InvalidRequest, match=says):
        read_conversations(messages)


@pytest.mark.parametrize("config", [{"kv": {"max_gib": 2}}, "config.toml", EngineConfig, 5, {}])
def test_a_config_of_another_type_is_named_with_what_to_give(config):
    with pytest.raises(
        ConfigError, match=r"config: got .* \((dict|str|int|ModelMetaclass)\); give an EngineConfig"
    ):
        LLM("anywhere", config=config)


@pytest.mark.parametrize("given", [["enable_thinking"], "enable_thinking", True, {1: "x"}, [("a", 1)]])
def test_wrong_variables_of_the_template_are_refused(given):
    with pytest.raises(InvalidRequest, match=r"template_kwargs: got .*; give a dict of names") as caught:
        read_template_kwargs(given)
    assert caught.value.param == "template_kwargs"


def test_variables_of_the_template_are_copied():
    given = {"enable_thinking": False}
    assert read_template_kwargs(given) == given
    assert read_template_kwargs(given) is not given
    assert read_template_kwargs(None) is None

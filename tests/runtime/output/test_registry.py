"""Which formats a model gets, and how others add theirs."""

from importlib.metadata import EntryPoint

import pytest

from ostinato.errors import ConfigError
from ostinato.runtime.output import registry
from ostinato.runtime.output.formats import ToolFormat
from ostinato.runtime.output.json_formats import MarkedJson
from ostinato.runtime.output.registry import (
    choose_formats,
    register_tool_format,
    tool_format,
    tool_names,
)

# What tells the families apart in their templates: (template, reasoning, tools).
TEMPLATES = [
    ('<tool_call>{"name"</tool_call> {% if enable_thinking %}<think></think>', "qwen3", "hermes"),
    ('<tool_call>\\n{"name": <function-name>', None, "hermes"),
    ("<tool_call><function=f><parameter=p> <think></think>", "qwen3", "qwen3_xml"),
    ("<|tool_call>call: <|channel>thought <channel|>", "gemma4", "gemma4"),
    ('Environment: ipython {"name": f, "parameters": p} <|python_tag|>', None, "llama3_json"),
    ("<|python_start|>[f()]<|python_end|>", None, "pythonic"),
    ("[AVAILABLE_TOOLS] [TOOL_CALLS]", None, "mistral"),
    ("[THINK] [/THINK] [TOOL_CALLS] [ARGS]", "mistral", "mistral"),
    ("<｜Assistant｜> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", None, "deepseek_v3"),
    ("<｜Assistant｜><think>\\n </think> <｜tool▁call▁begin｜>", "deepseek_r1", "deepseek_v3"),
    ("<|start|>assistant<|channel|>final<|message|>", "gpt_oss", "gpt_oss"),
    ("<|tool|>{{ tools }}<|/tool|>", None, "phi"),
    ("<|start_of_role|>tools <|tool_call|> Here is my thought process:", "granite", "granite"),
    ("]~b]ai <think> <minimax:tool_call> <response></response>", "minimax", "minimax"),
    ("<|start_of_role|> <think></think><response> <|tool_call|>", "granite", "granite"),
    ("{{ message.content }}", None, None),
    (None, None, None),
]


@pytest.mark.parametrize(("template", "reasoning", "tools"), TEMPLATES)
def test_formats_are_known_by_the_template(template: str | None, reasoning: str | None, tools: str | None):
    chosen = choose_formats("auto", "auto", template)
    names = [None if one is None else one.name for one in (chosen.reasoning, chosen.tools)]
    assert names == [reasoning, tools]


def test_a_name_wins_over_the_template_and_none_turns_off():
    template = TEMPLATES[0][0]
    chosen = choose_formats("none", "mistral", template)
    assert (chosen.reasoning, chosen.tools) == (None, tool_format("mistral"))
    assert choose_formats("none", "none", template).parser(calls=True) is None
    assert choose_formats("none", "hermes", template).parser(calls=False) is None
    with pytest.raises(ConfigError, match=r"server.reasoning_parser='x': no such format; one of deepseek_r1"):
        choose_formats("x", "none", template)


class Shouted(MarkedJson):
    """A format of somebody else's."""

    name = "shouted"
    starts = ("CALL!",)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "CALL!" in template


def plug_in() -> None:
    register_tool_format(Shouted())


def break_down() -> None:
    raise OSError("no disk")


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch):
    known = dict(registry._TOOLS)

    def use(what: str) -> None:
        point = EntryPoint("mine", f"{__name__}:{what}", registry.PLUGINS)
        monkeypatch.setattr(registry, "entry_points", lambda group: [point])
        registry._load_plugins.cache_clear()

    yield use
    registry._TOOLS.clear()
    registry._TOOLS.update(known)
    registry._load_plugins.cache_clear()


def test_an_installed_package_can_add_a_format(plugged):
    plugged("plug_in")
    assert choose_formats("auto", "auto", "CALL! <tool_call>").tools.name == "shouted"
    assert tool_names()[-1] == "shouted"
    made = choose_formats("none", "shouted", None).parser(calls=True)
    assert made.push('CALL!{"name": "f"} ')[0].name == "f"


def test_a_package_that_fails_is_named(plugged):
    plugged("break_down")
    with pytest.raises(ConfigError, match=r"entry point 'mine' of ostinato.output_formats: OSError: no disk"):
        choose_formats("auto", "auto", None)


def test_a_format_that_cannot_read_is_refused_when_it_is_made_and_not_in_an_answer():
    class Mute(ToolFormat):
        name = "mute"
        starts = ("<mute>",)

    with pytest.raises(TypeError, match=r"abstract method '?region'?"):
        Mute()

"""Our chat templates render what transformers renders, and refuse what its sandbox does."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ostinato.runtime.chat_template import ChatTemplate
from ostinato.runtime.messages import SamplingParams
from tests.support.toy_text import CHATML

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Hi é 😀\n"},
    {
        "role": "assistant",
        "content": "Hello",
        "reasoning": "greet",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1.5]}}}],
    },
    {"role": "user", "content": [{"type": "text", "text": "So?"}]},
]


def ours(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return ChatTemplate(source).render(messages, add_generation_prompt=True, variables=variables)


def theirs(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **variables
    )
    return str(rendered[0])


@pytest.mark.parametrize(
    "source",
    [
        CHATML,
        "{% for m in messages %}\n  {%- if loop.first %}{% continue %}{% endif %}\n{{ m.role }}\n{%endfor%}",
        "{% for m in messages %}{{ loop.index }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
        "{{ messages | tojson }}{{ messages[2] | tojson(indent=2) }}",
        "{{ messages[2].tool_calls | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=True) }}",
        "{{ messages[2].reasoning_content }}{{ messages[2].thinking }}{{ messages[2].reasoning }}",
        "{% set s = namespace(n=0, self=1) %}{% for m in messages %}{% set s.n = 1 + s.n %}{%endfor%}{{s.n}}",
        "{{ dict(a=1) }}{{ dict.fromkeys(['x'], 2) }}{{ dict([('k', 3)]).items() | list }}",
        "a{% generation %} {{ messages[0].content }} {% endgeneration %}b",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% set ns = namespace(x=1) %}{% generation %}{% set ns.x = 2 %}{% endgeneration %}{{ ns.x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}{% endfor %}",
        "{% macro show(m) %}<{{ m.content }}>{% endmacro %}{{ show(messages[0]) }}{{ mood }}{{ absent }}",
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ messages is iterable }}",
        "{{ strftime_now('%Y')|length }}{{ messages[1].content | trim | upper }}{{ '%s' % mood }}",
        "{% if messages[3].content is string %}s{% else %}{{ messages[3].content[0].text }}{% endif %}",
        "{{ {'a': 1} | items | list }}{{ messages[:2] | map(attribute='role') | join(',') }}",
    ],
)
def test_text_is_that_of_transformers(source: str):
    assert ours(source, TALK, mood="glad") == theirs(source, TALK, mood="glad")


class Mood(StrEnum):
    GLAD = "glad"


class Speaker:
    def save(self) -> str:
        return "written"


@pytest.mark.parametrize("value", [Mood.GLAD, (1, 2.5), {"k": None}, True, SamplingParams(seed=3), Speaker()])
def test_values_reach_the_template_as_plain_data(value: object):
    source = "{{ value }}|{{ value | tojson }}|{{ value.save is defined }}|{{ messages[0].extra }}"
    message = {"role": "user", "content": "x", "extra": value}
    rendered = ours(source, [message], value=value)
    assert rendered == theirs(source, [message], value=value)
    assert "written" not in rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.update(messages[0], {}) }}",
        "{% set ns = namespace(__init__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ messages[9].content.x }}",
        "{% generation %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_break_out_or_change_what_it_is_given(source: str):
    with pytest.raises((TemplateError, OverflowError)):
        ours(source, TALK)


def test_the_callers_messages_are_left_alone():
    @dataclass
    class Part:
        text: str

    message = {"role": "user", "content": Part("x"), "thinking": "t"}
    assert ours("{{ messages[0].reasoning_content }}{{ messages[0].content }}", [message]) == "t<Part>"
    assert message.keys() == {"role", "content", "thinking"}

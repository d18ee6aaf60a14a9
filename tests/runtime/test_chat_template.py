"""In which form a template reads the content of messages: tried, so it does not matter how it is written."""

import pytest

from ostinato.runtime.chat_template import Forms, content_forms, render_conversation

EACH = "{% for m in messages %}"
TEXT, PARTS, EITHER, ONE = Forms(True, False), Forms(False, True), Forms(True, True), Forms(False, False)
TEMPLATES = {
    "prints it": (TEXT, EACH + "{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"),
    "prints it through an alias": (TEXT, EACH + "{% set c = m['content'] %}{{ c }}{% endfor %}"),
    "dumps messages": (TEXT, "{{ messages | tojson }}"),
    "loops": (PARTS, EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"),
    "loops over an alias": (
        PARTS,
        EACH + "{% set c = m['content'] %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endfor %}",
    ),
    "loops in a macro over its parameter": (
        PARTS,
        "{% macro show(x) %}{% for p in x %}{% if p.type == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
        "{% endmacro %}" + EACH + "{{ show(m.content) }}{% endfor %}",
    ),
    "loops in a macro that a macro calls with a message": (
        PARTS,
        "{% macro inner(parts) %}{% for p in parts %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{% macro outer(message) %}{{ inner(message['content'] | list) }}{% endmacro %}"
        + EACH
        + "{{ outer(m) }}{% endfor %}",
    ),
    "selects by attribute": (
        PARTS,
        EACH + "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}"
        "{% endfor %}",
    ),
    "reads the first part": (ONE, EACH + "{{ m['content'][0]['text'] }}{% endfor %}"),
    "asks what it is": (
        EITHER,
        EACH + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
        "{% endfor %}{% endif %}{% endfor %}",
    ),
    "asks in a macro": (
        EITHER,
        "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }};{% endfor %}"
        "{% endif %}{% endmacro %}" + EACH + "{{ show(m.content) }}{% endfor %}",
    ),
    "refuses lists": (
        TEXT,
        EACH + "{% if m.content is not string %}{{ raise_exception('text only') }}{% endif %}{{ m.content }}"
        "{% endfor %}",
    ),
    "refuses this role": (TEXT, "{{ raise_exception('no') }}"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_forms_that_a_template_reads_are_found(name: str):
    forms, template = TEMPLATES[name]
    assert content_forms(template, "user") == forms


@pytest.mark.parametrize(
    "name", [name for name in TEMPLATES if name not in ("refuses this role", "dumps messages")]
)
def test_text_and_parts_both_arrive_whatever_the_template_reads(name: str):
    _, template = TEMPLATES[name]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for content in ("one two", parts):
        said = render_conversation(template, [{"role": "user", "content": content}])
        assert said.index("one") < said.index("two")
        assert "{" not in said


def test_each_role_is_tried_for_itself():
    template = (
        EACH + "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert [content_forms(template, role) for role in ("user", "system", "assistant", "tool")] == [
        PARTS,
        TEXT,
        TEXT,
        TEXT,
    ]
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": ""},
    ]
    assert render_conversation(template, messages) == "a\nbc"


def test_content_that_is_no_text_is_left_to_the_template():
    template = EACH + "{{ m.content | length }}{% endfor %}"
    image = [{"type": "image"}, {"type": "text", "text": "x"}]
    assert render_conversation(template, [{"role": "user", "content": image}]) == "2"


def test_the_last_message_is_continued_in_either_form():
    for name in ("prints it", "loops in a macro over its parameter", "asks in a macro"):
        _, template = TEMPLATES[name]
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is"}]
        said = render_conversation(
            template, messages, add_generation_prompt=False, continue_final_message=True
        )
        assert said.endswith("It is")

"""A model's chat template: Jinja in a sandbox, with the names and filters that transformers gives templates.

`transformers.utils.chat_template_utils` renders the same text (tests/runtime/test_chat_template.py compares
the two), but importing it takes 0.6 s (2-core CPU machine) and loads an HTTP client. Templates find here:
filter `tojson` (no HTML escapes), `raise_exception(text)`, `strftime_now(format)`, `dict`, `namespace`,
`{% break %}`, `{% continue %}`, and `{% generation %}` blocks, which only training reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# Clients say it by any of the three names; templates read the first, or `thinking`.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled template. It may be rendered from several threads at once."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": _Dict(),
            "namespace": _Namespace,
        }
        self._template = environment.from_string(source)

    def render(
        self, messages: list[dict[str, object]], *, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        """The prompt text. A template is a program: it may raise anything.

        It sees copies in plain JSON types; of any other object, the name of its type.
        """
        return self._template.render(
            messages=[_with_reasoning(_plain(message)) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **_plain(variables),
        )


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a set of the class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)  # names set inside do not leave the block


class _Namespace(Namespace):
    """`namespace(...)` whose names do not begin with an underscore: nothing of Python can be replaced."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may name one of its values `self`
        self, *given = args
        for name in (values := dict(*given, **kwargs)):
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)` without the other methods of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: {name!r} begins with an underscore; use another name")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _plain(value: Any) -> Any:
    """A copy made of JSON's types: objects have methods that the sandbox knows nothing about."""
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case Mapping():
            return {_plain(key): _plain(item) for key, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case tuple():
            return tuple(_plain(item) for item in value)
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic models, as client libraries give them
        return _plain(dump())
    return f"<{type(value).__name__}>"

"""Grammars of tool calls, in the notation of each model family (`runtime/output` reads the same).

    required, named  calls and nothing else; the first token begins one
    auto             free text in which a call, once begun, is one of the tools; only made when a tool is
                     strict, for otherwise the model is left alone
    auto, content    calls and nothing else, or what the answer must be without them
Arguments follow the tool's schema. A strict tool whose schema cannot be enforced is refused; of others what
cannot be enforced is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ostinato.errors import InvalidRequest
from ostinato.runtime.grammar.call_arguments import gemma4_arguments, pythonic_arguments
from ostinato.runtime.grammar.harmony_grammar import harmony_rules
from ostinato.runtime.grammar.lark_text import (
    WHITE_SPACE,
    TokenId,
    is_token,
    json_value,
    quoted,
    sequence,
    text,
)
from ostinato.runtime.grammar.schema_shape import check_names, check_shape
from ostinato.runtime.grammar.tagged_arguments import TAGS, tagged_arguments


class CallShape(NamedTuple):
    """How calls are written: before, calls with `between`, after. A call is: begin NAME middle ARGS end."""

    begin: str
    middle: str
    end: str
    between: str
    before: str = ""
    after: str = ""
    trigger: str = ""  # beginning of a call in free text; empty: calls stand alone
    bare: str = ""  # without a trigger: the first character of calls, which free text does not begin with


_NAMED = '{"name": "'
_SHAPES: dict[str, CallShape] = {
    "hermes": CallShape(
        f"<tool_call>\n{_NAMED}", '", "arguments": ', "}\n</tool_call>", "\n", trigger="<tool_call>"
    ),
    "granite": CallShape(
        _NAMED, '", "arguments": ', "}", ", ", "<|tool_call|>[", "]", trigger="<|tool_call|>"
    ),
    "phi": CallShape(_NAMED, '", "arguments": ', "}", ", ", "functools[", "]", trigger="functools["),
    "mistral": CallShape(
        _NAMED, '", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]", trigger="[TOOL_CALLS]"
    ),
    "llama3_json": CallShape(_NAMED, '", "parameters": ', "}", "; ", bare="{"),
    "pythonic": CallShape("", "(", ")", ", ", "[", "]", bare="["),
    "gemma4": CallShape("<|tool_call>call:", "", "<tool_call|>", "", trigger="<|tool_call>"),
    "deepseek_v3": CallShape(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", trigger="<｜tool▁calls▁begin｜>",
    ),
    "qwen3_xml": CallShape(
        "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", trigger="<tool_call>"
    ),
    "minimax": CallShape(
        '<invoke name="', '">\n', "</invoke>", "\n", "<minimax:tool_call>\n", "\n</minimax:tool_call>",
        trigger="<minimax:tool_call>",
    ),
    "gpt_oss": CallShape(
        "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", "",
    ),
}  # fmt: skip
_MISTRAL_ARGS = CallShape("[TOOL_CALLS]", "[ARGS]", "", "", trigger="[TOOL_CALLS]")
_PHI_TOKENS = CallShape(
    _NAMED, '", "arguments": ', "}", ", ", "<|tool_call|>[", "]<|/tool_call|>", trigger="<|tool_call|>"
)
FORMATS = tuple(_SHAPES)
# whose arguments are not JSON; characters that end the name of a parameter there
_OWN_NOTATION = {"gemma4": ':{},"<', "pythonic": "=,()", "qwen3_xml": '<>"\n', "minimax": '<>"\n'}


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    parser_format: str,
    *,
    token_id: TokenId,
    parallel: bool = True,
    content: str | None = None,
) -> str | None:
    """Lark for `SamplingParams.grammar`; None: nothing is to be enforced.

    `tools` and `choice` as in OpenAI's chat API, `parser_format` a name of `FORMATS`. Without `parallel`
    there is at most one call. `content`: Lark of an answer that is no calls, where it must not be any text.
    Raises InvalidRequest that names `tools` or `tool_choice`.
    """
    if choice == "none" or not tools:
        return None
    functions = [tool["function"] for tool in tools]
    if isinstance(choice, Mapping):
        wanted = choice.get("function", {}).get("name")
        functions = [one for one in functions if one["name"] == wanted]
        if not functions:
            raise InvalidRequest(f"tool_choice: {wanted!r:.80} is not among the tools", param="tool_choice")
        parallel = False
    is_free = choice == "auto"
    is_strict = any(one.get("strict") for one in functions)
    if is_free and not is_strict and content is None:
        return None
    shape = _shape(parser_format, token_id)
    if shape is None:
        if is_free and not is_strict:
            return None
        if is_free:
            raise InvalidRequest(
                f"tools: strict is not possible with calls written as {parser_format!r}", param="tools"
            )
        raise InvalidRequest(
            f"tool_choice: a call cannot be forced with calls written as {parser_format!r}",
            param="tool_choice",
        )
    rules = _Rules(parser_format, shape, token_id, beside_json=content is not None and is_free)
    for at, function in enumerate(functions):
        is_left_alone = is_free and content is None and not function.get("strict")
        rules.add_call(at, function, any_arguments=is_left_alone)
    if not is_free:
        return rules.forced(parallel)
    return rules.free(parallel) if content is None else rules.either(content, parallel)


def _shape(parser_format: str, token_id: TokenId) -> CallShape | None:
    if parser_format == "mistral" and token_id("[ARGS]") is not None:
        return _MISTRAL_ARGS
    if parser_format == "phi" and token_id("<|tool_call|>") is not None:
        return _PHI_TOKENS
    return _SHAPES.get(parser_format)


_JSON_SPACE = ("ws: WS?", f"WS: /{WHITE_SPACE}/")


def _json_call(name: str, arguments: str) -> str:
    """A call of llama3_json made of the pieces that JSON has."""
    pieces = ("{", '"name"', ":", f'"{name}"', ",", '"parameters"', ":", None, "}")
    return " ws ".join(arguments if piece is None else quoted(piece) for piece in pieces)


class _Rules:
    def __init__(self, parser_format: str, shape: CallShape, token_id: TokenId, *, beside_json: bool) -> None:
        """`beside_json`: an answer may be JSON instead of calls."""
        self._format, self._shape, self._token_id = parser_format, shape, token_id
        # A long literal would be preferred to the short ones that JSON begins with.
        self._in_pieces = beside_json and shape.bare == "{"
        self._lines: list[str] = []
        self._calls: list[str] = []
        # a call's text is split behind the trigger, which free text ends with
        self._cut = 0 if shape.before else len(shape.trigger)

    def add_call(self, at: int, function: Mapping[str, Any], *, any_arguments: bool) -> None:
        shape, name = self._shape, function["name"]
        schema = None if any_arguments else function.get("parameters")
        is_strict = bool(function.get("strict"))
        if self._format in _OWN_NOTATION:
            check_shape(schema or {}, name)
            check_names(schema or {}, _OWN_NOTATION[self._format], name, deep=self._format == "gemma4")
        if self._format in ("gemma4", "pythonic"):
            make = gemma4_arguments if self._format == "gemma4" else pythonic_arguments
            arguments, lines = make(schema or {}, f"args_{at}", self._token_id, is_strict=is_strict)
            self._lines += lines
        elif self._format in TAGS:
            arguments, lines = tagged_arguments(schema or {}, f"args_{at}", self._format, is_strict=is_strict)
            self._lines += lines
        else:
            arguments = json_value({"type": "object", **(schema or {})}, lenient=not is_strict)
        if self._in_pieces:
            call = _json_call(name, arguments)
        else:
            head = (shape.begin + name + shape.middle)[self._cut :]
            call = sequence(self._text(head), arguments, self._text(shape.end))
        self._lines.append(f"call_{at}: {call}")
        self._calls.append(f"call_{at}")

    def forced(self, parallel: bool) -> str:
        """Calls and nothing else."""
        if self._format == "gpt_oss":
            return self._grammar(*harmony_rules(self._token_id, call=True))
        return self._grammar(f"start: {self._all_calls(parallel)}")

    def _all_calls(self, parallel: bool) -> str:
        shape = self._shape
        call = sequence(self._text(shape.trigger[: self._cut]), "call")
        more = f"({sequence(self._text(shape.between), call)})*" if parallel else ""
        return sequence(self._text(shape.before), call, more, self._text(shape.after))

    def either(self, content: str, parallel: bool) -> str:
        """Calls and nothing else, or `content` and nothing else."""
        if self._format == "gpt_oss":
            return self._grammar(*harmony_rules(self._token_id, call=True, content=content))
        lines = [f"calls: {self._all_calls(parallel)}", f"answer: {content}"]
        return self._grammar("start: calls | answer", *lines, *(_JSON_SPACE if self._in_pieces else ()))

    def free(self, parallel: bool) -> str:
        """Text, and calls in it."""
        shape = self._shape
        if self._format == "gpt_oss":
            return self._grammar(*harmony_rules(self._token_id, call=True, content="TEXT"))
        more = f"({sequence(self._text(shape.between), 'call')})*" if parallel else ""
        if shape.bare:
            calls = sequence(self._text(shape.before), "call", more, self._text(shape.after))
            return self._grammar(f"start: {calls} | FREE?", rf"FREE: /[^\{shape.bare}](.|\n)*/")
        if shape.before:
            block = sequence(
                self._text(shape.before[len(shape.trigger) :]), "call", more, self._text(shape.after)
            )
        else:
            block = "call"
        count = "*" if parallel and not shape.before else "?"
        start = f"start: block{count} TEXT"
        if is_token(shape.trigger, self._token_id):
            lines = [f"block: TEXT {self._text(shape.trigger)} {block}"]
        else:
            lines = [f"trigger[lazy]: TEXT {quoted(shape.trigger)}", f"block: trigger {block}"]
        return self._grammar(start, *lines, r"TEXT: /(.|\n)*/")

    def _grammar(self, *lines: str) -> str:
        return "\n".join([*lines, "call: " + " | ".join(self._calls), *self._lines, ""])

    def _text(self, literal: str) -> str:
        return text(literal, self._token_id)

"""From the fields about tools and thinking to what the template is told and how the answer is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from ostinato.errors import InvalidRequest
from ostinato.runtime.choice_output import ChoiceOutput
from ostinato.runtime.grammar.grammar_spec import FIELDS as GRAMMAR_FIELDS
from ostinato.runtime.grammar.grammar_spec import answer_content, grammar_param, has_grammar, json_content
from ostinato.runtime.grammar.harmony_grammar import harmony_answer
from ostinato.runtime.grammar.tool_grammar import tool_call_grammar
from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.http.server_state import ServerState
from ostinato.runtime.http.tool_schema import ToolRequest, ToolTemplateRequest
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.output.answer import Enforced
from ostinato.runtime.output.harmony_format import FINAL, HarmonyThoughts
from ostinato.runtime.thinking.thought_marks import with_thoughts

_PROMPT_END = 32  # tokens; enough for the marker with which some prompts begin the thoughts
_JINJA = Environment()  # to tell words from strings
_SWITCHES = ("enable_thinking", "thinking")

MakeOutput = Callable[[SamplingParams, Sequence[int]], ChoiceOutput]


@lru_cache(maxsize=64)
def _code(template: str) -> str:
    """What stands in the blocks of a Jinja template, without strings. Read, not run: it may be a client's."""
    try:
        tokens = list(_JINJA.lex(template))
    except TemplateSyntaxError:
        return template  # who renders it says what is wrong
    return "".join(value if kind in ("name", "operator") else " " for _, kind, value in tokens)


def _reads(template: str, variable: str) -> bool:
    return re.search(rf"(?<![.\w]){variable}\b", _code(template)) is not None


def shows_tools(template: str) -> bool:
    """Whether a chat template does anything with tools."""
    return _reads(template, "tools")


def _check_shown(template: str) -> None:
    if not shows_tools(template):
        raise InvalidRequest(
            "tools: this model's chat template does not show tools; leave them out, or start the server with "
            "server.chat_template, a template that shows them",
            param="tools",
        )


def template_tools(fields: ToolTemplateRequest, template: str) -> list[dict[str, Any]] | None:
    """The tools as the template gets them. InvalidRequest if it does not show them."""
    if not fields.tools:
        return None
    _check_shown(template)
    return [tool.model_dump(exclude_none=True) for tool in fields.shown_tools]


def thinking_variables(fields: ToolTemplateRequest, template: str) -> dict[str, Any]:
    """Variables of the template for `reasoning_effort`. InvalidRequest if none would have an effect."""
    effort = fields.reasoning_effort
    if effort is None:
        return {}
    variables: dict[str, Any] = {}
    if _reads(template, "reasoning_effort"):
        variables["reasoning_effort"] = effort
    variables |= {name: effort != "none" for name in _SWITCHES if _reads(template, name)}
    if not variables and (effort != "none" or "think" in template):
        raise InvalidRequest(
            "reasoning_effort: this model's chat template has no such setting; leave it out",
            param="reasoning_effort",
        )
    return variables


def _may_call(fields: ToolRequest) -> bool:
    return bool(fields.tools) and fields.choice != "none"


def check_tools(state: ServerState, fields: ToolRequest, template: str) -> None:
    """InvalidRequest for what cannot be done with this model's calls. `template`: that of the request."""
    if _may_call(fields) and state.formats.tools is None:
        _check_shown(template)  # said first: a parser alone would not help
        raise InvalidRequest(
            "tools: it is not known how this model writes tool calls; set server.tool_parser, or send "
            "tool_choice none",
            param="tools",
        )


def chat_sampling(
    state: ServerState, fields: ToolRequest, sampling: SamplingParams, prompt_ids: Sequence[int]
) -> SamplingParams:
    """`sampling` with the grammar of calls that must be made, or made strictly, or take the place of JSON.

    A grammar, this one or the request's own, holds behind the thoughts that the prompt has begun, or with
    which the answer begins. A thinking budget is given the marks of thoughts.
    InvalidRequest for two grammars at once, for tools that cannot be enforced, and for a budget of a model
    that is not known to think.
    """
    if sampling.thinking_token_budget is not None:
        sampling = with_thoughts(
            sampling,
            state.thought_marks,
            begun=_begun_block(state, fields, prompt_ids),
            calls=_may_call(fields),
        )
    content = json_content(sampling)
    if (of_calls := _call_grammar(state, fields, content)) is not None:
        param, grammar = of_calls
        if has_grammar(sampling) and content is None:
            other = grammar_param(sampling)
            raise InvalidRequest(
                f"{other}: contradicts {param}, which gives the answer a grammar of its own; give one of the "
                "two, or tools that are not strict",
                param=other,
            )
        sampling = _with_grammar(sampling, grammar, param)
    reasoning = state.formats.reasoning
    if reasoning is None or not has_grammar(sampling) or sampling.grammar_after:
        return sampling
    written = _open_thoughts(state, fields) or prompt_end(state, prompt_ids)
    begun = reasoning.begun(written)
    end = reasoning.end_of(begun)
    is_harmony = isinstance(reasoning, HarmonyThoughts) and (begun or reasoning.awaits_message(written))
    if is_harmony and of_calls is None:  # a grammar of calls knows of messages
        if (answer := answer_content(sampling)) is not None:
            grammar = harmony_answer(answer, state.text.token_id)
            sampling = _with_grammar(sampling, grammar, grammar_param(sampling))
        elif begun:
            end = FINAL
    unless: tuple[int, ...] = ()
    if not end:  # it may still begin to think
        marks = [(state.text.token_id(start), reasoning.end_of(start)) for start in reasoning.starts]
        token, end = next(((token, last) for token, last in marks if token is not None), (None, ""))
        if token is None or not end or written.rstrip().endswith(end):
            return sampling
        unless = (token,)
    ids = state.text.encode(end, add_special_tokens=False)
    return sampling.model_copy(update={"grammar_after": tuple(ids), "grammar_unless": unless})


def _with_grammar(sampling: SamplingParams, grammar: str, param: str) -> SamplingParams:
    """`grammar` in place of what was asked for, known to users by `param`."""
    taken = {**dict.fromkeys(GRAMMAR_FIELDS), "grammar": grammar, "grammar_param": param}
    return sampling.model_copy(update=taken)


def _call_grammar(state: ServerState, fields: ToolRequest, content: str | None) -> tuple[str, str] | None:
    """The field that asks for it, and the grammar. `content`: of `response_format`."""
    choice = fields.choice
    if not fields.tools or state.formats.tools is None:
        return None
    grammar = tool_call_grammar(
        [tool.model_dump(exclude_none=True) for tool in fields.shown_tools],
        choice if isinstance(choice, str) else choice.model_dump(),
        state.formats.tools.name,
        token_id=state.text.token_id,
        parallel=fields.parallel_tool_calls is not False,
        content=content,
    )
    if grammar is None:
        return None
    if choice != "auto":
        return "tool_choice", grammar
    is_strict = any(tool.function.strict for tool in fields.shown_tools)
    return "tools" if is_strict else "response_format", grammar


def _enforced(fields: ToolRequest, sampling: SamplingParams) -> Enforced:
    """What the grammar that `chat_sampling` gave makes sure of."""
    if sampling.grammar is None or sampling.grammar_param not in ("tool_choice", "tools", "response_format"):
        return Enforced.NOTHING
    if sampling.grammar_param == "tool_choice":
        return Enforced.CALLS
    wanted = fields.response_format if isinstance(fields, ChatRequest) else None
    return Enforced.BEGUN if wanted is None or wanted.type == "text" else Enforced.FRONT


def prompt_end(state: ServerState, prompt_ids: Sequence[int]) -> str:
    """The text with which a prompt ends, special tokens too."""
    return state.text.codec.decode(prompt_ids[-_PROMPT_END:], skip_special=False)


def _open_thoughts(state: ServerState, fields: ToolRequest) -> str:
    """The start marker of thoughts in which a message that is to be continued ends; else empty."""
    reasoning = state.formats.reasoning
    if not isinstance(fields, ChatRequest) or not fields.continue_final_message or reasoning is None:
        return ""
    content = fields.messages[-1].content
    text = content if isinstance(content, str) else "".join(part.text for part in content or ())
    spans = (start for start, end in reasoning.spans if text.rfind(start) > text.rfind(end))
    return next(spans, "")


def _begun_block(state: ServerState, fields: ToolRequest, prompt_ids: Sequence[int]) -> int | None:
    marks, reasoning = state.thought_marks, state.formats.reasoning
    if marks is None or reasoning is None:
        return None
    end = _open_thoughts(state, fields) or prompt_end(state, prompt_ids)
    return marks.block_of(reasoning.begun(end))


def output_maker(state: ServerState, fields: ToolRequest) -> MakeOutput:
    """How the choices of this answer are read."""
    formats, codec = state.formats, state.text.codec
    calls = _may_call(fields)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in fields.shown_tools}
    continued = _open_thoughts(state, fields)
    one_call = calls and fields.parallel_tool_calls is False

    def make(sampling: SamplingParams, prompt_ids: Sequence[int]) -> ChoiceOutput:
        parser = None
        if formats.reasoning is not None or calls:
            end = continued or prompt_end(state, prompt_ids)
            enforced = _enforced(fields, sampling) if calls else Enforced.NOTHING
            parser = formats.parser(calls=calls, tools=schemas, prompt_end=end, enforced=enforced)
        return ChoiceOutput(
            codec, sampling, parser, shown_special=state.shown_special if parser else frozenset(),
            one_call=one_call,
        )  # fmt: skip

    return make

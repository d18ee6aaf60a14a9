"""gpt-oss under a grammar without tools: it may think first, and its answer is what was asked for."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from ostinato.runtime.grammar.grammar_compiler import GrammarCompiler
from ostinato.runtime.grammar.grammar_spec import read_grammar
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.text import TextFrontEnd
from tests.support import toy_text
from tests.support.fake_engine import say
from tests.support.serving import Served, serving
from tests.support.tool_serving import CHAT, joined

MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>")
HARMONY = (
    "{# <|channel|> #}{% for t in tools or [] %}{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{{ open or '' }}{% endif %}"
)
THOUGHT = "<|channel|>analysis<|message|>hm {<|end|><|start|>assistant"
OPEN = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ASKED: list[tuple[dict[str, Any], str, str]] = [  # fields, an answer that is right, one that is not
    ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        '{"a": 1}',
        '{"b": 1}',
    ),
    ({"guided_json": SCHEMA}, '{"a": 1}', '{"a": "1"}'),
    ({"guided_regex": "a/b|c\nd"}, "a/b", "a/c"),
    ({"guided_choice": ["yes", "no"]}, "no", "maybe"),
]
GRAMMAR = {"guided_grammar": 'start: "yes" | "no"\n'}
ONLY = pytest.mark.parametrize(("fields", "right", "wrong"), ASKED, ids=[str(one[0])[:40] for one in ASKED])


def tokenizer() -> Tokenizer:
    made = toy_text.tokenizer()
    made.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return made


def served(text: str):
    front = TextFrontEnd(tokenizer(), chat_template=HARMONY, special_tokens={})
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return serving(say(ids, stop_id=1), text=front, window=1024)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("harmony") / "tokenizer.json"
    tokenizer().save(str(path))
    return GrammarCompiler(path, 512, (1,))


def taken(compiler: GrammarCompiler, sampling: SamplingParams, text: str) -> bool:
    """Whether a text is a whole answer under the grammar of a request, behind its free part."""
    spec = read_grammar(sampling)
    assert spec is not None
    matcher = compiler.compile(spec)
    free = tokenizer().decode(sampling.grammar_after, skip_special_tokens=False)
    if free:
        _, found, text = text.partition(free)
        assert found
    ids = tokenizer().encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


async def asked(server: Served, **fields: Any) -> tuple[dict[str, Any], SamplingParams]:
    """The answer, streamed as whole, and what the engine was asked for."""
    body = {"messages": HELLO, **fields}
    streamed = joined(await server.events(CHAT, body))
    status, answer = await server.post(CHAT, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"] or "") == streamed["content"]
    assert message.get("reasoning_content", "") == streamed["reasoning_content"]
    return streamed, server.engine.requests[-1].sampling


@ONLY
async def test_it_may_think_and_then_answers_as_asked(
    compiler: GrammarCompiler, fields: dict[str, Any], right: str, wrong: str
):
    async with served(f"{THOUGHT}{FINAL}{right}") as server:
        answer, sampling = await asked(server, **fields)
    assert (answer["reasoning_content"], answer["content"]) == ("hm {", right)
    (name,) = fields
    assert (sampling.grammar_after, sampling.grammar_param) == ((), name)
    for before in ("", THOUGHT, THOUGHT + THOUGHT):
        assert taken(compiler, sampling, f"{before}{FINAL}{right}")
        assert not taken(compiler, sampling, f"{before}{FINAL}{wrong}")
    for evades in (right, THOUGHT, f"<|channel|>commentary<|message|>{right}", f"{FINAL}{right}{THOUGHT}"):
        assert not taken(compiler, sampling, evades)


@ONLY
async def test_thoughts_that_the_prompt_has_opened_are_free(
    compiler: GrammarCompiler, fields: dict[str, Any], right: str, wrong: str
):
    text = "hm {<|end|><|start|>assistant"
    async with served(f"{text}{FINAL}{right}") as server:
        answer, sampling = await asked(server, **fields, chat_template_kwargs={"open": OPEN})
    assert (answer["reasoning_content"], answer["content"]) == ("hm {", right)
    assert (
        tokenizer().decode(sampling.grammar_after, skip_special_tokens=False) == "<|end|><|start|>assistant"
    )
    assert taken(compiler, sampling, f"{text}{FINAL}{right}")
    assert taken(compiler, sampling, f"{text}{THOUGHT}{FINAL}{right}")
    assert not taken(compiler, sampling, f"{text}{FINAL}{wrong}")


@ONLY
async def test_an_answer_that_the_prompt_has_opened_is_under_the_grammar_from_its_first_token(
    compiler: GrammarCompiler, fields: dict[str, Any], right: str, wrong: str
):
    async with served(right) as server:
        answer, sampling = await asked(server, **fields, chat_template_kwargs={"open": FINAL})
        assert (answer["content"], sampling.grammar_after) == (right, ())
        assert taken(compiler, sampling, right)
        assert not taken(compiler, sampling, wrong)
        messages = [*HELLO, {"role": "assistant", "content": f"{FINAL}It is "}]
        answer, sampling = await asked(server, **fields, messages=messages, continue_final_message=True)
    assert (answer["content"], sampling.grammar_after) == (right, ())
    assert taken(compiler, sampling, right)


async def test_a_grammar_of_its_own_rules_begins_with_the_answer_where_the_prompt_has_opened_thoughts(
    compiler: GrammarCompiler,
):
    text = f"hm<|end|><|start|>assistant{FINAL}yes"
    async with served(text) as server:
        answer, sampling = await asked(server, **GRAMMAR, chat_template_kwargs={"open": OPEN})
        assert (answer["reasoning_content"], answer["content"]) == ("hm", "yes")
        assert tokenizer().decode(sampling.grammar_after, skip_special_tokens=False) == FINAL
        assert taken(compiler, sampling, text)
        _, sampling = await asked(server, **GRAMMAR)
    assert (sampling.grammar, sampling.grammar_after) == (GRAMMAR["guided_grammar"], ())


async def test_a_call_that_is_forced_comes_behind_thoughts_that_the_prompt_has_opened(
    compiler: GrammarCompiler,
):
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
    text = f"hm<|end|><|start|>assistant{call}"
    async with served(text) as server:
        fields = {"tools": [tool], "tool_choice": "required", "chat_template_kwargs": {"open": OPEN}}
        answer, sampling = await asked(server, **fields)
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "")
    assert [(one["name"], json.loads(one["arguments"])) for one in answer["calls"]] == [("f", {"a": 1})]
    assert taken(compiler, sampling, text)


async def test_a_budget_counts_thoughts_that_the_prompt_has_opened():
    async with served(f"hm<|end|><|start|>assistant{FINAL}yes") as server:
        for opened, begun in ((OPEN, 0), ("", None)):
            fields = {"thinking_token_budget": 3, "chat_template_kwargs": {"open": opened}}
            _, sampling = await asked(server, **fields)
            assert sampling.thoughts is not None
            assert sampling.thoughts.begun == begun


async def test_what_is_wrong_in_an_expression_is_said_without_the_grammar_around_it(
    compiler: GrammarCompiler,
):
    async with served(FINAL) as server:
        _, sampling = await asked(server, guided_regex="(a")
    with pytest.raises(ValueError, match="regex parse error") as caught:
        taken(compiler, sampling, "")
    assert "analysis" not in str(caught.value)

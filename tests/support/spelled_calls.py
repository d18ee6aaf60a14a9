"""The same calls as each format writes them, and texts that are read in pieces cut anywhere."""

import json
from collections.abc import Callable

from tests.support.parsed_text import events, parser

D_CALLS, D_CALL, D_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
D_CALL_END, D_CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

Call = tuple[str, dict]


def as_objects(made: list[Call], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in made]


def gemma(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma, value)) + "]"
    return json.dumps(value)


def pythonic(made: list[Call]) -> str:
    one = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in made)
    return "[" + ", ".join(one) + "]"


def tags(name: str, arguments: dict, call: str, call_end: str, parameter: str, line: str) -> str:
    def value(one: object) -> str:
        return one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)

    pairs = [
        f"{parameter.format(key)}{line}{value(one)}{line}</parameter>\n" for key, one in arguments.items()
    ]
    return f"{call.format(name)}\n{''.join(pairs)}{call_end}"


nl = "\n"
SPELL: dict[str, Callable[[list[Call]], str]] = {
    "hermes": lambda made: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in as_objects(made)),
    "granite": lambda made: "<|tool_call|>[" + ", ".join(as_objects(made)) + "]",
    "phi": lambda made: "functools[" + ", ".join(as_objects(made)) + "]",
    "llama3_json": lambda made: "; ".join(as_objects(made, "parameters")),
    "mistral": lambda made: "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in made),
    "gemma4": lambda made: "".join(
        f"<|tool_call>call:{name}{gemma(args)}<tool_call|>" for name, args in made
    ),
    "pythonic": pythonic,
    "deepseek_v3": lambda made: D_CALLS + "\n".join(
        f"{D_CALL}function{D_SEP}{name}\n```json\n{json.dumps(args)}\n```{D_CALL_END}" for name, args in made
    ) + D_CALLS_END,
    "qwen3_xml": lambda made: "\n".join(
        f"<tool_call>\n{tags(name, args, '<function={}>', '</function>', '<parameter={}>', nl)}\n</tool_call>"
        for name, args in made
    ),
    "minimax": lambda made: "<minimax:tool_call>\n" + "\n".join(
        tags(name, args, '<invoke name="{}">', "</invoke>", '<parameter name="{}">', "")
        for name, args in made
    ) + "\n</minimax:tool_call>",
    "gpt_oss": lambda made: "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json.dumps(args)}<|call|>"
        for name, args in made
    ),
}  # fmt: skip
FRONT_ONLY = {"llama3_json", "pythonic"}  # calls without a marker
TWO: list[Call] = [("f", {"city": 42}), ("g", {"city": -7})]
THREE: list[Call] = [*TWO, ("now", {})]
HARD = {
    "text": "a, b} ]{ \"q\" 'p' \\ </tool_call> <tool_call> \n ü😀 ```",
    "n": 9007199254740993,
    "deep": {"list": [1, -2.5, True, False, None, {"x": []}], "empty": {}},
    "zero": 0, "no": False, "none": "", "nothing": None,
}  # fmt: skip
STRING = {"type": "string"}
NAMES = {
    "f": {"properties": {"city": {"type": ["string", "integer"]}}},
    "g": {}, "now": {}, "switch": {"properties": {"s": STRING, "v": {"anyOf": [STRING, {"type": "null"}]}}},
    "a.b-c_1": {"properties": {"text": STRING, "none": STRING}},
}  # fmt: skip


def every_cut(name: str, text: str, *, prefix_cuts: int = 1) -> list:
    """Events of `text`, after checking that they are the same for cuts in two, single characters, none."""
    whole = events(parser(None, name, tools=NAMES), [text])
    assert events(parser(None, name, tools=NAMES), list(text)) == whole
    for at in range(1, len(text), prefix_cuts):
        assert events(parser(None, name, tools=NAMES), [text[:at], text[at:]]) == whole, at
    return whole

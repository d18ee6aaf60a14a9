"""The formats by name, and which of them a model uses."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from ostinato.errors import ConfigError
from ostinato.runtime.output import json_formats, reasoning_formats, xml_formats
from ostinato.runtime.output.answer import Enforced
from ostinato.runtime.output.deepseek_format import DeepSeek
from ostinato.runtime.output.formats import OutputFormat, ReasoningFormat, ToolFormat
from ostinato.runtime.output.gemma4_format import Gemma4
from ostinato.runtime.output.harmony_format import HarmonyCalls, HarmonyThoughts
from ostinato.runtime.output.output_parser import OutputParser
from ostinato.runtime.output.pythonic_format import Pythonic

F = TypeVar("F", bound=OutputFormat)

PLUGINS = "ostinato.output_formats"

# The first that fits a template is taken, so those that others would match too come first.
_REASONING: dict[str, ReasoningFormat] = {}
_TOOLS: dict[str, ToolFormat] = {}


def register_reasoning_format(made: ReasoningFormat) -> None:
    """Make a format known under its name, in front of all others; a known name is replaced."""
    _REASONING.pop(made.name, None)
    others = dict(_REASONING)
    _REASONING.clear()
    _REASONING.update({made.name: made, **others})


def register_tool_format(made: ToolFormat) -> None:
    """Make a format known under its name, in front of all others; a known name is replaced."""
    _TOOLS.pop(made.name, None)
    others = dict(_TOOLS)
    _TOOLS.clear()
    _TOOLS.update({made.name: made, **others})


def reasoning_names() -> list[str]:
    """Names of all reasoning formats."""
    return sorted(_REASONING)


def tool_names() -> list[str]:
    """Names of all tool formats."""
    return sorted(_TOOLS)


@dataclass(frozen=True)
class OutputFormats:
    """The formats of one model."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    def parser(
        self,
        *,
        calls: bool,
        tools: Collection[str] | None = None,
        prompt_end: str = "",
        enforced: Enforced = Enforced.NOTHING,
    ) -> OutputParser | None:
        """A parser for one answer; None if there is nothing to find. `calls`: look for tool calls too."""
        chosen = self.tools if calls else None
        if self.reasoning is None and chosen is None:
            return None
        return OutputParser(self.reasoning, chosen, tools=tools, prompt_end=prompt_end, enforced=enforced)

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens with these texts must reach the parser."""
        both: tuple[OutputFormat | None, ...] = (self.reasoning, self.tools)
        return frozenset(marker for one in both if one is not None for marker in one.markers)


@cache
def _load_plugins() -> None:
    """Let installed packages register formats: entry points of the group, each a function to call."""
    for point in entry_points(group=PLUGINS):
        try:
            point.load()()
        except Exception as error:  # border: code of others, and the user must know which
            raise ConfigError(
                f"entry point {point.name!r} of {PLUGINS}: {type(error).__name__}: {error}; "
                "mend or uninstall that package"
            ) from error


def choose_formats(reasoning: str, tools: str, template: str | None) -> OutputFormats:
    """The formats by setting: a name, "none", or "auto" for what fits the chat template."""
    _load_plugins()
    return OutputFormats(
        _named("server.reasoning_parser", reasoning, _REASONING, template or ""),
        _named("server.tool_parser", tools, _TOOLS, template or ""),
    )


def tool_format(name: str) -> ToolFormat:
    """ConfigError lists the known names."""
    _load_plugins()
    return _known("tool parser", name, _TOOLS)


def reasoning_format(name: str) -> ReasoningFormat:
    """ConfigError lists the known names."""
    _load_plugins()
    return _known("reasoning parser", name, _REASONING)


def _named(setting: str, name: str, known: dict[str, F], template: str) -> F | None:
    if name == "none":
        return None
    if name == "auto":
        return next((one for one in known.values() if one.fits(template)), None)
    return _known(setting, name, known)


def _known(what: str, name: str, known: dict[str, F]) -> F:
    if name not in known:
        raise ConfigError(f"{what}={name!r}: no such format; one of {', '.join(sorted(known))}")
    return known[name]


for _reasoning in (
    reasoning_formats.ThinkTags(),
    reasoning_formats.DeepSeekThoughts(),
    reasoning_formats.MiniMaxThoughts(),
    reasoning_formats.GraniteThoughts(),
    reasoning_formats.MistralThoughts(),
    reasoning_formats.Gemma4Thoughts(),
    HarmonyThoughts(),
):
    register_reasoning_format(_reasoning)
for _tools in (
    json_formats.LlamaJson(),
    json_formats.Hermes(),
    xml_formats.Qwen3Xml(),
    xml_formats.MiniMax(),
    json_formats.Granite(),
    json_formats.Phi(),
    json_formats.Mistral(),
    Gemma4(),
    DeepSeek(),
    Pythonic(),
    HarmonyCalls(),
):
    register_tool_format(_tools)

"""ostinato: compile a language model once, ahead of time, and replay it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ArtifactError",
    "CompileError",
    "CompletionOutput",
    "ConfigError",
    "ContextTooLong",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "EngineDead",
    "EngineError",
    "InvalidRequest",
    "ModelError",
    "Overloaded",
    "ParsedThinking",
    "ParsedToolCall",
    "ParsedToolCalls",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "WrongTask",
    "compile_model",
    "parse_thinking",
    "parse_tool_calls",
]

if TYPE_CHECKING:
    from ostinato.errors import (
        ArtifactError,
        CompileError,
        ConfigError,
        ContextTooLong,
        EngineDead,
        EngineError,
        InvalidRequest,
        ModelError,
        Overloaded,
        RequestError,
        WrongTask,
    )
    from ostinato.runtime.compile import compile_model
    from ostinato.runtime.config import EngineConfig
    from ostinato.runtime.llm import LLM
    from ostinato.runtime.messages import SamplingParams
    from ostinato.runtime.output.offline import (
        ParsedThinking,
        ParsedToolCall,
        ParsedToolCalls,
        parse_thinking,
        parse_tool_calls,
    )
    from ostinato.runtime.request_output import (
        CompletionOutput,
        EmbeddingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )

_MODULES = {
    "LLM": "runtime.llm",
    "CompletionOutput": "runtime.request_output",
    "EmbeddingRequestOutput": "runtime.request_output",
    "EngineConfig": "runtime.config",
    "ParsedThinking": "runtime.output.offline",
    "ParsedToolCall": "runtime.output.offline",
    "ParsedToolCalls": "runtime.output.offline",
    "RequestOutput": "runtime.request_output",
    "SamplingParams": "runtime.messages",
    "ScoringRequestOutput": "runtime.request_output",
    "compile_model": "runtime.compile",
    "parse_thinking": "runtime.output.offline",
    "parse_tool_calls": "runtime.output.offline",
}


def __getattr__(name: str) -> Any:  # PEP 562: `import ostinato` stays cheap, torch comes with the first use
    if name not in __all__:
        raise AttributeError(f"module 'ostinato' has no attribute {name!r}")
    value = getattr(import_module(f"ostinato.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

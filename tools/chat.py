"""`ostinato chat PATH`: talk to a model in the terminal.

/clear starts anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ostinato.errors import ConfigError, RequestError
from ostinato.runtime.messages import SamplingParams
from ostinato.runtime.request_check import check_task
from ostinato.tools.flags import add_flags, config_from, user_path

if TYPE_CHECKING:
    from ostinato.runtime.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=user_path, metavar="PATH", help="artifact, model folder or GGUF file")
    parser.add_argument("--system", default="", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, metavar="X", help="default: the model's own")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="most tokens of an answer (default: 1024)"
    )
    add_flags(parser, leave_out=("server",))


def run(arguments: argparse.Namespace) -> int:
    from ostinato.runtime.llm import LLM

    config = config_from(arguments)
    _check_flags(arguments)  # before the model is loaded
    if "log_level" not in config.model_fields_set:
        config = config.model_copy(update={"log_level": "WARNING"})
    with LLM(arguments.path, config=config) as llm:
        check_task("generate", llm.info)
        sampling = _sampling(arguments, llm.text.defaults.model_dump())
        if sampling.max_tokens is None:  # a small model may ramble to the end of its window
            sampling = sampling.model_copy(update={"max_tokens": 1024})
        opening = [{"role": "system", "content": arguments.system}] if arguments.system else []
        messages = list(opening)
        while (line := _ask()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                messages = list(opening)
            elif line:
                messages.append({"role": "user", "content": line})
                try:
                    answer = _answer(llm, messages, sampling)
                except RequestError as error:
                    print(f"({error}; /clear starts a new conversation)")
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})
    return 0


def _check_flags(arguments: argparse.Namespace) -> None:
    try:
        _sampling(arguments, {})
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"--{flag} {first['input']}: {first['msg']}; see --help") from None


def _sampling(arguments: argparse.Namespace, defaults: dict[str, object]) -> SamplingParams:
    given = {"temperature": arguments.temperature, "max_tokens": arguments.max_tokens}
    known = {
        key: value
        for key, value in defaults.items()
        if key in SamplingParams.model_fields and value is not None
    }
    return SamplingParams.model_validate({**known, **{key: v for key, v in given.items() if v is not None}})


def _ask() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return None


def _answer(llm: LLM, messages: list[dict[str, str]], sampling: SamplingParams) -> str:
    """Print an answer as it comes and return it; an engine error is printed behind what there is."""
    parts: list[str] = []

    async def read() -> None:
        async with contextlib.aclosing(llm.stream(list(messages), sampling)) as pieces:
            async for piece in pieces:
                parts.append(piece.text)
                print(piece.text, end="", flush=True)
                if piece.error is not None:
                    print(f"\n({piece.error})", end="")

    with contextlib.suppress(KeyboardInterrupt):  # an interrupted answer stays as far as it came
        asyncio.run(read())
    print()
    return "".join(parts)

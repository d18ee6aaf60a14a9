"""`ostinato COMMAND`: one entry point, one file per command."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable

from ostinato import __version__
from ostinato.errors import EngineError
from ostinato.tools.unknown_flags import parse

# command -> (module, one line of help); a module has add_arguments(parser) and run(arguments) -> exit code
COMMANDS = {
    "serve": ("serve", "serve an artifact or model over an OpenAI-compatible API"),
    "chat": ("chat", "talk to a model in the terminal"),
    "compile": (
        "compile_model",
        "compile a model folder or GGUF file into an artifact (also: compile-model)",
    ),
    "batch": ("batch", "answer a file of requests in OpenAI's batch format"),
    "bench": ("bench", "measure a server, LLM or a start, or compare two such results"),
    "inspect": ("inspect_artifact", "show what an artifact holds"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command; user errors become one line on stderr and exit code 2."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="ostinato", description="Compile a language model once, then replay it."
    )
    parser.add_argument("--version", action="version", version=f"ostinato {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, text) in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text)
        if name == wanted:  # only the command that runs is imported: the others may need torch
            importlib.import_module(f"ostinato.tools.{module}").add_arguments(sub)
    arguments = parse(parser, argv)
    command = importlib.import_module(f"ostinato.tools.{COMMANDS[arguments.command][0]}")
    return run_command(lambda: int(command.run(arguments)))


def run_command(call: Callable[[], int]) -> int:
    """`call()`; EngineError becomes a message and exit code 2, Ctrl-C 130, a closed pipe 0."""
    try:
        return call()
    except EngineError as error:
        print(f"ostinato: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())

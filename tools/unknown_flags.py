"""What is said of a flag that a command does not have: the one that was meant, or the command that has it."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """`parser.parse_args(argv)`; exit code 2 and one line that helps for words that it does not know."""
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command = _innermost(parser, argv)
        command.exit(2, f"{command.prog}: error: {_said(unknown, _flags(command))}\n")
    return arguments


def _said(unknown: Sequence[str], known: Sequence[str]) -> str:
    from ostinato.tools.flags import settings  # `ostinato --version` needs no settings

    flag = next((word for word in unknown if word.startswith("--")), "").split("=")[0]
    if not flag:
        return f"unrecognized arguments: {' '.join(unknown)}; see --help"
    if flag in (_flag(path) for path, _ in settings()):
        return f"{flag}: not here, where it would have no effect; `ostinato serve` has it"
    same_end = [one for one in known if one.endswith((f".{flag[2:]}", f"-{flag[2:]}"))]
    near = same_end[:3] or difflib.get_close_matches(flag, known, 1, 0.75)
    return f"{flag}: no such flag; " + (f"did you mean {' or '.join(near)}?" if near else "see --help")


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


def _innermost(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the subcommand that `argv` names. argparse has no public way to it, nor to its flags."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            named = next((word for word in argv if word in action.choices), None)
            if named is not None:
                inner: argparse.ArgumentParser = action.choices[named]
                return _innermost(inner, argv[argv.index(named) + 1 :])
    return parser


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings]

"""Flags of the load tools, made from their settings: `request_rate` becomes `--request-rate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ostinato.errors import ConfigError
from ostinato.section import Section

Made = TypeVar("Made", bound=Section)


def add_section(
    parser: argparse.ArgumentParser, section: type[Section], *, leave_out: Sequence[str] = ()
) -> None:
    """One flag per field, in a group with the section's first line as its title."""
    group = parser.add_argument_group((section.__doc__ or section.__name__).splitlines()[0].rstrip("."))
    for name, field in section.model_fields.items():
        if name in leave_out:
            continue
        default = field.get_default()
        shown = " ".join(f"{one}" for one in default) if isinstance(default, tuple) else default
        note = "" if shown in ("", None) else f" (default: {shown})"
        kwargs: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": (field.description or "").replace("%", "%%") + note,
        }
        if bool in (field.annotation, *get_args(field.annotation)):
            kwargs["action"] = argparse.BooleanOptionalAction
        elif get_origin(field.annotation) is tuple:
            kwargs |= {"nargs": "+", "metavar": _metavar(field)}
        else:
            kwargs["metavar"] = _metavar(field)
        group.add_argument(f"--{name.replace('_', '-')}", **kwargs)


def read_section(arguments: argparse.Namespace, section: type[Made], **more: Any) -> Made:
    """The given flags of `section`, and `more` where no flag was given. ConfigError names the flag."""
    given = {name: value for name, value in vars(arguments).items() if name in section.model_fields}
    tree = {
        name: [part for word in value for part in word.split(",") if part]
        if isinstance(value, list)
        else value
        for name, value in given.items()
    }
    try:
        return section.model_validate({**more, **tree})
    except ValidationError as error:
        first = error.errors()[0]
        flag = f"--{str(first['loc'][0]).replace('_', '-')}"
        raise ConfigError(f"{flag} {first['input']}: {first['msg']}; see --help") from None


def _metavar(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    kind = choices[0] if choices else field.annotation
    names: dict[object, str] = {int: "N", float: "X"}
    return names.get(getattr(kind, "__origin__", kind), "TEXT")  # Annotated[int, ...] is an int

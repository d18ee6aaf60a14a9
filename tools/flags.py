"""Command-line flags made from `EngineConfig`: `kv.block_tokens` becomes `--kv.block-tokens`."""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from ostinato.errors import ConfigError
from ostinato.runtime.config import SECRETS, EngineConfig, read_settings
from ostinato.section import Section


def user_path(text: str) -> Path:
    """A path as the user typed it. The shell leaves `~` alone inside quotes and behind `=`."""
    return Path(text).expanduser()


def add_flags(parser: argparse.ArgumentParser, *, leave_out: tuple[str, ...] = ()) -> None:
    """Add `--config FILE` and one flag per setting; `leave_out`: top-level names without one."""
    parser.add_argument(
        "--config",
        type=user_path,
        metavar="FILE.toml",
        help="settings as TOML tables; flags win over the file",
    )
    group = parser.add_argument_group("settings")
    for path, field in settings():
        if path.split(".")[0] in leave_out:
            continue
        default = field.get_default()
        note = "" if default in ("", (), None) else f" (default: {default})"
        text = (field.description or "").replace("%", "%%") + note
        kwargs: dict[str, Any] = {"dest": path, "help": text, "default": argparse.SUPPRESS}
        if field.annotation is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        else:
            kwargs["metavar"] = _metavar(field)
            if get_origin(field.annotation) is tuple:
                kwargs["action"] = "append"
        group.add_argument(f"--{path.replace('_', '-')}", **kwargs)


def settings(section: type[Section] = EngineConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted path and field of every setting, in the order of declaration."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield from settings(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def config_from(arguments: argparse.Namespace, environ: Mapping[str, str] | None = None) -> EngineConfig:
    """defaults < environment (secrets only) < --config file < flags. ConfigError names the setting."""
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    for setting, variable in SECRETS.items():
        if key := environ.get(variable):
            _put(tree, setting, key)
    if arguments.config:
        _merge(tree, _read_toml(arguments.config))
    known = dict(settings())
    for path, value in vars(arguments).items():
        if path in known:
            if isinstance(value, list):  # a repeated flag, each perhaps with commas
                value = tuple(part for item in value for part in item.split(",") if part)
            _put(tree, path, value)
    return read_settings(tree, hint="see --help")


def changed(config: EngineConfig) -> dict[str, Any]:
    """Settings that differ from their defaults, by dotted path; keys are masked."""
    out: dict[str, Any] = {}
    for path, field in settings():
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        if value != field.get_default():
            out[path] = "***" if path in SECRETS else value
    return out


def _metavar(field: FieldInfo) -> str:
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "|".join(choices)
    names: dict[object, str] = {int: "N", float: "X", str: "TEXT"}
    return names.get(field.annotation, "NAME")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from None


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        tree = tree.setdefault(part, {})
    tree[leaf] = value


def _merge(tree: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value

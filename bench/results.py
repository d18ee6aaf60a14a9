"""Result files: JSON, one or several results each, found again by label."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from ostinato import __version__
from ostinato.errors import ConfigError
from ostinato.section import Section

FORMAT = "ostinato-bench/1"
_SECRET_FLAGS = ("--api-key", "--headers", "--server.api-key", "--server.admin-key")


class OutputSettings(Section):
    """Where results go."""

    save: str = Field("", description="JSON file for the result")
    append: bool = Field(False, description="add to the file instead of replacing it")
    save_requests: bool = Field(False, description="keep a record of every request in the file")
    label: str = Field("", description="name of this result, for compare")
    metadata: tuple[str, ...] = Field((), description="facts to keep with it, as NAME=VALUE")
    plot: str = Field("", description="folder for PNG pictures of latencies and of the run over time")
    progress: bool | None = Field(None, description="show a bar; default: when stderr is a terminal")


def make_result(
    kind: str, settings: dict[str, Any], points: Sequence[dict[str, Any]], output: OutputSettings
) -> dict[str, Any]:
    """One result, as it is saved."""
    return {
        "kind": kind,
        "label": output.label,
        "metadata": read_metadata(output.metadata),
        "header": {
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "client": f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs",
            "ostinato": __version__,
            "python": platform.python_version(),
            "command": _command(sys.argv),
        },
        "settings": _written(settings),
        "points": list(points),
    }


def save_result(result: dict[str, Any], output: OutputSettings) -> None:
    """Write it to `output.save`; the file is whole at every moment."""
    if not output.save:
        return
    path = Path(output.save).expanduser()
    before = load_results(path) if output.append and path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(
        json.dumps({"format": FORMAT, "results": [*before, result]}, indent=1, allow_nan=False) + "\n"
    )
    fresh.replace(path)


def load_results(path: Path) -> list[dict[str, Any]]:
    """All results of a file. ConfigError when it is none of ours."""
    try:
        whole = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise ConfigError(f"{path}: not a result of `ostinato bench` (its format is not {FORMAT})")
    return list(whole["results"])


def find_result(named: str) -> dict[str, Any]:
    """`FILE` (its last result) or `FILE#LABEL` (the last with that label)."""
    name, _, label = named.partition("#")
    results = load_results(Path(name).expanduser())
    matching = [result for result in results if not label or result["label"] == label]
    if not matching:
        labels = ", ".join(sorted({result["label"] or "(none)" for result in results})) or "no results"
        raise ConfigError(f"{named}: no result with the label {label!r}; the file has {labels}")
    return matching[-1]


def read_metadata(pairs: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` as a mapping. ConfigError names one that is not."""
    out = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--metadata {pair!r}: must be NAME=VALUE")
        out[name] = value
    return out


def _written(value: Any) -> Any:
    """JSON has no infinity: a rate or shape without limit is written as the user typed it."""
    if isinstance(value, dict):
        return {name: _written(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_written(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _command(words: Sequence[str]) -> str:
    """What was typed, without keys: result files are passed around."""
    shown, hide = ["ostinato"], False
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        if hide:
            shown.append("***")
        elif name in _SECRET_FLAGS and equals:
            shown.append(f"{name}=***")
        else:
            shown.append(word)
        hide = word in _SECRET_FLAGS
    return shlex.join(shown)

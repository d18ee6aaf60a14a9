"""Data sets that are read from a file on this machine."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ostinato.bench.data_settings import DataSettings
from ostinato.bench.load_item import LoadItem
from ostinato.bench.prompt_text import PromptText
from ostinato.errors import ConfigError

_HUMAN = ("human", "user")


def sharegpt_items(
    path: Path, settings: DataSettings, count: int, text: PromptText, rng: np.random.Generator
) -> list[LoadItem]:
    """The first exchange of conversations drawn without repeating; max_tokens is the answer's length.

    With `output_len` that is max_tokens instead.
    """
    pairs = []
    for entry in _rows(path):
        turns = entry.get("conversations") or entry.get("conversation") or []
        if len(turns) >= 2 and turns[0].get("from", turns[0].get("role")) in _HUMAN:
            prompt, answer = (str(turn.get("value", turn.get("content"))) for turn in turns[:2])
            if prompt.strip() and answer.strip():
                pairs.append((prompt, answer))
    if not pairs:
        raise ConfigError(f"{path}: no conversation that a human begins; is this a ShareGPT file?")
    order = [int(at) for _ in range(-(-count // len(pairs))) for at in rng.permutation(len(pairs))]
    return [
        LoadItem([pairs[at][0]], settings.output_len or max(1, text.count(pairs[at][1])))
        for at in order[:count]
    ]


def custom_items(path: Path, settings: DataSettings, count: int) -> list[LoadItem]:
    """A JSON object per line, in their order: `prompt`, `messages` or `turns`, and maybe `output_tokens`."""
    items = []
    for number, row in enumerate(_rows(path), start=1):
        tokens = row.get("output_tokens", settings.output_len or None)
        if isinstance(row.get("prompt"), str):
            items.append(LoadItem([row["prompt"]], tokens))
        elif isinstance(row.get("turns"), list) and row["turns"]:
            items.append(LoadItem([str(turn) for turn in row["turns"]], tokens, system=row.get("system", "")))
        elif isinstance(row.get("messages"), list) and row["messages"]:
            *before, last = row["messages"]
            items.append(LoadItem([str(last.get("content"))], tokens, messages=before))
        elif isinstance(row.get("documents"), list) and isinstance(row.get("query"), str):
            items.append(LoadItem([row["query"]], documents=[str(one) for one in row["documents"]]))
        else:
            raise ConfigError(
                f"{path}: entry {number} has no `prompt` (text), `messages`, `turns` (lists) or `query` with "
                f"`documents`; it has {', '.join(row) or 'nothing'}"
            )
    return _repeated(items, count, path)


def hf_items(path: Path, settings: DataSettings, count: int, text: PromptText) -> list[LoadItem]:
    """Rows of a file of a Hugging Face data set: `prompt_column`, and `output_column` for lengths."""
    items = []
    for row in _rows(path):
        for column in (settings.prompt_column, settings.output_column):
            if column and column not in row:
                raise ConfigError(
                    f"{path}: no column {column!r}; it has {', '.join(row)}: see --prompt-column"
                )
        prompt = row[settings.prompt_column]
        tokens = settings.output_len or None
        if settings.output_column and not tokens:
            tokens = max(1, text.count(str(row[settings.output_column])))
        if isinstance(prompt, list):  # a chat
            *before, last = prompt
            items.append(LoadItem([str(last["content"])], tokens, messages=before))
        elif prompt:
            items.append(LoadItem([str(prompt)], tokens))
        if len(items) == count:
            break
    return _repeated(items, count, path)


def _repeated(items: list[LoadItem], count: int, path: Path) -> list[LoadItem]:
    """`count` items; a short file begins again."""
    if not items:
        raise ConfigError(f"{path}: holds no prompts")
    return [items[at % len(items)] for at in range(count)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Entries of a JSON list, JSON lines, CSV or parquet file."""
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".csv":
            with path.open(newline="") as file:
                yield from csv.DictReader(file)
        else:
            whole = path.read_text()
            listed = whole.lstrip().startswith("[")
            found = (
                json.loads(whole) if listed else (json.loads(ln) for ln in whole.splitlines() if ln.strip())
            )
            for entry in found:
                if not isinstance(entry, dict):
                    raise ConfigError(f"{path}: an entry is {type(entry).__name__}; each must be an object")
                yield entry
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON, nor JSON lines: {error}") from None


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow (pip install pyarrow); JSON, JSON lines and CSV do not"
        ) from None
    for batch in pq.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()

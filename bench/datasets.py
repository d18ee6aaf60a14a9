"""The requests of a run, from the data set that the settings name."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ostinato.bench.data_files import custom_items, hf_items, sharegpt_items
from ostinato.bench.data_settings import DataSettings, Draw
from ostinato.bench.data_synthetic import SYNTHETIC
from ostinato.bench.load_item import LoadItem
from ostinato.bench.prompt_text import PromptText
from ostinato.errors import ConfigError


def make_items(settings: DataSettings, count: int | None = None, *, draw: int = 0) -> list[LoadItem]:
    """`count` items (None: `num_prompts`), others for each `draw`. ConfigError: a bad file."""
    count = settings.num_prompts if count is None else count
    text = PromptText(Path(settings.tokenizer).expanduser() if settings.tokenizer else None)
    if settings.global_prefix_ratio + settings.conversation_prefix_ratio > 1:
        raise ConfigError(
            f"--global-prefix-ratio {settings.global_prefix_ratio} and --conversation-prefix-ratio "
            f"{settings.conversation_prefix_ratio}: together at most 1"
        )
    own = np.random.default_rng([settings.seed, draw, 0])
    if settings.dataset in SYNTHETIC:
        return SYNTHETIC[settings.dataset](
            settings, count, text, Draw(own, np.random.default_rng(settings.seed))
        )
    path = _file(settings)
    if settings.dataset == "sharegpt":
        return sharegpt_items(path, settings, count, text, own)
    if settings.dataset == "custom":
        return custom_items(path, settings, count)
    return hf_items(path, settings, count, text)


def _file(settings: DataSettings) -> Path:
    path = Path(settings.dataset_path).expanduser()
    if not settings.dataset_path or not path.is_file():
        raise ConfigError(
            f"--dataset-path {settings.dataset_path or '(not given)'}: no such file; "
            f"--dataset {settings.dataset} reads its prompts from one"
        )
    return path

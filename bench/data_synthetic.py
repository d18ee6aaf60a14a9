"""Data sets that need no file."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ostinato.bench.data_settings import DataSettings, Draw
from ostinato.bench.load_item import LoadItem
from ostinato.bench.prompt_text import PromptText
from ostinato.bench.sonnets import LINES

_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"


def random_items(settings: DataSettings, count: int, text: PromptText, draw: Draw) -> list[LoadItem]:
    """Random words behind a prefix of all; the first `hit_fraction` of each prompt is the same text too."""
    prefix = text.draw(settings.prefix_len, draw.shared)
    longest = round(settings.input_len * (1 + settings.range_ratio) * settings.hit_fraction)
    shared = text.draw(longest, draw.shared)
    prompts = []
    for _ in range(count * settings.batch_size):
        length = _length(settings.input_len, settings, draw.own)
        hit = round(length * settings.hit_fraction)
        parts = (prefix, text.cut(shared, hit) if hit else "", text.draw(length - hit, draw.own))
        prompts.append(_fitted(parts, settings.prefix_len + length, text))
    step = settings.batch_size
    return [
        LoadItem([prompts[at]], _output(settings, draw.own), inputs=prompts[at : at + step])
        for at in range(0, count * step, step)
    ]


def sonnet_items(settings: DataSettings, count: int, text: PromptText, draw: Draw) -> list[LoadItem]:
    """Lines of sonnets in random order; as many first lines as fit into `prefix_len` are always the same."""
    sizes = [text.count(line + "\n") for line in LINES]
    head, used = _SONNET_TASK, text.count(_SONNET_TASK)
    for line, size in zip(LINES, sizes, strict=True):
        if used + size > settings.prefix_len:
            break
        head, used = head + line + "\n", used + size
    items = []
    for _ in range(count):
        prompt, left = head, settings.input_len - used
        while left >= max(sizes):
            for at in draw.own.permutation(len(LINES)):
                if sizes[at] <= left:
                    prompt, left = prompt + LINES[at] + "\n", left - sizes[at]
        items.append(LoadItem([prompt], _output(settings, draw.own)))
    return items


def prefix_repetition_items(
    settings: DataSettings, count: int, text: PromptText, draw: Draw
) -> list[LoadItem]:
    """`num_prefixes` beginnings of `prefix_len`, each used equally often, in random order."""
    prefixes = [text.draw(settings.prefix_len, draw.shared) for _ in range(settings.num_prefixes)]
    items = []
    for which in draw.own.permutation(np.arange(count) % settings.num_prefixes):
        length = _length(settings.input_len, settings, draw.own)
        parts = (prefixes[which], text.draw(length, draw.own))
        items.append(
            LoadItem([_fitted(parts, settings.prefix_len + length, text)], _output(settings, draw.own))
        )
    return items


def multi_turn_items(settings: DataSettings, count: int, text: PromptText, draw: Draw) -> list[LoadItem]:
    """Conversations: a system text of two parts (of all, of this one), then turns of the user."""
    everywhere = text.draw(round(settings.input_len * settings.global_prefix_ratio), draw.shared)
    own = round(settings.input_len * settings.conversation_prefix_ratio)
    rest = 1 - settings.global_prefix_ratio - settings.conversation_prefix_ratio
    mean, gaps = settings.turn_delay_s, settings.turns - 1
    items = []
    for _ in range(count):
        system = " ".join(part for part in (everywhere, text.draw(own, draw.own)) if part)
        turns = [
            text.draw(max(1, round(_length(settings.input_len, settings, draw.own) * rest)), draw.own)
            for _ in range(settings.turns)
        ]
        if settings.turn_delay == "exponential":
            pauses = [float(pause) for pause in draw.own.exponential(mean, gaps)]
        else:
            pauses = [mean] * gaps
        items.append(LoadItem(turns, _output(settings, draw.own), system=system, pauses_s=[0.0, *pauses]))
    return items


def rerank_items(settings: DataSettings, count: int, text: PromptText, draw: Draw) -> list[LoadItem]:
    """A query of up to 16 tokens and `documents` texts of `input_len`."""
    return [
        LoadItem(
            [text.draw(min(16, settings.input_len), draw.own)],
            documents=[
                text.draw(_length(settings.input_len, settings, draw.own), draw.own)
                for _ in range(settings.documents)
            ],
        )
        for _ in range(count)
    ]


SYNTHETIC: dict[str, Callable[[DataSettings, int, PromptText, Draw], list[LoadItem]]] = {
    "random": random_items,
    "sonnet": sonnet_items,
    "prefix_repetition": prefix_repetition_items,
    "multi_turn": multi_turn_items,
    "rerank": rerank_items,
}


def _fitted(parts: tuple[str, ...], length: int, text: PromptText) -> str:
    """Parts put together; where tokens join at the seams the end is made longer or shorter."""
    whole = " ".join(part for part in parts if part)
    over = text.count(whole) - length
    if over > 0:
        return text.cut(whole, length)
    return whole + " a" * -over


def _length(mean: int, settings: DataSettings, rng: np.random.Generator) -> int:
    low, high = mean * (1 - settings.range_ratio), mean * (1 + settings.range_ratio)
    return max(1, int(rng.integers(round(low), round(high) + 1)))


def _output(settings: DataSettings, rng: np.random.Generator) -> int | None:
    return _length(settings.output_len, settings, rng) if settings.output_len else None

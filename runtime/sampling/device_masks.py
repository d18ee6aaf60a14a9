"""Masks of a step's tokens on the device: one copy, ahead of the step, for all rows that have limits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ostinato.runtime.grammar.grammar_state import mask_words
from ostinato.runtime.token_limits import Limit, mask_of_one

_NUM_HOST = 3  # pinned copies: one being filled, those of the two steps in flight


class DeviceMasks:
    """Memory for the masks of one step: nothing before the first, then rows of 4 * `mask_words` bytes."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._shape = max_rows, mask_words(vocab_size)
        self._vocab_size = vocab_size
        self._device = device
        self._staged: Tensor | None = None
        self._pinned: list[Tensor] = []
        self._turn = 0

    def send(self, limits: Sequence[Limit]) -> list[int]:
        """Queue the copy on the current stream; where each mask is then. Two steps may be in flight.

        A token is a mask of one.
        """
        staged = self._staged
        if staged is None:
            staged = self._staged = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            pin = self._device.type == "cuda"
            self._pinned = [
                torch.zeros(self._shape, dtype=torch.int32, pin_memory=pin) for _ in range(_NUM_HOST)
            ]
        count = len(limits)
        self._turn = (self._turn + 1) % _NUM_HOST
        source = self._pinned[self._turn][:count]
        rows = source.numpy()
        for at, limit in enumerate(limits):
            rows[at] = mask_of_one(limit, self._vocab_size) if isinstance(limit, int) else limit
        staged[:count].copy_(source, non_blocking=True)
        start, row_bytes = staged.data_ptr(), 4 * self._shape[1]
        return [start + at * row_bytes for at in range(count)]

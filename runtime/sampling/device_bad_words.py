"""Bad words of several tokens, on the device: a last token is barred where the others came just now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ANY, _NONE = -2, -1  # any token fits here; there is no token yet


class DeviceBadWords:
    """Bad words of several tokens of one request: its newest tokens and its biases, both on the device."""

    def __init__(
        self,
        words: Sequence[tuple[int, ...]],
        early: Tensor | None,
        late: Tensor | None,
        upload: Callable[[NDArray[np.generic]], Tensor],
    ) -> None:
        """`early`, `late`: biases [V] before and from `min_tokens` on, which `bar` changes; may be one."""
        most = max(len(word) for word in words) - 1
        lasts, which = np.unique(np.array([word[-1] for word in words], np.int64), return_inverse=True)
        beginnings = np.full((len(words), most), _ANY, np.int64)
        for at, word in enumerate(words):
            beginnings[at, most - len(word) + 1 :] = word[:-1]
        self._lasts, self._which = upload(lasts), upload(which.astype(np.int64))
        self._beginnings = upload(beginnings)
        self._newest = upload(np.full(most, _NONE, np.int64))
        biases = [early, late] if early is not late else [late]
        self._biases = [(bias, bias[self._lasts]) for bias in biases if bias is not None]
        self._position = 0

    @property
    def memory(self) -> list[Tensor]:
        """What it holds on the device, besides the biases."""
        own = [before for _, before in self._biases]
        return [self._lasts, self._which, self._beginnings, self._newest, *own]

    def bar(self, position: int, last_token: Tensor) -> None:
        """Before the token `position` of the answer is drawn; `last_token` [1] is the one before it."""
        if position > self._position:
            self._newest.copy_(torch.cat([self._newest[1:], last_token]))
            self._position = position
        fits = ((self._beginnings == self._newest) | (self._beginnings == _ANY)).all(1)
        penalty = torch.where(fits, -torch.inf, 0.0)
        for bias, before in self._biases:
            bias.index_copy_(0, self._lasts, before.scatter_add(0, self._which, penalty))

"""Whether a GPU still computes: an error such as an illegal address spoils its context for good."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ostinato.errors import EngineDead


def check_device(device: torch.device, wait: Callable[[], object]) -> None:
    """`wait` for the device. Raises EngineDead: an error of an earlier step has ended its context."""
    try:
        wait()
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise EngineDead(f"{device} computes no more ({said}); start the engine anew") from error

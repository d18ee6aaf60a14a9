"""Profiles of the engine's process: torch's profiler, written as a Chrome trace (chrome://tracing, Perfetto).

A trace goes to `profile.folder`, under a name made here. It has each step, the operators of torch, native
kernels of the CPU by name, and on a GPU the kernels.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from ostinato.errors import InvalidRequest, ProfileRefused
from ostinato.runtime.config import ProfileConfig

log = logging.getLogger(__name__)

_NOTHING: AbstractContextManager[object] = nullcontext()


class Profiler:
    """At most one profile at a time. The engine's thread calls everything here, between two steps."""

    def __init__(
        self,
        config: ProfileConfig,
        device: torch.device,
        *,
        name_calls: Callable[[bool], None],
        wake: Callable[[], None],
    ) -> None:
        """`name_calls(True)` gives kernels that torch does not know names in the profile.

        `wake` is called, from any thread, when `tick` has something to do.
        """
        self._config, self._device = config, device
        self._name_calls, self._wake = name_calls, wake
        self._running: torch.profiler.profile | None = None
        self._timer: threading.Timer | None = None
        self._is_over = False
        self._written = 0
        self._last = ""

    def start(self, seconds: float | None) -> float:
        """Record from now on; returns after how many seconds the profile ends by itself.

        Raises ProfileRefused and, for seconds out of range, InvalidRequest.
        """
        folder, most = self._config.folder, self._config.max_seconds
        if not folder:
            raise ProfileRefused(
                "no profile can be taken: profile.folder is not set; start with --profile.folder DIR"
            )
        if self._running is not None:
            raise ProfileRefused("a profile is running already; stop it first")
        seconds = most if seconds is None else seconds
        if not 0 < seconds <= most:
            raise InvalidRequest(
                f"seconds: must be over 0 and at most profile.max_seconds={most:g}; got {seconds:g}",
                param="seconds",
            )
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "no permission to write there")
        except OSError as error:
            raise ProfileRefused(f"profile.folder={folder}: {error.strerror or error}") from None
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if self._device.type == "cuda" else [kinds.CPU]
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._running, self._is_over = profile, False
        self._name_calls(True)
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._timer.start()
        log.info("a profile runs, for %g s at most", seconds)
        return seconds

    def stop(self) -> str:
        """End the profile and write it; returns the absolute path. No step runs meanwhile.

        Raises ProfileRefused: none is running, or it cannot be written and is lost.
        """
        profile = self._running
        if profile is None:
            last = f"; the last one was written to {self._last}" if self._last else ""
            raise ProfileRefused(f"no profile is running{last}")
        assert self._timer is not None  # made with the profile
        self._timer.cancel()
        self._running = None
        self._name_calls(False)
        profile.stop()
        self._written += 1
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = Path(self._config.folder).absolute() / f"trace-{stamp}-{os.getpid()}-{self._written}.json"
        part = path.with_suffix(".part")
        try:
            profile.export_chrome_trace(str(part))
            part.replace(path)
        except (OSError, RuntimeError) as error:  # the library raises either for a file it cannot write
            part.unlink(missing_ok=True)
            raise ProfileRefused(f"the profile cannot be written to {path} and is lost: {error}") from error
        self._last = str(path)
        log.info("profile written: %s, %d KiB", path, path.stat().st_size >> 10)
        return self._last

    def tick(self) -> None:
        """End a profile whose time is up."""
        if self._is_over and self._running is not None:
            try:
                self.stop()
            except ProfileRefused as error:
                log.error("%s", error)

    def step(self, number: int, sequences: int, tokens: int) -> AbstractContextManager[object]:
        """What is done inside is this step, in the profile that runs, if one does."""
        if self._running is None:
            return _NOTHING
        return torch.profiler.record_function(f"step {number}: {sequences} sequences, {tokens} tokens")

    def close(self) -> None:
        """Write what there is."""
        self._is_over = True
        self.tick()

    def _end(self) -> None:
        self._is_over = True
        self._wake()

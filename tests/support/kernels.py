"""One library of native kernels for all compiles of a test session, in this process and in others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from ostinato.ops import native


class Prebuilt(NamedTuple):
    """A library and what `native.build` said of it."""

    path: Path
    info: native.BuildInfo

    def build(self, out: Path) -> native.BuildInfo:
        """Stands in for `native.build`."""
        shutil.copy(self.path, out)
        return self.info

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Compiles of this process copy the library instead of running a compiler."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "build", self.build)
            yield

    @property
    def code(self) -> str:
        """Python code that makes another process do the same."""
        return (
            "from pathlib import Path\n"
            "from ostinato.ops import native\n"
            "from tests.support.kernels import Prebuilt\n"
            f"native.build = Prebuilt(Path({str(self.path)!r}), native.{self.info!r}).build\n"
        )

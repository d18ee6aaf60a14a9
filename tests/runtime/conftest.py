"""Kernels that all compiles of these tests share: building them takes longer than the rest of a compile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ostinato.ops import native
from tests.support.kernels import Prebuilt


@pytest.fixture(scope="session")
def built_kernels(tmp_path_factory: pytest.TempPathFactory) -> Prebuilt:
    """The native kernels, built once a session."""
    path: Path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    return Prebuilt(path, native.build(path))


@pytest.fixture(scope="module")
def shared_kernels(built_kernels: Prebuilt) -> Iterator[Prebuilt]:
    """Compiles of the module take the session's kernels."""
    with built_kernels.in_use():
        yield built_kernels

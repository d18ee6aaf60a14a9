"""What every test run needs: no spinning OpenMP threads, Triton's interpreter where there is no GPU."""

import logging
import os
from collections.abc import Iterator

# A spinning OpenMP team makes a busy neighbour several times slower; read when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch sees none"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A test draws the same numbers alone, in any order and on any machine."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """What a test has set up for logging says nothing to the next one."""
    logger = logging.getLogger("ostinato")
    level, propagates, handlers = logger.level, logger.propagate, [*logger.handlers]
    yield
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagates, handlers


@pytest.fixture(autouse=True)
def _kernels_may_be_compiled(request: pytest.FixtureRequest) -> None:
    """On a GPU: an engine of an earlier test has sealed the process's kernel store."""
    if HAS_GPU and "e2e" not in request.path.parts:
        from ostinato.ops.kernel_store import STORE

        STORE.is_sealed = False

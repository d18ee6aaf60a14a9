"""The native kernel library, built once for the whole session."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ostinato.ops import native


class Built(NamedTuple):
    path: Path
    info: native.BuildInfo


@pytest.fixture(autouse=True, scope="session")
def _references_without_cudnn() -> None:
    """Racecheck reports races within cuDNN's attention, which references would run on a GPU."""
    torch.backends.cuda.enable_cudnn_sdp(False)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    path = tmp_path_factory.mktemp("native") / "kernels.so"
    return Built(path, native.build(path))


@pytest.fixture(scope="session")
def native_ops(built: Built) -> Mapping[str, Callable[..., Any]]:
    return native.bind(native.load(built.path))

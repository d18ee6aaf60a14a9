"""Several engines and compiles in one process, on one GPU: what they share must not mix."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ostinato.runtime.config import KVConfig
from tests.e2e.gpu_engines import answers, asked, gpu_engine, wanted

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]
ROUNDS = 5


def test_engines_that_run_at_the_same_time_give_the_tokens_of_each_alone(float32, cases):
    """Kernels, their launch buffers and the counts of split attention belong to the process."""
    building, together = threading.Lock(), threading.Barrier(2, timeout=300)
    kv = KVConfig(max_gib=2, initial_mib=512, prefix_cache=False)

    def serve(_: int) -> list[bool]:
        with building:  # memory is mapped meanwhile, which a capture of the other would not stand
            engine = gpu_engine(float32, kv=kv)
        with engine:
            together.wait()
            return [answers(engine, asked(cases)) == wanted(cases) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(serve, range(2))) == [[True] * ROUNDS] * 2


def test_every_artifact_of_a_process_has_the_kernels_that_all_models_share(float32, bfloat16):
    """Those were launched before, by the first compile, when the second one ran."""

    def kernels(artifact: Path) -> set[str]:
        index = json.loads((artifact / "kernels.json").read_text())
        return {binary["key"].partition("@")[0] for binary in index["binaries"]}

    shared = {"take_pending._kernel", "sample._best_kernel", "sample._finish_kernel"}
    shared |= {"token_scores._kernel", "token_scores._combine", "rope_table._kernel"}
    for artifact in (float32, bfloat16):
        assert {f"ops.{name}" for name in shared} <= kernels(artifact)

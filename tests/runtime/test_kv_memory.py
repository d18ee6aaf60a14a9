"""The KV memory of an engine on a GPU, put together over a driver that is none."""

import pytest
import torch

from ostinato.runtime import kv_memory
from ostinato.runtime.memory.vmm_cuda import CudaVmm
from tests.support.fake_cuda import GRANULE, FakeCuda

HEADROOM = 3 * GRANULE


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda(total=40 * GRANULE)
    monkeypatch.setattr(kv_memory, "CudaVmm", lambda device: CudaVmm(device, api=cuda))
    return cuda


def test_spare_memory_counts_as_free_and_the_headroom_never_does(cuda: FakeCuda) -> None:
    _, limits, spare = kv_memory._driver(torch.device("cuda:0"), HEADROOM, None)
    assert spare is not None
    assert limits.available() == 37 * GRANULE
    spare.prepare({2 * GRANULE: 3})
    assert (limits.available(), limits.read().free_bytes) == (37 * GRANULE, 40 * GRANULE)
    spare.release(spare.create(2 * GRANULE))
    handle = spare.create(30 * GRANULE)
    assert limits.available() == 7 * GRANULE
    spare.release(handle)
    spare.trim()


@pytest.mark.parametrize(("stream", "waited"), [(5, "cuEventSynchronize"), (None, "cuCtxSynchronize")])
def test_memory_is_taken_away_behind_the_stream_of_the_steps(
    cuda: FakeCuda, stream: int | None, waited: str
) -> None:
    driver, _, _ = kv_memory._driver(torch.device("cuda:0"), HEADROOM, stream)
    driver.quiesce()
    both = {"cuEventSynchronize", "cuCtxSynchronize"}
    assert both & set(cuda.calls) == {waited}

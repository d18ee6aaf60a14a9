"""Two engines on one device under alternating load: idle memory goes to whoever needs it, and back."""

import pytest
import torch

from ostinato.graph.facts import KVLayer
from ostinato.runtime.config import KVConfig
from ostinato.runtime.engine import Engine
from ostinato.runtime.kv_sizer import PEER_RETRY_S, KVSizer
from ostinato.runtime.memory.device_limits import DeviceLimits
from ostinato.runtime.memory.handle_pool import HandlePool
from ostinato.runtime.memory.kv_pool import KVPool
from ostinato.runtime.memory.kv_worker import KVWorker
from ostinato.runtime.memory.memory_peers import MemoryPeers
from ostinato.runtime.memory.vmm_cuda import CudaVmm
from ostinato.runtime.scheduling.block_pool import BlockPool
from tests.support.engine_runs import greedy, prompt_of, tokens_of, toy_config
from tests.support.fake_cuda import GRANULE, FakeCuda
from tests.support.faulty_driver import ModelVmm
from tests.support.toy_model import ToyModel

MIB = 1 << 20
LAYERS = [KVLayer(kv_heads=2, k_size=64, v_size=64)]  # a plane of a block: 32 KiB, half a granule
BLOCK_BYTES = GRANULE
DEVICE_BLOCKS = 40


class Peer:
    """The memory of one engine, its clock and its view of the others, all moved by hand."""

    def __init__(self, cuda: FakeCuda, folder, *, is_threaded: bool) -> None:
        spare = HandlePool(CudaVmm("cpu", api=cuda))
        limits = DeviceLimits(lambda: (cuda.total - cuda.host.physical_bytes + spare.spare_bytes, cuda.total))
        pool = KVPool(LAYERS, torch.float32, 64, 64, spare, limits=limits, step_bytes=4 * BLOCK_BYTES)
        self.worker = KVWorker(pool, is_threaded=is_threaded, spare=spare, limits=limits)
        self.blocks = BlockPool(pool.commit(4), 64, 64, prefix_cache=True)
        self.peers = MemoryPeers(folder, poll_s=3600.0)
        self.now = 0.0
        self.held: list[int] = []
        self.sizer = KVSizer(
            self.worker, self.blocks, patience_s=5.0, peers=self.peers, clock=lambda: self.now
        )

    def turn(self, wanted_blocks: int) -> None:
        """One step of an engine that would like to hold so many blocks."""
        self.peers._others = self.peers.read()
        if len(self.held) > wanted_blocks:
            self.blocks.free(self.held[wanted_blocks:])
            del self.held[wanted_blocks:]
        lacking = wanted_blocks - len(self.held)
        self.sizer.grow(max(0, lacking - self.blocks.num_free))
        self.worker.wait()
        if self.sizer.wants_quiet:
            self.sizer.cut(self._move)
            self.worker.wait()
        self.held += self.blocks.allocate(min(lacking, self.blocks.available))
        self.now += PEER_RETRY_S
        self.sizer.check()

    def _move(self, moves) -> None:
        place = dict(moves)
        self.held = [place.get(block, block) for block in self.held]


@pytest.fixture(params=[False, True], ids=["inline", "threaded"])
def two(request, tmp_path):
    cuda = FakeCuda(total=DEVICE_BLOCKS * BLOCK_BYTES)
    peers = [Peer(cuda, tmp_path, is_threaded=request.param) for _ in range(2)]
    yield peers
    for peer in peers:
        assert peer.sizer.close()
    assert (cuda.host.physical_bytes, list(tmp_path.iterdir())) == (0, [])


def run(two, first: int, second: int, turns: int = 25) -> tuple[int, int]:
    for _ in range(turns):
        two[0].turn(first)
        two[1].turn(second)
    return len(two[0].held), len(two[1].held)


def test_memory_goes_back_and_forth_under_alternating_load(two):
    for _ in range(3):
        assert run(two, 34, 0) == (34, 0)
        assert run(two, 0, 34) == (0, 34)
    assert run(two, 0, 0) == (0, 0)
    assert [peer.peers.read().wanted_bytes for peer in two] == [0, 0]


def test_cached_prefixes_of_a_resting_engine_make_room(two):
    run(two, 34, 0)
    for block in two[0].held:
        two[0].blocks.publish(block, block.to_bytes(32, "little"))
    assert run(two, 0, 0)[0] == 0
    assert two[0].blocks.num_cached == 34  # nobody asks for them
    assert run(two, 0, 20) == (0, 20)
    assert 34 - 20 <= two[0].blocks.num_cached + 4 < 34


def test_two_that_want_everything_end_with_a_fair_part_each(two):
    assert run(two, 36, 0) == (36, 0)
    held = run(two, 36, 36, turns=5)
    assert held[0] >= 32  # what is in use is not taken
    assert held[1] <= 4 + 4
    for size in (30, 24, 18):  # as requests of the first end, new ones of it do not get their blocks
        two[0].blocks.free(two[0].held[size:])
        del two[0].held[size:]
        run(two, 36, 36, turns=5)
    first, second = run(two, 36, 36)
    assert abs(first - second) <= 8
    assert first + second >= 32


def test_two_engines_answer_right_while_one_memory_goes_between_them(tmp_path, monkeypatch):
    device = ModelVmm(4096, limit=4 * MIB)
    monkeypatch.setattr("ostinato.runtime.kv_memory.usable_driver", lambda _: device)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    kv = KVConfig(initial_mib=1, max_gib=0.004, headroom_gib=0, share=True)
    prompts = {f"r{i}": prompt_of(500, i) for i in range(16)}  # 32 blocks each, 2 MiB together
    truth = {name: ToyModel().greedy(prompt, 2) for name, prompt in prompts.items()}
    with Engine(ToyModel(), toy_config(kv=kv)) as a, Engine(ToyModel(), toy_config(kv=kv)) as b:
        for busy, resting in ((a, b), (b, a), (a, b)):
            for _ in range(200):  # until it has more than an equal part; what others hold comes in time
                busy.inbox.put(*(greedy(name, prompt, 2) for name, prompt in prompts.items()))
                news = busy.step()
                while busy.has_work:
                    news += [*busy.step(), *resting.step()]
                assert {name: tokens_of(news, name) for name in prompts} == truth
                if busy.stats().kv_bytes_committed > 2 * MIB:
                    break
            assert busy.stats().kv_bytes_committed > 2 * MIB
            busy.check()
            resting.check()
    assert device.physical_bytes == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []

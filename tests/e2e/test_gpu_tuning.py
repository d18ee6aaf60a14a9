"""A model that no table of a GPU knows: its linear layers are measured in the compile, and answers stay."""

from pathlib import Path

import pytest

from benchmarks.random_model import SMOL_135M, RandomSource
from ostinato.graph.config import GraphConfig
from ostinato.ops import tuning
from ostinato.ops.kernel_store import capability_here
from ostinato.ops.skinny_ways import most_tokens
from ostinato.runtime.compile import compile_model
from ostinato.runtime.config import KVConfig
from ostinato.runtime.messages import TokenEvent
from tests.e2e.gpu_engines import config_of, gpu_engine
from tests.support.engine_runs import events_of, finish, greedy

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(500)]
WIDTH, INNER, QKV, VOCAB = 512, 1280, 768, 4096
SHAPE = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCAB, "num_hidden_layers": 3}
SHAPE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "dtype": "bfloat16"}
LENGTHS = (3, 7, 12, 14, 15, 33)
NO_CACHE = KVConfig(max_gib=1, initial_mib=64, prefix_cache=False)
# of a log-probability: bfloat16 logits of this size err by 0.004, and greedy tokens by less are a near tie
NEAR = 0.03


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, 240)  # seconds enough, whatever else runs here


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory, 0)


def compiled(folders: pytest.TempPathFactory, seconds: float) -> Path:
    out = folders.mktemp("tuning") / "artifact"
    graph = GraphConfig(target="cuda", tune_s=seconds)
    compile_model(RandomSource(SMOL_135M | SHAPE, "no-table-knows-it"), out, config_of(graph=graph))
    return out


def test_every_layer_and_class_of_tokens_has_a_row_that_is_no_slower_than_the_default(tuned, plain):
    choices = tuning.read(tuned)
    layers = [("skinny_linear", QKV, WIDTH), ("skinny_linear", WIDTH, WIDTH), ("skinny_gated", INNER, WIDTH)]
    layers += [("skinny_linear", WIDTH, INNER), ("skinny_linear", VOCAB, WIDTH)]

    classes = [c for c in tuning.CLASSES if c <= most_tokens(capability_here())]
    wanted = {tuning.Shape(op, c, out, width, "bfloat16") for op, out, width in layers for c in classes}
    assert wanted <= choices.keys()
    assert tuning.measured(tuned)["shapes"] == len(wanted)
    assert tuning.measured(plain) == {}
    assert not wanted & tuning.read(plain).keys()


def test_greedy_tokens_are_those_of_the_defaults_alone_and_together(tuned, plain):
    requests = [
        greedy(f"r{n}", [(17 * n + 29 * at * at) % (VOCAB - 3) + 3 for at in range(n)], 24, logprobs=2)
        for n in LENGTHS
    ]

    def told(artifact: Path) -> list[dict[str, list[TokenEvent]]]:
        runs = []
        with gpu_engine(artifact, kv=NO_CACHE) as engine:
            for some in ([request] for request in requests):
                engine.inbox.put(*some)
                runs.append(finish(engine))
            engine.inbox.put(*requests)
            together = finish(engine)
            assert engine.stats().graph_replays > 0
        alone = {r.request_id: events_of(news, r.request_id) for r, news in zip(requests, runs, strict=True)}
        return [alone, {r.request_id: events_of(together, r.request_id) for r in requests}]

    compared = 0
    for ours, theirs in zip(told(tuned), told(plain), strict=True):
        for name, events in ours.items():
            for mine, other in zip(events, theirs[name], strict=True):
                (near,), (far,) = mine.logprobs, other.logprobs
                if far.top[0][1] - far.top[1][1] < NEAR:
                    break  # either token is right, and what follows is another text
                assert mine.token_ids == other.token_ids, name
                assert near.logprob == pytest.approx(far.logprob, abs=NEAR)
                compared += 1
    assert compared > 40

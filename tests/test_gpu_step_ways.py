"""The search of benchmarks/gpu_step_ways.py, over steps whose times are made up."""

from collections.abc import Sequence

from benchmarks.gpu_step_ways import Mix, descend, share, told
from benchmarks.linear_layers import MODELS
from ostinato.ops.skinny_rows import Config
from ostinato.ops.wgmma_linear import Tile

SLOW, FAST, WIDE = Config(False, 1, 1024, 4, 1), Config(False, 2, 1024, 4, 1), Tile(64, 1, 2)


def test_each_layer_takes_its_best_way_beside_those_of_the_others() -> None:
    asked: list[Mix] = []

    def times(some: Sequence[Mix], rounds: int) -> list[list[float]]:
        asked.extend(some)
        each = {SLOW: 3.0, FAST: 2.0, WIDE: 2.5, None: 9.0}
        # a tile ahead of a Triton kernel hides 2: found the second time around
        took = [sum(each[way] for way in mix) - 2 * (mix[0] == WIDE and mix[1] == FAST) for mix in some]
        return [[ms + 5, ms] * rounds for ms in took]

    found = descend((SLOW, SLOW, SLOW), [[SLOW, FAST, WIDE, None]] * 3, times)
    assert found == (WIDE, FAST, FAST)
    assert told(found) == "wtt"
    assert len(asked) == 2 * 3 * 4


def test_l1_is_split_as_the_engine_splits_it() -> None:
    spec = MODELS["llama-8b"]
    assert share(spec, (FAST, FAST, FAST, WIDE, FAST), 1) == 75
    assert share(spec, (FAST,) * 5, 1) == share(spec, (None,) * 5, 1) == 100
    assert share(spec, (FAST, FAST, FAST, WIDE, FAST), 8) == 100

"""`LLM.sleep`, `wake`, `set_kv_target`; prefix cache, abort and profiles."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from ostinato.errors import InvalidRequest, ProfileRefused, SleepRefused
from ostinato.runtime.config import ProfileConfig
from ostinato.runtime.engine_thread import EngineThread
from ostinato.runtime.llm import LLM
from ostinato.runtime.messages import SamplingParams
from tests.support.engine_runs import BLOCK_BYTES, prompt_of, toy_config
from tests.support.toy_model import ToyModel, load_toy
from tests.support.toy_text import front_end

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture
def llm():
    config = toy_config()
    with LLM.over(EngineThread("toy", config, load=load_toy), front_end(), config) as made:
        yield made


def test_a_call_made_while_it_sleeps_returns_after_waking_with_the_same_answer(llm):
    prompt = prompt_of(33)
    truth = ToyModel().greedy(prompt, 12)
    other = ThreadPoolExecutor(1)
    for level in (1, 2):
        assert list(llm.generate(prompt, GREEDY)[0].outputs[0].token_ids) == truth
        state = llm.sleep(level)
        assert (state.asleep, state.kv_bytes, llm.stats.asleep) == (level, 0, level)
        asking = other.submit(llm.generate, prompt, GREEDY)
        with pytest.raises(TimeoutError):
            asking.result(0.1)
        assert llm.wake().kv_bytes > 0
        (output,) = asking.result(20)
        assert list(output.outputs[0].token_ids) == truth
        assert output.num_cached_tokens == 0
    other.shutdown()


def test_wrong_levels_targets_and_orders_are_refused_by_name(llm):
    for level in (0, 3, "1"):
        with pytest.raises(InvalidRequest, match="level="):
            llm.sleep(level)
    with pytest.raises(InvalidRequest, match="target_bytes=-1"):
        llm.set_kv_target(-1)
    llm.sleep(2)
    with pytest.raises(SleepRefused, match="wake it first"):
        llm.sleep(1)


def test_a_target_is_kept_and_shown(llm):
    llm.generate([prompt_of(400, at) for at in range(8)], GREEDY)
    assert llm.set_kv_target(20 * BLOCK_BYTES).kv_target_bytes == 20 * BLOCK_BYTES
    llm.generate(prompt_of(20), GREEDY)
    assert llm.stats.blocks_committed == 20
    assert llm.set_kv_target(None).kv_target_bytes is None


def test_prefixes_are_forgotten_answers_ended_and_profiles_taken(tmp_path):
    config = toy_config(profile=ProfileConfig(folder=str(tmp_path)))
    slow = partial(ToyModel, step_s=0.005)
    engine = EngineThread("toy", config, load=lambda folder, config: slow(folder))
    with LLM.over(engine, front_end(), config) as llm, ThreadPoolExecutor(1) as other:
        llm.generate(prompt_of(33), GREEDY)
        assert llm.reset_prefix_cache() == 2
        assert llm.generate(prompt_of(33), GREEDY)[0].num_cached_tokens == 0
        assert llm.start_profile(20.0) == 20.0
        with pytest.raises(ProfileRefused, match="running already"):
            llm.start_profile()
        asking = other.submit(llm.generate, [prompt_of(20), prompt_of(9)], LONG)
        ended = 0
        while not ended:
            ended = llm.abort()
        outputs = asking.result(20)
        assert "abort" in {output.outputs[0].finish_reason for output in outputs}
        assert llm.stop_profile().parent == tmp_path
        with pytest.raises(InvalidRequest, match="seconds"):
            llm.start_profile(-1.0)

"""The one rule about room behind a prompt, and who states it."""

import pytest

from ostinato.errors import ContextTooLong
from ostinato.runtime.config import SchedulerConfig
from ostinato.runtime.messages import GenerateRequest, SamplingParams
from ostinato.runtime.prompt_room import room_left
from ostinato.runtime.request_check import check_request
from ostinato.runtime.scheduling.block_pool import BlockPool
from ostinato.runtime.scheduling.scheduler import Scheduler
from tests.support.fake_engine import info
from tests.support.toy_text import front_end


@pytest.mark.parametrize(("prompt", "left"), [(1, 63), (60, 4), (63, 1)])
def test_room_behind_a_prompt(prompt: int, left: int):
    assert room_left(prompt, 64, param="prompt") == left


@pytest.mark.parametrize("prompt", [64, 1000])
def test_prompt_that_fills_the_window_is_refused_with_both_numbers(prompt: int):
    with pytest.raises(ContextTooLong, match=rf"{prompt} tokens.* 64 tokens.* to 63 tokens") as caught:
        room_left(prompt, 64, param="messages")
    assert caught.value.param == "messages"


def test_text_request_check_and_scheduler_refuse_in_the_same_words():
    text = front_end()
    prompt = "the quick brown fox " * 40
    ids = tuple(text.encode(prompt))
    request = GenerateRequest(request_id="a", prompt_token_ids=ids, sampling=SamplingParams())
    pool = BlockPool(committed=8, capacity=8, block_tokens=8, prefix_cache=True)
    said = []
    for refuse in (
        lambda: text.encode_within(64, prompt, param="prompt"),
        lambda: check_request(request, info(vocab_size=410, max_model_len=64, eos=1)),
        lambda: Scheduler(pool, SchedulerConfig(), 64, frozenset()).add(request),
    ):
        with pytest.raises(ContextTooLong) as caught:
            refuse()
        said.append((str(caught.value), caught.value.param))
    text.close()
    assert len(ids) > 64
    assert (
        said
        == [
            (
                f"the prompt is too long: it has {len(ids)} tokens, this model's maximum context length is "
                "64 tokens and the answer needs at least one of them; shorten the prompt to 63 tokens",
                "prompt",
            )
        ]
        * 3
    )

"""One request at a time and many: chunks, limits, endings, prefix reuse, aborts, overlap."""

import pytest

from ostinato.errors import ContextTooLong, InvalidRequest, Overloaded
from ostinato.runtime.scheduling.plan import PENDING
from tests.support.fake_device import FakeDevice
from tests.support.prefix_match import matched


def shapes(device: FakeDevice, name: str) -> list[tuple[int, int, bool]]:
    """(start, tokens, samples) of each entry of a request."""
    return [
        (e.start, len(e.token_ids), e.samples)
        for p in device.plans
        for e in p.entries
        if e.request_id == name
    ]


def test_a_long_prompt_is_fed_in_chunks_and_only_the_last_one_samples():
    device = FakeDevice(budget=64)
    device.add("a", 150, max_tokens=3)
    device.run()
    assert shapes(device, "a") == [
        (0, 64, False),
        (64, 64, False),
        (128, 22, True),
        (150, 1, True),
        (151, 1, True),
    ]
    assert device.clients["a"].tokens == device.expected("a", 3)
    assert device.clients["a"].finish == "length"
    entry = device.plans[2].entries[0]
    assert (entry.num_logit_rows, entry.logits_from) == (1, 21)


def test_decodes_go_on_in_every_step_beside_a_prefill_within_the_budget():
    device = FakeDevice(budget=64)
    device.add("a", 8, max_tokens=20)
    device.step()
    device.add("b", 500, max_tokens=2)
    device.run()
    assert device.clients["a"].steps == list(range(1, 21))
    assert [(len(p.entries), p.num_tokens) for p in device.plans[1:9]] == [(2, 64)] * 7 + [(2, 60)]
    assert [e.request_id for e in device.plans[1].entries] == ["a", "b"]  # decodes first


def test_the_block_table_is_the_same_object_until_it_grows():
    device = FakeDevice(block_tokens=4)
    device.add("a", 3, max_tokens=6)
    device.run()
    tables = [p.entries[0].block_ids for p in device.plans]
    assert [len(t) for t in tables] == [1, 1, 2, 2, 2, 2]
    assert tables[0] is tables[1]
    assert tables[2] is tables[5]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "count"), [(60, 10, 4), (60, None, 4), (63, None, 1), (60, 2, 2)]
)
def test_the_answer_ends_where_the_window_or_max_tokens_ends(prompt: int, max_tokens: int | None, count: int):
    device = FakeDevice(window=64)
    device.add("a", prompt, max_tokens=max_tokens)
    device.run()
    assert (len(device.clients["a"].tokens), device.clients["a"].finish) == (count, "length")


def test_a_huge_max_tokens_allocates_nothing_in_advance():
    device = FakeDevice(window=1 << 40)
    device.add("a", 10, max_tokens=10**9)
    device.step()
    assert device.pool.num_held == 1


def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers():
    device = FakeDevice(window=64)
    with pytest.raises(
        ContextTooLong, match="it has 64 tokens, this model's maximum context length is 64 tokens"
    ) as caught:
        device.add("a", 64)
    assert caught.value.param == "prompt"
    assert not device.scheduler.has_work


def test_the_window_is_at_most_what_the_pool_can_ever_hold():
    device = FakeDevice(blocks=2, capacity=4, block_tokens=16, window=1000)
    with pytest.raises(ContextTooLong, match="maximum context length is 64 tokens"):
        device.add("a", 64)


def test_an_empty_prompt_and_an_id_in_use_are_refused():
    device = FakeDevice()
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        device.add("a", ())
    device.add("a", 5)
    with pytest.raises(InvalidRequest, match="request_id='a'"):
        device.add("a", 5)
    device.run()
    device.add("a", 5)  # free again


def test_the_queue_refuses_what_exceeds_slots_and_max_waiting():
    device = FakeDevice(max_running=2, max_waiting=3)
    for index in range(5):  # two slots, three places
        device.add(f"r{index}", 4)
    with pytest.raises(Overloaded, match=r"5 requests wait, scheduler\.max_waiting=3"):
        device.add("r5", 4)
    device.step()
    with pytest.raises(Overloaded):
        device.add("r5", 4)
    assert device.abort("r4")
    device.add("r5", 4)
    device.run()
    assert [c.finish for c in device.clients.values()].count("length") == 5


def test_eos_and_stop_tokens_end_the_answer_and_are_named():
    script = {5: 7, 6: 8, 7: 2}
    device = FakeDevice(model=lambda context: script[len(context)])
    prompt = (50, 51, 52, 53, 54)
    device.add("eos", prompt, max_tokens=9)
    outcomes = [o for _ in range(3) for o in (device.launch(), device.settle())[1]]
    assert [(o.token_id, o.finish_reason, o.stop_token_id) for o in outcomes] == [
        (7, None, None),
        (8, None, None),
        (2, "stop", 2),
    ]
    device.add("stop", prompt, max_tokens=9, stop_token_ids=(8,))
    device.run()
    assert (device.clients["stop"].tokens, device.clients["stop"].finish) == ([7, 8], "stop")


def test_ignore_eos_min_tokens_and_the_last_token_being_eos():
    device = FakeDevice(model=lambda context: 2)
    device.add("ignored", (50,), max_tokens=3, ignore_eos=True)
    device.add("late", (51,), max_tokens=9, min_tokens=2)
    device.add("last", (52,), max_tokens=1)
    device.run()
    ends = {name: (len(c.tokens), c.finish) for name, c in device.clients.items()}
    assert ends == {"ignored": (3, "length"), "late": (3, "stop"), "last": (1, "stop")}


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_a_repeated_prompt_is_taken_from_the_cache_but_for_its_last_token(length: int, cached: int):
    device = FakeDevice(block_tokens=16)
    prompt = tuple(range(500, 500 + length))
    for turn in range(3):
        device.add(f"turn{turn}", prompt)
        device.run()
    device.add("longer", (*prompt, 1))
    device.run()
    tokens = [device.clients[f"turn{turn}"].tokens for turn in range(3)]
    assert tokens == [device.expected("turn0", 4)] * 3
    assert [device.clients[f"turn{turn}"].cached_tokens for turn in range(3)] == [0, cached, cached]
    assert device.clients["longer"].cached_tokens == length // 16 * 16
    assert device.clients["longer"].tokens == device.expected("longer", 4)
    assert device.scheduler.counters.prefix_hits == 2 * cached + length // 16 * 16


def test_the_next_turn_reuses_the_answer_and_only_as_far_as_ids_are_equal():
    device = FakeDevice(block_tokens=4)
    device.add("one", (1, 3, 4, 5, 6), max_tokens=8)
    device.run()
    answer = device.clients["one"].tokens
    device.add("two", (1, 3, 4, 5, 6, *answer, 9))  # 12 tokens have KV: all but the last of the answer
    device.add("edited", (1, 3, 4, 5, 6, answer[0] + 1, *answer[1:], 9))
    device.run()
    assert device.clients["two"].cached_tokens == 12
    assert device.clients["edited"].cached_tokens == 4
    assert device.clients["two"].tokens == device.expected("two", 4)
    assert device.clients["edited"].tokens == device.expected("edited", 4)


def test_salts_keep_caches_apart():
    device = FakeDevice(block_tokens=4)
    prompt = tuple(range(500, 510))
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        device.add(name, prompt, salt=salt)
        device.run()
    assert [device.clients[n].cached_tokens for n in "abc"] == [0, 0, 8]


def test_a_block_is_shared_only_after_the_step_that_filled_it():
    device = FakeDevice(block_tokens=16, budget=256)
    prompt = tuple(range(500, 600))
    device.add("a", prompt)
    device.launch()
    device.add("b", prompt)
    device.settle()
    device.step()
    assert device.entry("b").start == 96
    device.run()
    assert device.clients["b"].tokens == device.expected("b", 4)


def test_equal_prompts_that_come_together_share_what_the_first_has_computed():
    device = FakeDevice(block_tokens=16, budget=64)
    prompt = tuple(range(500, 700))
    for index in range(4):
        device.add(f"r{index}", prompt, max_tokens=2)
    device.run()
    assert sum(p.num_tokens for p in device.plans) < 4 * 200 / 2
    assert {tuple(c.tokens) for c in device.clients.values()} == {tuple(device.expected("r0", 2))}


def test_prompt_logprobs_ask_for_every_prompt_row_once_and_do_not_read_the_cache():
    device = FakeDevice(block_tokens=16, budget=64)
    prompt = tuple(range(500, 600))
    device.add("a", prompt, max_tokens=2)
    device.run()
    before = len(device.plans)
    device.add("b", prompt, max_tokens=2, prompt_logprobs=0)
    device.run()
    assert (device.scheduler.counters.prefix_queries, device.scheduler.counters.prompt_tokens) == (100, 200)
    entries = [p.entries[0] for p in device.plans[before:]]
    assert [(e.start, e.logits_from, e.num_logit_rows, e.prompt_logit_rows) for e in entries] == [
        (0, 0, 64, range(64)),
        (64, 0, 36, range(35)),  # the last row is the sampled one
        (100, 0, 1, range(0, 0)),
    ]
    assert device.clients["b"].cached_tokens == 0
    assert device.clients["b"].tokens == device.clients["a"].tokens


def test_a_step_has_at_most_512_rows_of_prompt_log_probabilities_and_others_are_not_held_up():
    device = FakeDevice(blocks=1000, budget=4096)
    device.add("long", 1500, max_tokens=1, prompt_logprobs=0)
    device.add("plain", 2500, max_tokens=1)
    device.add("short", 200, max_tokens=1, prompt_logprobs=0)
    device.run()
    shares = [{e.request_id: len(e.token_ids) for e in plan.entries} for plan in device.plans]
    assert shares == [
        {"short": 200, "plain": 2500, "long": 312},
        {"long": 512},
        {"long": 512},
        {"long": 164},
    ]
    scored = [e for plan in device.plans for e in plan.entries if e.request_id == "long"]
    assert sum(e.num_logit_rows for e in scored) == 1500
    assert all(len(client.tokens) == 1 for client in device.clients.values())


def test_prompts_that_are_scored_share_rows_as_all_prompts_share_tokens():
    def first_step(**prompts):
        device = FakeDevice(blocks=2000, budget=4096)
        for name, (tokens, scored) in prompts.items():
            device.add(name, tokens, max_tokens=1, prompt_logprobs=0 if scored else None)
        device.step()
        return {e.request_id: len(e.token_ids) for e in device.plans[0].entries}

    assert first_step(a=(1500, True), b=(200, True)) == {"b": 200, "a": 312}, "the shortest goes first"
    half = first_step(a=(1500, True), b=(200, True), c=(190, True), d=(180, True))
    assert half == {"d": 180, "c": 76, "a": 256}, "the first in rank keeps half"
    assert first_step(a=(2000, False), b=(400, True), c=(450, True)) == {"b": 400, "a": 2000, "c": 112}


def test_an_entry_without_wanted_rows_says_so():
    device = FakeDevice(budget=64)
    device.add("a", 100)
    entry = device.step().entries[0]
    assert (entry.samples, entry.logits_from, entry.num_logit_rows) == (False, 64, 0)
    assert list(entry.prompt_logit_rows) == []


def test_a_failed_request_ends_with_its_error_and_leaves_nothing_in_the_cache():
    device = FakeDevice(block_tokens=4)
    prompt = tuple(range(500, 510))
    device.add("bad", prompt)
    device.add("good", 10)
    device.launch()
    device.settle(failed={"bad": "NaN logits"})
    assert (device.clients["bad"].finish, device.clients["bad"].error) == ("error", "NaN logits")
    device.run()
    assert device.clients["good"].tokens == device.expected("good", 4)
    assert matched(device.pool, prompt, "") == ([], 0)
    assert device.pool.num_held == 0


def test_abort_in_every_state_gives_the_blocks_back_and_disturbs_nobody():
    device = FakeDevice(budget=64, max_running=3)
    assert not device.abort("unknown")
    device.add("witness", 8, max_tokens=30)
    device.add("chunks", 200)
    device.add("decoding", 8, max_tokens=30)
    device.add("queued", 8)
    device.step()
    assert device.abort("queued")
    assert device.abort("chunks")  # between two chunks
    assert not device.abort("chunks")  # twice
    device.launch()
    held = device.pool.num_held
    assert device.abort("decoding")  # in the step that runs
    assert device.pool.num_held == held  # the device may still write there
    device.add("decoding", 8)  # the id can be used at once
    device.settle()
    device.run()
    assert device.clients["witness"].tokens == device.expected("witness", 30)
    assert device.clients["decoding"].tokens == device.expected("decoding", 4)
    assert not device.abort("witness")  # has just finished
    assert (device.pool.num_held, device.scheduler.num_running, device.scheduler.num_waiting) == (0, 0, 0)


def test_an_aborted_prefill_leaves_only_whole_computed_blocks_in_the_cache():
    device = FakeDevice(block_tokens=16, budget=40)
    prompt = tuple(range(500, 600))
    device.add("a", prompt)
    device.step()  # 40 tokens: two full blocks and half of the third
    device.launch()  # up to 80
    device.abort("a")
    device.settle()
    device.add("b", prompt)
    device.run()
    assert device.clients["b"].cached_tokens == 32
    assert device.clients["b"].tokens == device.expected("b", 4)


def test_everything_aborted_at_once_leaves_an_idle_scheduler():
    device = FakeDevice(budget=64, max_running=4)
    for index in range(10):
        device.add(f"r{index}", 50)
    device.step()
    device.launch()
    assert all(device.abort(f"r{index}") for index in range(10))
    device.settle()
    assert not device.scheduler.has_work
    assert device.pool.num_held == 0
    assert device.step() is None


def test_a_second_plan_is_made_before_the_first_is_settled_when_allowed():
    device = FakeDevice(max_in_flight=2)
    device.add("a", 8, max_tokens=4)
    device.add("b", 8, max_tokens=2)
    device.launch()
    second = device.launch()
    assert [e.token_ids for e in second.entries] == [(PENDING,), (PENDING,)]
    assert device.launch() is None
    device.settle()
    third = device.launch()
    assert [e.request_id for e in third.entries] == ["a"]  # b has all its tokens sampled or in flight
    device.settle()
    device.launch()
    device.settle()
    device.settle()
    assert device.clients["a"].tokens == device.expected("a", 4)
    assert device.clients["b"].tokens == device.expected("b", 2)
    assert device.pool.num_held == 0


def test_with_overlap_a_token_after_the_end_is_dropped_and_blocks_wait_for_its_step():
    device = FakeDevice(max_in_flight=2, model=lambda context: 2)
    device.add("a", 8, max_tokens=4)
    device.launch()
    device.launch()
    device.settle()
    assert (device.clients["a"].finish, device.pool.num_held) == ("stop", 1)
    assert device.settle() == []
    assert device.pool.num_held == 0


def test_with_overlap_an_abort_gives_the_blocks_back_after_the_last_step_in_flight():
    device = FakeDevice(max_in_flight=2)
    device.add("a", 8, max_tokens=9)
    device.launch()
    device.launch()
    assert device.abort("a")
    device.settle()
    assert device.pool.num_held == 1
    device.settle()
    assert (device.pool.num_held, device.scheduler.has_work) == (0, False)


def test_with_overlap_a_prefix_is_reused_only_while_no_step_of_the_sequence_is_in_flight():
    device = FakeDevice(max_in_flight=2, block_tokens=4, budget=8)
    prompt = tuple(range(500, 560))
    device.add("ahead", prompt, max_tokens=1)
    device.launch()
    device.launch()
    device.settle()
    device.add("behind", prompt[:30], max_tokens=1)
    device.launch()
    assert (device.entry("behind").start, len(device.entry("behind").token_ids)) == (8, 4)
    device.settle()  # publishes tokens 8 to 15, while 8 to 11 of the second are in flight
    device.launch()
    assert device.entry("behind").start == 12
    device.settle()
    device.settle()
    device.run()
    assert device.clients["behind"].tokens == device.expected("behind", 1)


def test_settling_out_of_order_is_caught():
    device = FakeDevice(max_in_flight=2)
    device.add("a", 8)
    device.launch()
    second = device.launch()
    with pytest.raises(AssertionError, match="in the order in which they were made"):
        device.scheduler.complete(second, {"a": 5})


@pytest.mark.parametrize(
    ("blocks", "prompts", "answer"),
    [(5, [3, 4, 1, 2, 4, 2], 16), (10, [1, 1, 3, 4, 1, 1], 16), (6, [1, 4, 1, 3], 12)],
)
def test_a_decode_that_lacks_a_block_gives_its_turn_to_another_and_nobody_fails(
    blocks: int, prompts: list[int], answer: int
):
    device = FakeDevice(blocks=blocks, block_tokens=4, budget=1)  # each request alone would fit
    for index, prompt in enumerate(prompts):
        device.add(f"r{index}", prompt, max_tokens=answer)
    device.run()
    assert [(client.finish, client.error) for client in device.clients.values()] == [("length", None)] * len(
        prompts
    )
    assert all(client.tokens == device.expected(name, answer) for name, client in device.clients.items())

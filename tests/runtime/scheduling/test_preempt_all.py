"""Everybody back to the queue, as before sleep: blocks come back, answers stay right."""

import pytest

from tests.support.fake_device import FakeDevice, assert_right


def test_all_wait_without_blocks_and_go_on_where_they_were_with_right_answers():
    device = FakeDevice(max_running=3)
    for name, length in (("a", 40), ("b", 20), ("c", 5), ("d", 30)):
        device.add(name, length, max_tokens=10)
    for _ in range(4):
        device.step()
    assert device.scheduler.num_running == 3
    device.scheduler.preempt_all()
    device.scheduler.check()
    assert (device.scheduler.num_running, device.scheduler.num_waiting, device.pool.num_held) == (0, 4, 0)
    device.run()
    assert_right(device)


def test_it_is_no_business_of_a_plan_in_flight():
    device = FakeDevice()
    device.add("a", 40)
    device.launch()
    with pytest.raises(AssertionError, match="plan in flight"):
        device.scheduler.preempt_all()


def test_a_prompt_is_scored_once_though_the_step_that_goes_on_with_it_is_taken_back():
    device = FakeDevice(budget=8)
    device.add("a", 20, prompt_logprobs=0)
    device.step()
    device.scheduler.preempt_all()
    device.scheduler.step_tokens = 12
    device.launch()
    assert [*device.entry("a").prompt_logit_rows] == [8, 9, 10, 11]
    device.take_back()
    device.run()
    assert device.clients["a"].scored == [*range(1, 20)]
    assert_right(device)

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

"""What is left of cases B01, B11 and B35: load of better priority, aborts, n on one slot."""

from tests.support.fake_device import FakeDevice, assert_right


def test_a_worse_priority_waits_as_long_as_better_ones_keep_coming_and_then_runs():
    device = FakeDevice(max_running=1)
    device.add("low", 8, priority=1, max_tokens=3)
    for index in range(50):
        device.add(f"high{index}", 8, priority=0, max_tokens=2)
        device.step()
        device.step()
    assert device.clients["low"].tokens == []
    device.run()
    assert device.clients["low"].tokens == device.expected("low", 3)
    assert_right(device)


def test_a_preempted_request_can_be_aborted_and_leaves_nothing():
    device = FakeDevice(max_running=1)
    device.add("low", 20, priority=1, max_tokens=12)
    device.step()
    device.step()
    device.add("high", 20, priority=0, max_tokens=4)
    device.step()
    assert device.scheduler.counters.preemptions == 1
    assert device.abort("low")
    assert not device.abort("low")
    device.run()
    assert device.clients["high"].tokens == device.expected("high", 4)
    assert (device.pool.num_held, device.scheduler.num_waiting) == (0, 0)


def test_four_choices_of_one_prompt_on_one_slot_end_in_their_order_also_when_others_preempt_them():
    device = FakeDevice(max_running=1)
    for index in range(4):
        device.add(f"choice{index}", tuple(range(700, 740)), priority=1, max_tokens=3)
    for index in range(3):
        device.step()
        device.add(f"high{index}", 5, priority=0, max_tokens=1)
    device.run()
    ends = [device.clients[f"choice{index}"].steps[-1] for index in range(4)]
    assert ends == sorted(ends)
    assert all(len(plan.entries) == 1 for plan in device.plans)
    assert_right(device)


def test_some_of_four_choices_done_the_others_are_aborted_alone():
    device = FakeDevice(max_running=8)
    for index, most in enumerate((1, 2, 30, 30)):
        device.add(f"choice{index}", tuple(range(700, 740)), max_tokens=most)
    device.add("witness", 8, max_tokens=20)
    for _ in range(4):
        device.step()
    assert [device.abort(f"choice{index}") for index in range(4)] == [False, False, True, True]
    device.run()
    assert device.clients["witness"].tokens == device.expected("witness", 20)
    assert device.pool.num_held == 0

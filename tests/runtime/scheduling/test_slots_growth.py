"""Asking for more KV memory ahead of need, and what happens when it is refused."""

from tests.support.fake_device import FakeDevice, assert_right


def test_growth_is_asked_for_ahead_of_need_and_counts_free_blocks_only():
    device = FakeDevice(blocks=4, capacity=100, block_tokens=4, max_running=4)
    assert device.scheduler.blocks_wanted() == 0
    device.add("a", 40, max_tokens=20)
    assert device.scheduler.blocks_wanted() == 10 + 1 - 4
    while device.scheduler.has_work:
        device.pool.grow_to(device.pool.committed + device.scheduler.blocks_wanted())
        device.step()
    assert device.scheduler.counters.preemptions == 0
    assert device.pool.num_cached == 14
    device.add("b", 24)
    assert device.scheduler.blocks_wanted() == 6 + 1 - device.pool.num_free  # cached blocks are not counted
    device.run()
    assert_right(device)


def test_growth_stops_at_the_capacity():
    device = FakeDevice(blocks=4, capacity=8, block_tokens=4)
    for index in range(3):
        device.add(f"r{index}", 20)
    assert device.scheduler.blocks_wanted() == 4


def test_known_prefixes_do_not_ask_for_growth():
    device = FakeDevice(blocks=20, capacity=100, block_tokens=4)
    prompt = tuple(range(500, 540))
    device.add("a", prompt)
    device.run()
    for index in range(4):
        device.add(f"r{index}", (*prompt, index))
    assert device.scheduler.blocks_wanted() == max(0, 4 * 2 - device.pool.num_free)


def test_refused_growth_ends_only_the_request_that_cannot_be_served():
    device = FakeDevice(blocks=4, capacity=100, block_tokens=4)
    device.add("huge", 100)
    device.add("endless", 4, max_tokens=1000)
    device.add("small", 4, max_tokens=3)
    device.run()
    huge, endless = device.clients["huge"], device.clients["endless"]
    assert huge.finish == "error"
    assert huge.error.startswith(
        "KV memory is full: 100 tokens and the next need 26 blocks of 4 tokens, 4 are committed"
    )
    assert (endless.finish, len(endless.tokens)) == ("error", 13)  # 16 tokens of KV, the last one not fed
    assert endless.tokens == device.expected("endless", 13)
    assert_right(device, "small")
    assert not device.scheduler.has_work


def test_a_request_that_only_waits_for_growth_is_not_ended():
    device = FakeDevice(blocks=4, capacity=100, block_tokens=4)
    device.add("huge", 100)
    assert device.scheduler.next_plan(growth_pending=True) is None
    assert device.scheduler.take_ended() == []
    device.pool.grow_to(40)
    device.run()
    assert_right(device)

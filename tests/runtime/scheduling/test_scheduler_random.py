"""Random arrivals, aborts, growth and steps taken back on a device that is strict about what it reads."""

import random

import pytest

from tests.support.fake_device import FakeDevice


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_random_arrivals_and_aborts_keep_the_books_and_the_answers(seed: int, max_in_flight: int):
    rng = random.Random(seed)
    device = FakeDevice(
        blocks=12,
        capacity=40,
        block_tokens=4,
        budget=rng.choice([3, 8, 24]),
        max_running=rng.choice([1, 3, 8]),
        max_in_flight=max_in_flight,
        window=120,
        prefix_cache=seed != 2,
    )
    shared = tuple(range(500, 540))
    in_flight, scored = 0, set[str]()
    for index in range(1000):
        action = rng.random()
        if action < 0.25:
            own = tuple(rng.randrange(3, 9) for _ in range(rng.randint(1, 60)))
            prompt = (shared[: rng.randrange(40)] + own)[: rng.randint(1, 100)]
            scores = rng.choice([None, None, None, 2])
            device.add(
                f"r{index}",
                prompt,
                priority=rng.choice([0, 0, 0, 1, -1]),
                max_tokens=rng.randint(1, 30),
                prompt_logprobs=scores,
            )
            if scores is not None:
                scored.add(f"r{index}")
        elif action < 0.4 and device.clients:
            device.abort(rng.choice(list(device.clients)[-12:]))
        elif action < 0.45:
            device.pool.grow_to(rng.randint(device.pool.committed, 40))
        elif action < 0.5 and in_flight == 0:
            device.pool.shrink_tail(keep=32)
        elif action < 0.6 and in_flight:
            device.take_back()
            in_flight -= 1
            device.scheduler.step_tokens = rng.choice([1, 2, device.scheduler.config.max_step_tokens])
        elif in_flight < max_in_flight and device.launch() is not None:
            in_flight += 1
        elif in_flight:
            device.settle()
            in_flight -= 1  # this checks the books
    device.pool.grow_to(40)
    for _ in range(in_flight):
        device.settle()
    device.run()
    device.scheduler.check()
    assert (device.pool.num_held, device.scheduler.num_running, device.scheduler.num_waiting) == (0, 0, 0)
    finished = [name for name, client in device.clients.items() if client.finish == "length"]
    assert len(finished) > 20
    for name in finished:
        client = device.clients[name]
        assert client.tokens == device.expected(name, len(client.tokens))
        assert len(client.scored) == (len(client.prompt) - 1 if name in scored else 0)
    assert {c.finish for c in device.clients.values()} <= {"length", "abort", "error"}

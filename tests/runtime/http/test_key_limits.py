"""Requests at once, requests and tokens per minute of one caller, on a fake clock."""

import pytest

from ostinato.runtime.config import LimitsConfig
from ostinato.runtime.http.key_limits import Allowance, RateLimited


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def allowance(**limits: int) -> tuple[Allowance, Clock]:
    clock = Clock()
    return Allowance(LimitsConfig(**limits), clock), clock


def refused(use: Allowance) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        use.enter()
    return caught.value


def test_without_limits_everything_passes():
    use, _ = allowance()
    for _ in range(1000):
        use.enter()
        use.spend(10**6)
    assert use.running == 1000


def test_requests_at_once_are_counted_while_they_run():
    use, _ = allowance(concurrent=2)
    use.enter()
    use.enter()
    assert (refused(use).limit, use.running) == ("concurrent", 2)
    use.leave()
    use.enter()


def test_requests_of_a_minute_come_back_evenly_and_a_refused_one_costs_nothing():
    use, clock = allowance(requests_per_minute=60)
    for _ in range(60):
        use.enter()
    for _ in range(5):
        assert refused(use).retry_after_s == pytest.approx(1.0)
    clock.now += 0.999
    refused(use)
    clock.now += 0.002
    use.enter()
    clock.now += 3600
    for _ in range(60):
        use.enter()  # never more than a minute's worth is saved up
    refused(use)


def test_tokens_beyond_the_limit_are_a_debt_that_the_next_request_waits_for():
    use, clock = allowance(tokens_per_minute=600)
    use.enter()
    use.spend(500)
    use.enter()  # 100 are left
    use.spend(700)
    error = refused(use)
    assert (error.limit, error.retry_after_s) == ("tokens_per_minute", pytest.approx(60.0))
    assert "600 tokens a minute; 600 more than that are used" in str(error)
    clock.now += 59
    refused(use)
    clock.now += 1.1
    use.enter()


def test_a_refusal_by_one_limit_spends_nothing_of_another():
    use, _ = allowance(concurrent=1, requests_per_minute=2)
    use.enter()
    for _ in range(10):
        assert refused(use).limit == "concurrent"
    use.leave()
    use.enter()
    use.leave()
    assert refused(use).limit == "requests_per_minute"

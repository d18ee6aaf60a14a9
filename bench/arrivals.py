"""When requests are sent: a rate, its burstiness, and how it ramps up."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

Ramp = Literal["none", "linear", "exponential"]


def arrival_times(
    count: int,
    rate: float,
    rng: np.random.Generator,
    *,
    burstiness: float = 1.0,
    ramp: Ramp = "none",
    ramp_from: float = 0.0,
) -> list[float]:
    """Seconds from the start at which each of `count` requests is due; the first is due at 0.

    Gaps are gamma distributed with shape `burstiness` (1: Poisson arrivals, less: bursts, inf: even) and mean
    1/rate. `ramp`: the rate goes from `ramp_from` to `rate` over the requests, by equal steps or by equal
    factors.  Without a ramp the gaps are scaled so that their mean is exactly 1/rate: what was asked for is
    what is offered, however few requests there are.
    """
    if count < 2 or math.isinf(rate):
        return [0.0] * count
    share = np.linspace(0.0, 1.0, count - 1)
    if ramp == "linear":
        rates = ramp_from + (rate - ramp_from) * share
    elif ramp == "exponential":
        rates = ramp_from * (rate / ramp_from) ** share
    else:
        rates = np.full(count - 1, rate)
    if math.isinf(burstiness):
        noise = np.ones(count - 1)
    else:
        noise = rng.gamma(burstiness, 1.0 / burstiness, count - 1)
    if ramp == "none" and noise.sum() > 0:
        noise *= (count - 1) / noise.sum()
    return [0.0, *np.cumsum(noise / rates).tolist()]

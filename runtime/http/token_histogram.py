"""A histogram that is observed for every token: a bisect and two additions, without locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenHistogram(Collector):
    """As prometheus_client's `Histogram` without labels; all calls come from the loop's thread.

    That one takes a lock twice and looks through the buckets from the first: 2 us per token where this takes
    0.3 us.
    """

    def __init__(self, name: str, description: str, buckets: Sequence[float]) -> None:
        self._name = name
        self._description = description
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; a bucket holds its own bound."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        bounds = (*self._bounds, float("inf"))
        names = [floatToGoString(bound) for bound in bounds]  # type: ignore[no-untyped-call]  # the library's
        family = HistogramMetricFamily(self._name, self._description)
        family.add_metric([], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._description)]

"""The histogram of tokens says what prometheus_client's own would say."""

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from ostinato.runtime.http.token_histogram import TokenHistogram

BUCKETS = (0.001, 0.0025, 0.5, 1, 60)


def test_the_exposition_is_that_of_the_library():
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    mine = TokenHistogram("a_seconds", "What it is", BUCKETS)
    ours.register(mine)
    their = Histogram("a_seconds", "What it is", buckets=BUCKETS, registry=theirs)
    for _ in range(2):
        for value in (0.0, 0.001, 0.0011, 0.5, 0.75, 60.0, 61.0, 1e9):
            mine.observe(value)
            their.observe(value)
        lines = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
        assert generate_latest(ours).decode().splitlines() == lines

"""No message floods the log."""

import io
import logging

from ostinato.log import MOST_LINES, WINDOW_S, Bounded


def test_a_flood_of_one_message_is_cut_and_counted_and_others_pass():
    now = [0.0]
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.addFilter(Bounded(lambda: now[0]))
    logger = logging.Logger("flood")
    logger.addHandler(handler)
    for at in range(1000):
        logger.warning("malformed HTTP from %s", at)
    logger.warning("something else")
    lines = out.getvalue().splitlines()
    assert lines[:2] == ["malformed HTTP from 0", "malformed HTTP from 1"]
    assert (len(lines), lines[-1]) == (MOST_LINES + 1, "something else")
    now[0] += WINDOW_S
    logger.warning("malformed HTTP from %s", "b")
    logger.warning("malformed HTTP from %s", "c")
    assert out.getvalue().splitlines()[-2:] == [
        "malformed HTTP from b (980 more like it were left out)",
        "malformed HTTP from c",
    ]


def test_endless_different_messages_take_no_endless_memory():
    bounded = Bounded(lambda: 0.0)
    for at in range(5000):
        record = logging.LogRecord("x", logging.INFO, "", 0, f"message {at}", None, None)
        assert bounded.filter(record)
    assert len(bounded._seen) <= 1000

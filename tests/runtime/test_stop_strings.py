"""Stop strings: exact text, minimal hold-back, and the same result however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostinato.runtime.stop_strings import StopScanner


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    scanner, out = StopScanner(stops, include=include), []
    for piece in pieces:
        out.append(scanner.push(piece))
        if scanner.matched is not None:
            return out, scanner.matched
    return [*out, scanner.finish()], None


def test_beginning_of_a_stop_string_is_never_shown():
    assert run(["DEFGH"], ["AB", "CD", "EFG", "H"]) == (["AB", "C", "", ""], "DEFGH")


def test_text_that_cannot_become_a_stop_string_is_shown_at_once():
    assert run(["<end>"], ["hello", " world"]) == (["hello", " world", ""], None)


def test_held_text_comes_out_when_it_turns_out_harmless():
    assert run(["<end>"], ["a<en", "x", "<e"]) == (["a", "<enx", "", "<e"], None)


def test_hold_back_is_as_short_as_the_string_allows():
    # After "abab" only "ab" can still begin "abac".
    assert run(["abac"], ["abab", "x"]) == (["ab", "abx", ""], None)


@pytest.mark.parametrize(("include", "shown"), [(True, "one STOP"), (False, "one ")])
def test_text_behind_the_stop_string_is_dropped(include: bool, shown: str):
    assert run(["STOP"], ["one STOP two"], include=include) == ([shown], "STOP")


def test_string_that_ends_first_wins_and_of_those_the_longest():
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")
    assert run(["c", "bc"], ["xabcd"]) == (["xa"], "bc")


def test_stop_string_of_many_bytes_matches():
    assert run(["。\n"], ["你好", "。", "\n再见"]) == (["你好", "", ""], "。\n")


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """Brute force: the first end, then the longest string."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_result_does_not_depend_on_the_cuts(stops: list[str], pieces: list[str]):
    out, matched = run(stops, pieces)
    assert ("".join(out), matched) == expected(stops, "".join(pieces))


@given(st.text("ab", min_size=1, max_size=5), st.text("abc", max_size=20))
def test_held_text_is_always_the_longest_possible_beginning(stop: str, text: str):
    scanner, shown = StopScanner([stop]), ""
    for at, char in enumerate(text):
        shown += scanner.push(char)
        if scanner.matched:
            return
        so_far = text[: at + 1]
        hold = max(k for k in range(len(stop)) if so_far.endswith(stop[:k]))
        assert shown == so_far[: len(so_far) - hold]

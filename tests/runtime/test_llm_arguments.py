"""Arguments of `LLM`'s methods: what is refused, in which words; prompts are tested through `LLM`."""

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime.llm_arguments import check_n, read_conversations


@pytest.mark.parametrize("n", [0, -1, 129, 1.5, "2", True, None])
def test_a_wrong_n_is_refused(n):
    with pytest.raises(InvalidRequest, match=r"n: got .*; give an int from 1 to 128"):
        check_n(n)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ("hi", r"messages: got 'hi' \(str\); give a list like \[{\"role\""),
        (None, r"messages: got None"),
        ({"role": "user", "content": "hi"}, r"messages: got .*\(dict\)"),
        ([], r"messages: empty"),
        ([[]], r"messages\[0\]: empty"),
        (["hi"], r"messages\[0\]: got 'hi' \(str\); a message is a dict"),
        ([[{"role": "user", "content": "hi"}], None], r"messages\[1\]: got None"),
    ],
)
def test_wrong_messages_are_refused(messages, says):
    with pytest.raises(InvalidRequest, match=says):
        read_conversations(messages)

"""Roles of messages: HTTP and Python say the same of a wrong one."""

import pytest
from pydantic import ValidationError

from ostinato.errors import InvalidRequest
from ostinato.runtime.chat_roles import ROLES
from ostinato.runtime.http.api_errors import refusal
from ostinato.runtime.http.api_schema import ChatRequest
from ostinato.runtime.llm_arguments import read_conversation, read_conversations

KNOWN = "must be one of system, developer, user, assistant, tool"


def over_http(messages: object) -> str:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"messages": messages})
    return str(refusal(caught.value))


def in_python(messages: object) -> str:
    with pytest.raises(InvalidRequest) as caught:
        read_conversation(messages, "messages")
    assert caught.value.param == "messages"
    return str(caught.value)


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("usr", f"{KNOWN}, did you mean 'user'?; got \"usr\""),
        ("asistant", f"{KNOWN}, did you mean 'assistant'?; got \"asistant\""),
        ("king", f'{KNOWN}; got "king"'),
        ("", f'{KNOWN}; got ""'),
        (5, f"{KNOWN}; got 5"),
        ("x" * 1000, f'{KNOWN}; got "{"x" * 79}'),
    ],
)
def test_an_unknown_role_is_refused_alike_over_http_and_in_python(role: object, says: str):
    messages = [{"role": "user", "content": "a"}, {"role": role, "content": "b"}]
    assert over_http(messages) == in_python(messages) == f"messages[1].role: {says}"


def test_a_missing_role_is_refused_alike_and_others_by_their_place():
    assert over_http([{"content": "a"}]) == in_python([{"content": "a"}]) == "messages[0].role: is required"
    assert in_python([{"role": ["user"], "content": "a"}]).startswith(f"messages[0].role: {KNOWN}")
    with pytest.raises(InvalidRequest, match=r"^messages\[1\]\[0\]\.role: must be one of"):
        read_conversations([[{"role": "user", "content": "a"}], [{"role": "usr", "content": "a"}]])


@pytest.mark.parametrize("role", ROLES)
def test_every_role_of_the_list_is_taken_by_both(role: str):
    messages = [{"role": role, "content": "a"}]
    assert ChatRequest.model_validate({"messages": messages}).messages[0].role == role
    assert read_conversation(messages, "messages") == messages

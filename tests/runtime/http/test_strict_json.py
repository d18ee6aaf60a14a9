"""Bodies that are no JSON object are refused with the reason."""

import pytest

from ostinato.errors import InvalidRequest
from ostinato.runtime.http.strict_json import MAX_DEPTH, MAX_KEYS, parse, parse_object

BAD = {
    b"": "empty",
    b" \n": "empty",
    b"[]": "got an array",
    b'"x"': "got a string",
    b"7": "got a number",
    b"null": "got null",
    b'{"a": 1,}': "not valid JSON",
    b'{"a": NaN}': "NaN is not a JSON number",
    b'{"a": -Infinity}': "-Infinity is not a JSON number",
    b'{"a": 1e999}': "line 1 column 7 that is too large: it begins with 1e999;",
    b'{"a": ["\\" 1e999", 1e5,\n 3, -1e999]}': "line 2 column 5 that is too large: it begins with -1e999;",
    b'{"a": ' + b"1" * 400 + b".5}": "line 1 column 7 that is too large: it begins with 1{20};",
    b'{"a": "\xff"}': "not UTF-8: byte 7",
    b'{"a": 1, "b": {"c": 1, "c": 2}}': "'c' comes twice",
    b'{"a": "\\ud83d"}': "half a surrogate pair",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
    b'{"a": ' + b'{"b":' * 100_000 + b"1" + b"}" * 100_001: "nested too deeply",
    b'{"a": "' + b"1" * 5000 + b'", "b": [7, -' + b"1" * 4301 + b"]}": (
        "a number at line 1 column 5020 that is too large: it begins with -1{19}; at most 4300 digits"
    ),
    b"{" + b",".join(b'"%d": 1' % i for i in range(MAX_KEYS + 1)) + b"}": "keys; at most",
}


@pytest.mark.parametrize(("body", "reason"), BAD.items(), ids=range(len(BAD)))
def test_bad_body_is_refused_with_the_reason(body: bytes, reason: str):
    with pytest.raises(InvalidRequest, match=reason):
        parse_object(body)


def test_the_longest_integer_and_the_largest_float_are_read():
    assert parse_object(b'{"a": -' + b"9" * 4300 + b', "b": 1.7e308}') == {"a": 1 - 10**4300, "b": 1.7e308}


def test_good_body_is_read_with_emoji_written_either_way():
    assert parse_object('{"a": "😀", "b": "\\ud83d\\ude00", "c": [1, 2.5, null]}'.encode()) == {
        "a": "😀",
        "b": "😀",
        "c": [1, 2.5, None],
    }


def test_refusal_names_the_field_that_holds_the_text():
    with pytest.raises(InvalidRequest, match="arguments is not valid JSON") as caught:
        parse("{", "arguments", param="messages[0].arguments")
    assert caught.value.param == "messages[0].arguments"


@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"b":', "}")])
def test_nesting_is_read_up_to_a_limit_that_does_not_depend_on_the_interpreter(begin: str, end: str):
    def nested(depth: int) -> str:
        return begin * (depth - 1) + ("[]" if begin == "[" else "{}") + end * (depth - 1)

    parse(f"[{nested(MAX_DEPTH - 1)}, {nested(3)}]", "x")
    parse("[" + ",".join([nested(2)] * MAX_DEPTH) + "]", "x")  # many, but not in each other
    with pytest.raises(InvalidRequest, match="x is nested too deeply: at most 100 lists and objects"):
        parse(f"[{nested(3)}, {nested(MAX_DEPTH)}]", "x")

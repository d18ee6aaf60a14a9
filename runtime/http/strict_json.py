"""A request body becomes a Python object, or a refusal that says what is wrong with it."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from typing import Any

from ostinato.errors import InvalidRequest

MAX_KEYS = 4096  # of one object; no request needs more, and each unknown one costs memory when it is refused
MAX_DEPTH = 100  # of lists and objects; pydantic, through which requests reach the engine, reads about 200
_SHOWN = 20  # characters of a number that is refused
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in `body`.

    Stricter than `json.loads`: refused are NaN and Infinity, numbers that overflow to infinity, integers of
    more than 4300 digits, a key that comes twice in one object, bytes that are not UTF-8, half a surrogate
    pair in a string, more than 100 lists and objects in each other and anything but an object on top.  The
    content type of the request does not matter.
    """
    if not body.strip():
        raise InvalidRequest("the request body is empty; send a JSON object")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the request body is not UTF-8: byte {error.start} is {error.reason}") from None
    value = parse(text, "the request body")
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object; got {_kind(value)}")
    return value


def parse(text: str, what: str, *, param: str | None = None) -> object:
    """The JSON value in `text`, under the same rules; `what` and `param` name it in the refusal."""
    try:
        value: object = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite_float
        )
        if _SURROGATE_ESCAPE.search(text):  # a lone one is a str in Python and no text anywhere else
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InvalidRequest(_too_deep(what), param=param) from None
    except UnicodeEncodeError:
        raise InvalidRequest(f"{what} holds half a surrogate pair", param=param) from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise InvalidRequest(f"{what} is not valid JSON: {error.msg} at {where}", param=param) from None
    except _Refused as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}", param=param) from None
    except _TooLarge as error:
        start, rest = re.escape(error.digits[:_SHOWN]), max(0, len(error.digits) - _SHOWN)
        number = rf"{start}[\d.eE+-]{{{rest}}}"
        raise InvalidRequest(_too_large(text, what, number), param=param) from None
    except ValueError:  # the one that is left: an integer of more digits than the interpreter reads
        digits = rf"-?\d{{{sys.get_int_max_str_digits() + 1},}}+"
        raise InvalidRequest(_too_large(text, what, digits), param=param) from None
    if text.count("{") + text.count("[") > MAX_DEPTH and is_deep(value):
        raise InvalidRequest(_too_deep(what), param=param)
    return value


class _Refused(ValueError):
    """Said by a hook of ours."""


class _TooLarge(ValueError):
    """A number that no float can hold."""

    def __init__(self, digits: str) -> None:
        super().__init__()
        self.digits = digits


def is_deep(value: object) -> bool:
    """Whether more than `MAX_DEPTH` lists and objects are in each other."""
    level: list[Any] = [[value]]  # Any: JSON
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            for inner in (outer if isinstance(outer, list) else outer.values())
            if isinstance(inner, list | dict)
        ]
    return bool(level)


def _too_deep(what: str) -> str:
    return f"{what} is nested too deeply: at most {MAX_DEPTH} lists and objects in each other are read"


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(pairs) > MAX_KEYS:
        raise _Refused(f"an object has {len(pairs)} keys; at most {MAX_KEYS} are read")
    result = dict(pairs)
    if len(result) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _Refused(f"the key {twice[:80]!r} comes twice")
    return result


def _no_constant(name: str) -> object:
    raise _Refused(f"{name} is not a JSON number")


def _finite_float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise _TooLarge(digits)
    return value


def _too_large(text: str, what: str, number: str) -> str:
    """The refusal of the first `number` (a pattern) in `text`, with its place.

    One pass of the regex engine over all in front of it: strings, other numbers, and what is neither.
    """
    before = re.compile(
        rf'(?:[^"\d-]++|"(?:[^"\\]++|\\.)*+"|(?!{number}(?![\d.eE+-]))-?[\d.eE+-]++)*+([\d.eE+-]{{0,{_SHOWN}}})',
        re.DOTALL,
    )
    found = before.match(text)
    assert found is not None  # it matches the empty text too
    at = found.start(1)
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    return (
        f"{what} has a number at line {line} column {column} that is too large: it begins with {found[1]}; "
        f"at most {sys.get_int_max_str_digits()} digits and 1.8e308 can be read"
    )


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "an array"
    if isinstance(value, str):
        return "a string"
    return "null" if value is None else "a number or a boolean"

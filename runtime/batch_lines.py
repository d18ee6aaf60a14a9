"""Files of OpenAI's batch API: requests in, answers out, one JSON object a line."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from ostinato.errors import ConfigError, InvalidRequest
from ostinato.runtime.http.strict_json import parse_object

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/rerank",
    "/v1/responses",
    "/v1/score",
)
PASSING = frozenset({408, 429, 500, 502, 503, 504})  # worth another try, now or when a run is resumed
_NO_KEY = frozenset({401, 403})  # worth one when a run is resumed, with another key
_FIELDS = ("custom_id", "method", "url", "body")
_BEGIN = b'{"id"'  # of every line of an output file
_LONG = 120  # characters of what a message shows


class BatchLine(NamedTuple):
    """One request."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]  # Any: JSON


class BadLine(NamedTuple):
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    problem: str


def read_lines(path: Path) -> Iterator[BatchLine | BadLine]:
    """The lines of a batch file, empty ones left out. ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _read(number, raw)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def check_ids(path: Path) -> set[str]:
    """All `custom_id`s. ConfigError when one comes twice: its answers could not be told apart."""
    seen: dict[str, int] = {}
    for line in read_lines(path):
        if line.custom_id is None:
            continue
        if (first := seen.setdefault(line.custom_id, line.number)) != line.number:
            raise ConfigError(
                f"{path}: lines {first} and {line.number} have the same custom_id "
                f"{line.custom_id[:_LONG]!r}; give each its own"
            )
    return set(seen)


def resume(path: Path, known: Set[str]) -> set[str]:
    """The `custom_id`s that are answered in an output file; what is worth another try is taken out of it.

    A line that a crash cut short goes too.  ConfigError, and the file stays as it is, when it holds anything
    but answers to `known` requests, or cannot be read.
    """
    if not path.is_file():  # a device or a pipe has nothing to go on with
        return set()
    unfinished = path.with_name(f"{path.name}.resuming")
    try:
        with path.open("rb") as old, unfinished.open("wb") as new:
            done, dropped = _copy_answers(path, old, new, known)
        if dropped:
            os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return done


def _copy_answers(path: Path, old: BinaryIO, new: BinaryIO, known: Set[str]) -> tuple[set[str], int]:
    """What is answered, and how many lines were left out."""
    done: set[str] = set()
    dropped = 0
    for number, raw in enumerate(old, 1):
        if not _is_answer(raw):
            raise ConfigError(
                f"{path}: line {number} is no answer of a batch; give another output file, or remove this one"
            )
        custom_id = _answered(raw)
        if custom_id is None or custom_id in done:
            dropped += 1
            continue
        if custom_id not in known:
            raise ConfigError(
                f"{path}: has an answer to {custom_id[:_LONG]!r}, which the input does not ask; "
                "give another output file, or remove this one"
            )
        done.add(custom_id)
        new.write(raw)
    return done, dropped


def write_answer(out: TextIO, custom_id: str | None, status: int, request_id: str, body: object) -> None:
    """An HTTP answer, good or not. ConfigError when the file cannot take it."""
    answer = {"status_code": status, "request_id": request_id, "body": body}
    _write(out, custom_id, answer, None)


def write_error(out: TextIO, custom_id: str | None, code: str, message: str) -> None:
    """Why there is no answer."""
    _write(out, custom_id, None, {"code": code, "message": message})


def _write(out: TextIO, custom_id: str | None, response: object, error: object) -> None:
    record = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    if not _is_utf8(line):  # half a surrogate pair, which JSON can spell and UTF-8 cannot
        line = json.dumps(record, separators=(",", ":"))
    try:
        out.write(line + "\n")
        out.flush()
    except OSError as error:  # a full disk
        raise ConfigError(f"{out.name}: {error.strerror}") from None


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(number: int, raw: bytes) -> BatchLine | BadLine:
    try:
        fields = parse_object(raw)
    except InvalidRequest as error:
        return BadLine(number, None, f"line {number}: {error}".replace("the request body", "it"))
    given = fields.get("custom_id")
    custom_id = given if isinstance(given, str) and given else None
    problem = _problem(fields, custom_id)
    if problem is not None or custom_id is None:
        return BadLine(number, custom_id, f"line {number}: {problem}")
    body = fields["body"]
    assert isinstance(body, dict)  # `_problem` has looked
    return BatchLine(number, custom_id, str(fields["url"]), body)


def _problem(fields: dict[str, object], custom_id: str | None) -> str | None:
    for name in fields:
        if name not in _FIELDS:
            return f"{name[:_LONG]}: is not a known field; a line has {', '.join(_FIELDS)}"
    if custom_id is None:
        return "custom_id: must be a string that is not empty"
    if fields.get("method") != "POST":
        return f"method: must be POST; got {fields.get('method')!r:.{_LONG}}"
    if fields.get("url") not in ROUTES:
        return f"url: must be one of {', '.join(ROUTES)}; got {fields.get('url')!r:.{_LONG}}"
    body = fields.get("body")
    if not isinstance(body, dict):
        return "body: must be an object"
    for name in ("stream", "background"):
        if body.get(name):
            return f"body.{name}: has no place in a batch; leave it out"
    return None


def _is_answer(raw: bytes) -> bool:
    """Whether a line may be one of an output file. One without an end need only begin so."""
    if not raw.endswith(b"\n"):
        return _BEGIN.startswith(raw[: len(_BEGIN)])
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.keys() >= {"custom_id", "response"}


def _answered(raw: bytes) -> str | None:
    """Whose final answer a line of an output file is."""
    try:
        record = json.loads(raw)
        custom_id, status = record["custom_id"], record["response"]["status_code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not raw.endswith(b"\n") or not isinstance(custom_id, str) or not isinstance(status, int):
        return None
    if status in PASSING | _NO_KEY:
        return None
    return custom_id

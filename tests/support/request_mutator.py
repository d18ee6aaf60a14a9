"""Endless HTTP requests, legal and broken: bodies of every route, mutated at any level."""

from __future__ import annotations

import copy
import gzip
import json
import random
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from ostinato.runtime.http.api_schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from ostinato.runtime.http.messages_schema import CountRequest, MessagesRequest
from ostinato.runtime.http.responses_schema import InputTokensRequest, ResponsesRequest

Body = dict[str, Any]  # Any: JSON, and what breaks it

SCHEMAS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": InputTokensRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_TOOL: Body = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_SEEDS: dict[str, list[Body]] = {
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True, "n": 2},
        {
            "messages": [
                {"role": "system", "content": "a"},
                {"role": "user", "content": [{"type": "text", "text": "b"}]},
            ],
            "max_tokens": 2,
            "logprobs": True,
            "top_logprobs": 2,
            "stop": ["x"],
            "seed": 1,
            "temperature": 0,
        },
        {
            "messages": [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "3"},
            ],
            "max_tokens": 2,
            "tools": [_TOOL],
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 4,
            "response_format": {"type": "json_object"},
        },
    ],
    "/v1/completions": [
        {"prompt": "hello", "max_tokens": 3},
        {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}},
        {
            "prompt": [[5, 6], [7]],
            "max_tokens": 2,
            "logprobs": 2,
            "echo": True,
            "n": 2,
            "top_k": 3,
            "min_p": 0.1,
        },
        {
            "prompt": "a b c",
            "max_tokens": 5,
            "stop": ["a"],
            "logit_bias": {"7": 3},
            "repetition_penalty": 1.2,
        },
    ],
    "/v1/messages": [
        {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]},
        {
            "max_tokens": 3,
            "system": "s",
            "stream": True,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        },
    ],
    "/v1/messages/count_tokens": [{"messages": [{"role": "user", "content": "hello"}]}],
    "/v1/responses": [
        {"input": "hello", "max_output_tokens": 3},
        {
            "input": [{"role": "user", "content": "hello"}],
            "max_output_tokens": 3,
            "stream": True,
            "store": False,
        },
    ],
    "/v1/responses/input_tokens": [{"input": "hello", "instructions": "Be brief"}],
    "/tokenize": [
        {"prompt": "hello"},
        {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True},
    ],
    "/detokenize": [{"tokens": [5, 6, 7]}],
}
_NASTY: list[Any] = [  # Any: JSON
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    0.5,
    1.0,
    2.0,
    -0.0,
    1e-320,
    1e308,
    2**31,
    2**63,
    -(2**63),
    2**64,
    10**400,
    "",
    " ",
    "1",
    "null",
    "a" * 5000,
    "\x00",
    "\x7f\x1b[0m",
    "\ud800",
    "😀",
    "\u202e",
    "{{ 7*7 }}",
    "../../etc/passwd",
    "file:///etc/passwd",
    "http://127.0.0.1/",
    [],
    {},
    [[]],
    [{}],
    [None],
    ["a"] * 40,
    [1, "a"],
    {"a": 1},
    {"": ""},
    {"type": "text"},
    {"type": "json_schema"},
    float("nan"),
    float("inf"),
    [[[[[[]]]]]],
    ["", "a"],
    {"0": 1},
    {"-1": 1},
    {"99999999999": 1},
    "auto",
    "none",
    "user",
    "text",
    {"type": "function", "function": {"name": "f"}},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
    {"type": "object", "properties": {"a": 1}},
]
_PATHS = (
    "/",
    "//",
    "/v1",
    "/v1/models/../x",
    "/v1/models/%00",
    "/v1/models/" + "a" * 3000,
    "/v1/responses/resp_x",
    "/v1/chat/completions/",
    "/admin/sleep",
    "/admin/../admin/kv",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/health?x=%ff",
    "/metrics",
    "/config",
    "/version",
    "/v1/models",
    "*",
    "http://evil.example/v1/models",
    "/v1/models/é",
    "/openapi.json",
    "/docs",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/responses/x/cancel",
    "/static/../x",
)
_METHODS = (
    "GET",
    "HEAD",
    "PUT",
    "DELETE",
    "PATCH",
    "OPTIONS",
    "POST",
    "TRACE",
    "CONNECT",
    "FOO",
    "get",
    "P@ST",
)
_HEADERS = (
    "Content-Type: text/plain",
    "Content-Type: multipart/form-data",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Content-Encoding: bogus",
    "X-Request-Id: a b",
    "X-Request-Id: " + "x" * 200,
    "X-Request-Id: ok-1",
    "Authorization: Bearer",
    "Authorization: Bearer \xff",
    "X-Api-Key: z",
    "traceparent: 00-zz-1-1",
    "Range: bytes=0-1",
    "Origin: http://127.0.0.1",
    "Origin: null",
    "If-None-Match: *",
    "Connection: upgrade",
    "Upgrade: websocket",
    "Accept: application/x",
    "Cookie: a=b",
    "X-Forwarded-For: 1.2.3.4",
    "Host: evil",
    "Content-Type: a; charset=zzz",
    "Accept-Encoding: gzip, br",
    "TE: trailers",
    "anthropic-version: x",
    "Transfer-Encoding: gzip",
    "X: a\x00b",
    " x: y",
)
MAX_TOKENS = 8  # of an answer; more would test the model
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@dataclass
class FuzzRequest:
    """One request as bytes; `is_http` is false where the bytes may be no request at all."""

    raw: bytes
    what: str
    is_http: bool = True
    body: object = field(default=None, repr=False)


class RequestMutator:
    """Draws requests; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def next(self) -> FuzzRequest:
        """Half of them have a legal head and a mutated body; the rest is broken further."""
        draw = self._draw
        path = draw.choice([*SCHEMAS])
        body = copy.deepcopy(draw.choice(_SEEDS[path]))
        if draw.random() < 0.7:
            for _ in range(draw.choice((1, 1, 1, 2, 3))):
                self._mutate(path, body)
        for name in _LENGTHS:
            if isinstance(value := body.get(name), int) and value > MAX_TOKENS:
                body[name] = MAX_TOKENS
        if path in ("/v1/chat/completions", "/v1/responses") and not any(body.get(name) for name in _LENGTHS):
            body[_LENGTHS[path == "/v1/responses" and 2]] = MAX_TOKENS
        raw = self._encode(body)
        if draw.random() < 0.1:
            raw = self._bytes(raw)
        return self._request(path, raw, body)

    def _mutate(self, path: str, body: Body) -> None:
        draw = self._draw
        names = [*SCHEMAS[path].model_fields]
        kind = draw.random()
        if kind < 0.6:
            body[draw.choice(names)] = self._value()
        elif kind < 0.7:
            body.pop(draw.choice([*body]), None) if body else None
        elif kind < 0.75:
            body[draw.choice(("unknown", "max_token", "", "__class__", "é", "n" * 300))] = self._value()
        else:
            self._deep(body)

    def _deep(self, value: Any) -> None:
        """Change one place anywhere below."""
        draw = self._draw
        places: list[tuple[Any, Any]] = []
        stack = [value]
        while stack:
            at = stack.pop()
            keys = list(at) if isinstance(at, dict) else range(len(at))
            for key in keys:
                places.append((at, key))
                if isinstance(at[key], dict | list):
                    stack.append(at[key])
        if places:
            holder, key = draw.choice(places)
            old = holder[key]
            holder[key] = draw.choice((self._value(), [old], {"a": old}, str(old), [old, old]))

    def _value(self) -> Any:
        value = copy.deepcopy(self._draw.choice(_NASTY))
        return [value] if self._draw.random() < 0.1 else value

    def _encode(self, body: Body) -> bytes:
        text = json.dumps(body, ensure_ascii=self._draw.random() < 0.5)
        return text.encode("utf-8", "surrogatepass")

    def _bytes(self, raw: bytes) -> bytes:
        """Break the JSON text."""
        draw, made = self._draw, bytearray(raw)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(made) or 1)
            match draw.randrange(5):
                case 0:
                    made[at : at + 1] = bytes([draw.randrange(256)])
                case 1:
                    del made[at : at + draw.randrange(1, 20)]
                case 2:
                    made[at:at] = draw.choice(
                        (b"{", b"]", b'"', b"\\", b"\xff\xfe", b"\x00", b",", b"[" * 2000)
                    )
                case 3:
                    del made[at:]
                case _:
                    made += made[:at]
        return bytes(made)

    def _request(self, path: str, body: bytes, parsed: object) -> FuzzRequest:
        draw = self._draw
        method, headers, is_http = "POST", ["Host: x", "Content-Type: application/json"], True
        if draw.random() < 0.12:
            path = draw.choice(_PATHS)
        if draw.random() < 0.08:
            method = draw.choice(_METHODS)
        if draw.random() < 0.15:
            header = draw.choice(_HEADERS)
            headers.append(header)
            if header == "Content-Encoding: gzip" and draw.random() < 0.7:
                body = gzip.compress(body)
        framing, sent = [f"Content-Length: {len(body)}"], body
        if draw.random() < 0.1:
            framing, sent = ["Transfer-Encoding: chunked"], self._chunked(body)
        if draw.random() < 0.03:
            framing = draw.choice(
                (
                    ["Content-Length: -1"],
                    ["Content-Length: 1", "Content-Length: 2"],
                    ["Content-Length: 0x5"],
                    [*framing, "Transfer-Encoding: chunked"],
                    [],
                    ["Content-Length: 99999999999999999999"],
                )
            )
        version = (
            "HTTP/1.1" if draw.random() < 0.97 else draw.choice(("HTTP/1.0", "HTTP/2.0", "HTTP/9", "", "X"))
        )
        head = "\r\n".join([f"{method} {path} {version}", *headers, *framing]) + "\r\n\r\n"
        raw = head.encode("utf-8", "surrogateescape") + sent
        if draw.random() < 0.02:
            raw, is_http = self._bytes(raw), False
        return FuzzRequest(raw, f"{method} {path[:60]}", is_http, parsed)

    def _chunked(self, body: bytes) -> bytes:
        draw, pieces, at = self._draw, [], 0
        while at < len(body):
            size = draw.randrange(1, 400)
            part = body[at : at + size]
            pieces.append(b"%x\r\n%b\r\n" % (len(part), part))
            at += size
        end = (
            b"0\r\n\r\n"
            if draw.random() < 0.9
            else draw.choice((b"", b"zz\r\n", b"-1\r\n\r\n", b"0\r\nX: y\r\n\r\n"))
        )
        return b"".join(pieces) + end

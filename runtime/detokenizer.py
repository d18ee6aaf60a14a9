"""Token ids become text, one at a time, never in the middle of a character.

A `TokenCodec` knows the bytes of each token, read from the decoder section of tokenizer.json; text is then an
incremental UTF-8 decode, O(1) per token.  Byte-level BPE (GPT-2 alphabet) and sentencepiece-like decoders
(Replace, ByteFallback, Fuse, Strip, Metaspace) are read exactly; for any other decoder the tokenizer itself
decodes a short window of tokens.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Protocol

from tokenizers import Tokenizer

from ostinato.graph.tokenizer_files import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WINDOW = 8  # tokens of context for unknown decoders; theirs look back one or two


class Detokenizer(Protocol):
    """Text of one growing sequence."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """What `push` gives for these one after the other, as one text."""

    def finish(self) -> str:
        """U+FFFD when the sequence ended inside a character, as `Tokenizer.decode` gives; else empty."""


class TokenCodec:
    """What each token id stands for. Shared by all requests; no state per request."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # The decoder alone: the JSON of a whole tokenizer takes as long to write as the file to read.
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
        self._to_bytes, self._strip = _read_decoder(decoder)
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The token's share of the text, in the middle of a text. Empty for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        r"""A printable name: the token's text, or `bytes:\xf0\x9f` for a part of a character."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def special_ids_of(self, texts: Collection[str]) -> frozenset[int]:
        """Those special tokens that stand for one of `texts`."""
        return frozenset(i for i in self.special_ids if self.token_text(i) in texts)

    def detokenizer(
        self, *, skip_special: bool, at_start: bool = False, keep: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """`at_start`: the text begins here, so sentencepiece's first space goes; else it follows a prompt.

        Special tokens among `keep` are never skipped.
        """
        skip = self.special_ids - keep if skip_special else frozenset()
        if self._to_bytes is None:
            return _WindowDetokenizer(self._tokenizer, skip)
        return _ByteDetokenizer(self.token_bytes, skip, self._strip if at_start else 0)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """The text of a whole sequence."""
        detokenizer = self.detokenizer(skip_special=skip_special, at_start=True)
        return "".join([detokenizer.push(i) for i in token_ids]) + detokenizer.finish()

    def _bytes_of(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._to_bytes is None:
            return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self._to_bytes(token)


class _ByteDetokenizer:
    def __init__(self, token_bytes: Callable[[int], bytes], skip: frozenset[int], strip: int) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        text = self._utf8.decode(self._token_bytes(token_id))
        return self._stripped(text) if self._strip and text else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1 or self._strip:
            return "".join([self.push(token_id) for token_id in token_ids])
        known, skip = self._token_bytes, self._skip
        return self._utf8.decode(b"".join([known(one) for one in token_ids if one not in skip]))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


class _WindowDetokenizer:
    """For decoders that we cannot read: the difference between two decodes of the last few tokens."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._context: list[int] = []  # tokens whose text is out
        self._pending: list[int] = []  # tokens whose text is not

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._pending.append(token_id)
        text = self._fresh_text()
        # A broken character has at most 4 bytes; more pending tokens than that will not repair it.
        if text.endswith("�") and len(self._pending) < 4:
            return ""
        return self._release(text)

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join([self.push(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._release(self._fresh_text()) if self._pending else ""

    def _fresh_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        return self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]

    def _release(self, text: str) -> str:
        self._context = (self._context + self._pending)[-_WINDOW:]
        self._pending = []
        return text


def _read_decoder(decoder: dict[str, object] | None) -> tuple[Callable[[str], bytes] | None, int]:
    """(token -> its bytes, leading spaces to strip at the start); (None, 0) for an unknown decoder."""
    steps = _flat(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level, 0
    if not kinds or not set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return None, 0
    replaced: list[tuple[str, str]] = []
    strip = 0
    for step in steps:
        if step["type"] == "Replace":
            pattern = step["pattern"]
            if not isinstance(pattern, dict) or "String" not in pattern:
                return None, 0
            replaced.append((str(pattern["String"]), str(step["content"])))
        elif step["type"] == "Metaspace":
            replaced.append((str(step["replacement"]), " "))
            strip = 0 if step.get("prepend_scheme") == "never" else 1
        elif step["type"] == "Strip":
            # Before Fuse it would strip each token.
            if "Fuse" not in kinds[: kinds.index("Strip")] or step["content"] != " " or step["stop"] != 0:
                return None, 0
            strip = int(str(step["start"]))
    with_bytes = "ByteFallback" in kinds

    def to_bytes(token: str) -> bytes:
        if with_bytes and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes, strip


def _flat(decoder: dict[str, object] | None) -> list[dict[str, object]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    inner = decoder["decoders"]
    return [step for part in inner for step in _flat(part)] if isinstance(inner, list) else []


def _byte_level(token: str) -> bytes:
    """GPT-2's alphabet; a token with any other character (an added token) stands for itself."""
    alphabet = _alphabet()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()


@lru_cache(maxsize=1)
def _alphabet() -> dict[str, int]:
    """Character -> byte."""
    return {char: byte for byte, char in byte_alphabet().items()}

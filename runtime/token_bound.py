"""How many tokens a text has at least, told without the tokenizer.

A huge text costs seconds to tokenise only to be refused.  No token of a BPE tokenizer over bytes stands for
more bytes than the longest entry of its vocabulary has, so bytes / longest is a number of tokens that the
text has at least.  Where a tokenizer may drop or melt text (a normalizer that strips or lowercases, a
pre-tokenizer that removes, unknown characters) nothing is claimed and the text is tokenised.
"""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from ostinato.graph.tokenizer_files import byte_alphabet
from ostinato.runtime.prompt_room import room_left

_SHORT = 1 << 16  # characters; a text up to here is tokenised in some 20 ms and gets the exact number
# NFC makes text at most 3.5 times shorter (U+1FBE U+0308 U+0301, 7 bytes, is U+0390, 2 bytes; a test tries
# all of Unicode).
_NFC_SHRINKS = 4
_IN_UTF8 = frozenset(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
_KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split"})  # unless they "remove"


class _Rule(NamedTuple):
    longest: int  # most bytes of text in one token
    dropped: bytes  # those that no token stands for
    swallows_space: bool  # an added token takes any space beside it


class TokenBound:
    """How many tokens a text has at least, special tokens not counted."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def at_least(self, text: str) -> int:
        """Never more than what the tokenizer would give; 0 where that cannot be known."""
        rule = self._rule
        if rule is None:
            return 0
        if rule.swallows_space:
            text = "".join(text.split())
        kept = text.encode("utf-8", "replace").translate(None, rule.dropped)
        return -(-len(kept) // rule.longest)

    def check(self, text: str, window: int, *, param: str) -> None:
        """ContextTooLong for a text that certainly has too many tokens; a short one is left to be counted."""
        if len(text) > _SHORT:
            room_left(self.at_least(text), window, param=param, at_least=True)

    @cached_property
    def _rule(self) -> _Rule | None:
        spec: dict[str, Any] = json.loads(self._tokenizer.to_str())  # Any: a file format of many shapes
        model, added = spec["model"], spec["added_tokens"]
        steps = _steps(spec["pre_tokenizer"], "pretokenizers")
        if not all(step["type"] in _KEEPS_TEXT and step.get("behavior") != "Removed" for step in steps):
            return None
        is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        shrinks, dropped = _shrinks(spec["normalizer"]), _dropped(model, is_byte_level)
        if shrinks is None or dropped is None or (dropped and spec["normalizer"]):
            return None
        longest = max(
            # a character of byte-level BPE is a byte; elsewhere a replacement such as "▁" is no shorter than
            # the text that it replaces
            max(len(token) if is_byte_level else len(token.encode()) for token in model["vocab"]),
            max((len(token["content"].encode()) for token in added), default=1),
        )
        return _Rule(longest * shrinks, dropped, any(one["lstrip"] or one["rstrip"] for one in added))


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """By what factor a normalizer may make text shorter, at most; None: unknown."""
    factor = 1
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "Prepend"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                if len(new.encode()) < len(old.encode()):
                    return None
            case {"type": "NFC"}:
                factor *= _NFC_SHRINKS
            case _:
                return None
    return factor


def _dropped(model: dict[str, Any], is_byte_level: bool) -> bytes | None:
    """Bytes of UTF-8 that a BPE model has no token for; None: the model may drop or melt anything."""
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if is_byte_level:
        alphabet = byte_alphabet()
        return bytes(byte for byte in sorted(_IN_UTF8) if alphabet[byte] not in model["vocab"])
    is_whole = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in model["vocab"] for byte in _IN_UTF8)
    return b"" if is_whole else None


def _steps(part: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the flat list of what it does."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for inner in part[parts] for step in _steps(inner, parts)]

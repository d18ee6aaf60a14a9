"""What is said of a word that nobody knows: the known one that is near."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_LONGEST = 64  # characters; what clients send may have megabytes, and is near to nothing


def near_word(word: object, known: Collection[str], *, likeness: float, lead: str) -> str:
    """`lead` and `did you mean 'user'?`, or nothing. `likeness`: difflib's ratio at which one is near."""
    if not isinstance(word, str) or len(word) > _LONGEST:
        return ""
    near = difflib.get_close_matches(word, known, 1, likeness)
    return f"{lead}did you mean {near[0]!r}?" if near else ""

"""How facts_chat.yaml is scored."""

from __future__ import annotations

from typing import Any


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the right word is in the answer."""
    return {"acc": float(doc["choices"][doc["answer"]].lower() in results[0].lower())}

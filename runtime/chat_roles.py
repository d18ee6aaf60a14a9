"""Who may speak in a conversation: one rule for requests over HTTP and for `LLM.chat`."""

from __future__ import annotations

from typing import Literal, get_args

from ostinato.runtime.near_word import near_word

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


def role_fault(role: object) -> str | None:
    """What is wrong with a message's role, without the place and what was got; None: nothing."""
    if role in ROLES:
        return None
    return f"must be one of {', '.join(ROLES)}{near_word(role, ROLES, likeness=0.6, lead=', ')}"

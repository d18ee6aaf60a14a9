"""Who may speak in a conversation: one rule for requests over HTTP and for `LLM.chat`."""

from __future__ import annotations

import difflib

ROLES = ("system", "developer", "user", "assistant", "tool")
_LONGEST = 32  # characters of a word that is compared with the roles


def role_fault(role: object) -> str | None:
    """What is wrong with a message's role, without the place and what was got; None: nothing."""
    if role in ROLES:
        return None
    near = (
        difflib.get_close_matches(role, ROLES, 1, 0.6)
        if isinstance(role, str) and len(role) <= _LONGEST
        else []
    )
    meant = "".join(f", did you mean {one!r}?" for one in near)
    return f"must be one of {', '.join(ROLES)}{meant}"

"""What stands around a call or an answer of gpt-oss: thoughts are messages, and so is what follows them.

<|channel|>analysis<|message|>thoughts<|end|><|start|>assistant    any number of times, then
<|channel|>final<|message|>answer                                  or a call, which ends it too
"""

from __future__ import annotations

from ostinato.runtime.grammar.lark_text import TokenId, sequence, text
from ostinato.runtime.output.harmony_format import FINAL, THOUGHTS, THOUGHTS_END


def harmony_rules(token_id: TokenId | None, *, call: bool = False, content: str | None = None) -> list[str]:
    """Rules from `start` on: thoughts, then a call (the caller's rule `call`) or an answer of `content`."""
    last = [*(["call"] if call else []), *(["answer"] if content is not None else [])]
    answer = [] if content is None else [f"answer: {sequence(text(FINAL, token_id), content)}"]
    thought = sequence(text(THOUGHTS, token_id), "TEXT", text(THOUGHTS_END, token_id))
    return [f"start: thought* ({' | '.join(last)})", *answer, f"thought: {thought}", r"TEXT: /(.|\n)*/"]


def harmony_answer(content: str, token_id: TokenId | None) -> str:
    """A whole grammar: thoughts, then an answer of `content`, which is a part of a rule."""
    return "\n".join([*harmony_rules(token_id, content=content), ""])

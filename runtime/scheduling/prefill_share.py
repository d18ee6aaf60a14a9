"""How the prefills of a step share its tokens.

Of R tokens up to half goes to prompts shorter than the rest of the first-ranked one, shortest first; all else
goes by rank. So
    - the first-ranked prefill is fed at least R/2 tokens in every step: nobody starves within a priority;
    - the shortest prompt, s tokens, has its first token at most ceil(s / floor(R/2)) steps after admission.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from ostinato.runtime.scheduling.sequence import Phase, Sequence
from ostinato.runtime.scheduling.slots import Slots


def share_tokens(
    slots: Slots, prefills: Tokens[Sequence], budget: int, step: int, *, block_tokens: int
) -> dict[Sequence, int]:
    """Split `budget` tokens between prefills (given by rank) and take the blocks for them.

    One that gets none is not in the result: it may have been preempted for a better one.
    """
    granted: dict[Sequence, int] = {}

    def grant(sequence: Sequence, most: int) -> int:
        if sequence.phase is not Phase.RUNNING or most < 1:
            return 0
        had = granted.get(sequence, 0)
        if not had:
            slots.reuse_prefix(sequence)
        reserve = 0  # what better-ranked prefills still lack
        for other in prefills:
            if other is sequence:
                break
            if other.phase is Phase.RUNNING:
                reserve += other.lacking_blocks(block_tokens)
        got = slots.secure(sequence, min(sequence.todo, had + most), reserve)
        if got > had:
            granted[sequence] = got
            sequence.last_step = step
        return got - had

    if len(prefills) > 1 and sum(sequence.todo for sequence in prefills) > budget:
        first, half = prefills[0], budget // 2
        shorter = [s for s in prefills if s.todo < first.todo and s.priority == first.priority]
        for sequence in sorted(shorter, key=lambda s: (s.todo, s.rank)):
            given = grant(sequence, half)
            half -= given
            budget -= given
    for sequence in prefills:
        budget -= grant(sequence, budget)
    return granted

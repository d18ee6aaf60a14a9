"""How the prefills of a step share its tokens.

Of R tokens up to half goes to prompts shorter than the rest of the first-ranked one, shortest first; all else
goes by rank. So
    - the first-ranked prefill is fed at least R/2 tokens in every step: nobody starves within a priority;
    - the shortest prompt, s tokens, has its first token at most ceil(s / floor(R/2)) steps after admission.

Prompts whose log-probabilities are asked for have a row of logits for every token: 1 GiB for 4096 tokens and
128 Ki ids, which a device that is full of KV has not. They share SCORED_ROWS of a step in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from ostinato.runtime.scheduling.sequence import Phase, Sequence
from ostinato.runtime.scheduling.slots import Slots

SCORED_ROWS = 512


def share_tokens(
    slots: Slots, prefills: Tokens[Sequence], budget: int, step: int, *, block_tokens: int
) -> dict[Sequence, int]:
    """Split `budget` tokens between prefills (given by rank) and take the blocks for them.

    One that gets none is not in the result: it may have been preempted for a better one.
    """
    granted: dict[Sequence, int] = {}
    scored_rows = SCORED_ROWS

    def grant(sequence: Sequence, most: int, kept_rows: int = 0) -> int:
        nonlocal scored_rows
        is_scored = sequence.needs_prompt_rows
        if is_scored:
            most = min(most, scored_rows - kept_rows)
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
        if is_scored:
            scored_rows -= got - had
        return got - had

    wanted = sum(sequence.todo for sequence in prefills)
    wanted_rows = sum(sequence.todo for sequence in prefills if sequence.needs_prompt_rows)
    if len(prefills) > 1 and (wanted > budget or wanted_rows > SCORED_ROWS):
        first, half = prefills[0], budget // 2
        shorter = [s for s in prefills if s.todo < first.todo and s.priority == first.priority]
        for sequence in sorted(shorter, key=lambda s: (s.todo, s.rank)):
            given = grant(sequence, half, SCORED_ROWS // 2)
            half -= given
            budget -= given
    for sequence in prefills:
        budget -= grant(sequence, budget)
    return granted

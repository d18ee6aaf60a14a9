"""One answer's thoughts: how many tokens of the budget are left, and which token must come next.

Marks are looked for in the text of the tokens, so a mark may be one token, several, or share tokens with what
stands around it; `OutputParser` finds the same blocks. Rules:
    - every token behind a start counts, up to the one that completes an end: `</` and `think` of an end in
      three tokens do. The budget is that of the whole answer, whatever the number of blocks;
    - when it is spent inside a block, the closing is forced, token by token. If the model has begun to say
      it, or to end its thoughts in other words, what is there already is not said again;
    - a block that begins when nothing is left is closed at once. Where thoughts may begin anywhere, tokens
      that are, or hold, a whole start are barred instead.

On a device that is one step behind, the host knows all tokens but the newest. `knows_next` says whether the
token behind that one can be decided all the same. It can, except
    - for the last token of the budget, and
    - with an empty budget, where the newest token may be a start: in front of the answer, or inside a mark.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from ostinato.runtime.messages import ThoughtBlock, Thoughts
from ostinato.runtime.output.text_reader import SPACE

_SPACE = SPACE.encode()


def _finder(marks: tuple[bytes, ...]) -> Callable[[bytes], re.Match[bytes] | None]:
    return re.compile(b"|".join(map(re.escape, marks))).search


class ThinkingState:
    """Follows the tokens of one answer."""

    def __init__(self, thoughts: Thoughts, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: a token's share of the text."""
        self.left = thoughts.budget
        self.taken = 0  # tokens of the answer so far
        self.is_over = False  # nothing that may still come is a thought
        self._token_bytes = token_bytes
        self._blocks = {block.start.encode(): block for block in thoughts.blocks}
        self._starts = tuple(self._blocks)
        self._ends = tuple(end.encode() for end in thoughts.ends)
        self._find_start, self._find_end = _finder(self._starts), _finder(self._ends)
        self._anywhere = thoughts.anywhere
        self._kept = max(map(len, (*self._starts, *self._ends))) - 1  # bytes of an unfinished mark
        self._open: ThoughtBlock | None = None
        self._num_blocks = 0
        self._at = -1  # place in the closing that is being forced; -1: none is
        self._text = b""  # the newest bytes, in which a mark may have begun
        self._recent: deque[int] = deque(maxlen=max(len(block.closing) for block in thoughts.blocks))
        if thoughts.begun is not None:
            self._begin(thoughts.blocks[thoughts.begun])

    @property
    def knows_next(self) -> bool:
        """Whether the token behind the next one can be decided before the next one is known."""
        if self.is_over or self._at >= 0:
            return True
        if self._open is not None:
            return self.left > 1
        return self.left > 0 or (self._anywhere and not self._may_be_in_start())

    def forced(self, ahead: int = 0) -> int | None:
        """The token that must come next, or `ahead` tokens further; None: the model's choice."""
        if self._open is None or self._at < 0:
            return None
        at, closing = self._at + ahead, self._open.closing
        return closing[at] if at < len(closing) else None

    def is_barred(self, ahead: int = 0) -> bool:
        """Whether that token may not hold a start."""
        if not self._anywhere or self.left > 0:
            return False
        return self._open is None or (self._at >= 0 and self.forced(ahead) is None)

    def take(self, token: int) -> None:
        """The answer goes on with `token`."""
        self.taken += 1
        if self.is_over:
            return
        if self._open is not None and self._at >= 0:
            self._at += 1
            if self._at == len(self._open.closing):
                self._open, self._at = None, -1
            return
        text = self._text + self._token_bytes(token)
        rest: bytes | None = text
        if self._open is not None:
            rest = self._behind_end(text)
            if rest is None:
                self.left -= 1
                self._recent.append(token)
                if self.left == 0:
                    self._close()
        while rest is not None and (rest := self._behind_start(rest)) is not None and self._at < 0:
            rest = self._behind_end(rest)

    def _begin(self, block: ThoughtBlock) -> None:
        self._open = block
        self._num_blocks += 1
        self._text = b""
        self._recent.clear()
        if self.left == 0:
            self._close()

    def _close(self) -> None:
        """Force the closing from here on: all of it, or what is missing."""
        assert self._open is not None, "only what is open is closed"
        closing, mark = self._open.closing, self._open.mark
        recent, self._text = list(self._recent), b""
        for first in (mark, 0):  # an end without the words in front of it, then the words
            for at in range(len(closing) - 1, first, -1):
                if recent[first - at :] == list(closing[first:at]):
                    self._at = at
                    return
        self._at = 0

    def _behind_end(self, text: bytes) -> bytes | None:
        """What stands behind the end of the open block; None: it goes on."""
        found = self._find_end(text)
        if found is None:
            self._text = text[-self._kept :] if self._kept else b""
            return None
        self._open, self._text = None, b""
        # the end may be the beginning of the next block
        is_start = any(start.startswith(found.group()) for start in self._starts)
        return text[found.start() if is_start else found.end() :]

    def _behind_start(self, text: bytes) -> bytes | None:
        """What stands behind the start of a block, which is open then; None: there is none yet."""
        if not self._anywhere:
            return self._behind_start_in_front(text)
        found = self._find_start(text)
        if found is None:
            self._text = text[-self._kept :] if self._kept else b""
            return None
        self._begin(self._blocks[found.group()])
        return text[found.end() :]

    def _behind_start_in_front(self, text: bytes) -> bytes | None:
        """Thoughts begin in front of all other text; an end without a start is not text."""
        text = text.lstrip(_SPACE)
        strays = self._ends if not self._num_blocks else ()
        while stray := next((end for end in strays if text.startswith(end)), None):
            text = text[len(stray) :].lstrip(_SPACE)
        for start, block in self._blocks.items():
            if text.startswith(start):
                self._begin(block)
                return text[len(start) :]
        self._text = text
        self.is_over = not any(mark.startswith(text) for mark in (*self._starts, *strays))
        return None

    def _may_be_in_start(self) -> bool:
        return any(
            self._text.endswith(start[:length]) for start in self._starts for length in range(1, len(start))
        )

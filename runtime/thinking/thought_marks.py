"""How the model of a server marks its thoughts, in its own tokens, for requests with a thinking budget.

The marks are those of the reasoning format. `server.reasoning_start_str` and `server.reasoning_end_str` take
their place: a text that begins thoughts, and one with which they are ended, for example a sentence that
leads over to the answer, with the end mark behind it.
"""

from __future__ import annotations

from typing import NamedTuple

from ostinato.errors import ConfigError, InvalidRequest
from ostinato.runtime.messages import SamplingParams, ThoughtBlock, Thoughts
from ostinato.runtime.output.registry import OutputFormats
from ostinato.runtime.text import TextFrontEnd

PARAM = "thinking_token_budget"
_START, _END = "server.reasoning_start_str", "server.reasoning_end_str"


class ThoughtMarks(NamedTuple):
    """What a request with a budget is given."""

    blocks: tuple[ThoughtBlock, ...]
    ends: tuple[str, ...]
    breaks: tuple[str, ...]  # end thoughts, too, where calls are wanted
    anywhere: bool

    def begun_in(self, text: str) -> int | None:
        """The block in which a text ends, if it ends in one."""
        starts = [(text.rfind(block.start), at) for at, block in enumerate(self.blocks)]
        where, at = max(starts)
        return at if where >= 0 and where >= max(text.rfind(end) for end in self.ends) else None

    def block_of(self, start: str) -> int | None:
        """The block that a marker begins, as the reasoning format says it; None for an empty one."""
        if not start:
            return None
        same = (at for at, block in enumerate(self.blocks) if start in block.start or block.start in start)
        return next(same, 0)


def thought_marks(
    formats: OutputFormats, text: TextFrontEnd, *, start: str = "", end: str = ""
) -> ThoughtMarks | None:
    """The marks of a model; None: it is not known how it thinks, or its tokenizer cannot say it.

    ConfigError for settings (`start`, `end`) that cannot be used.
    """
    reasoning = formats.reasoning
    spans = reasoning.spans if reasoning is not None else ()
    if reasoning is None or not spans:
        for setting, value in ((_START, start), (_END, end)):
            if value:
                raise ConfigError(
                    f"{setting}={value!r:.60}: the reasoning format of this model has no such marks; set "
                    "server.reasoning_parser, or leave it empty"
                )
        return None
    if start:
        owner = next((close for begin, close in spans if begin in start or start in begin), None)
        if owner is None or not start.strip():
            known = " or ".join(repr(begin) for begin, _ in spans)
            raise ConfigError(f"{_START}={start!r:.60}: must hold {known}, as the reasoning format reads it")
        spans = ((start, owner),)
    if end and not any(end.endswith(close) for _, close in spans):
        known = " or ".join(repr(close) for close in dict.fromkeys(close for _, close in spans))
        raise ConfigError(f"{_END}={end!r:.100}: must close with {known}, where thoughts end")
    blocks = []
    for begin, close in spans:
        mark = close if not end or end.endswith(close) else next(one for _, one in spans if end.endswith(one))
        words = end.removesuffix(mark)
        if any(one in words for one in reasoning.span_ends):
            raise ConfigError(f"{_END}={end!r:.100}: thoughts end in the middle of it; say the end mark once")
        said, marked = _ids(text, words), _ids(text, mark)
        if said is None or not marked:
            if end:
                raise ConfigError(f"{_END}={end!r:.100}: this model's tokenizer has no tokens that say this")
            return None
        if start and not _ids(text, begin):
            raise ConfigError(f"{_START}={start!r:.60}: this model's tokenizer has no tokens that say this")
        blocks.append(ThoughtBlock(start=begin, closing=(*said, *marked), mark=len(said)))
    tools = formats.tools
    return ThoughtMarks(
        tuple(blocks),
        reasoning.span_ends,
        tools.starts if tools is not None and tools.is_special else (),
        reasoning.is_special,
    )


def with_thoughts(
    sampling: SamplingParams,
    marks: ThoughtMarks | None,
    *,
    begun: int | None,
    calls: bool = False,
) -> SamplingParams:
    """The same parameters with `thoughts`, if they have a budget. `calls`: the answer may call tools.

    InvalidRequest: the model does not think, as far as is known.
    """
    if sampling.thinking_token_budget is None:
        return sampling
    if marks is None:
        raise InvalidRequest(
            f"{PARAM}: it is not known how this model marks its thoughts; leave it out, or set "
            "server.reasoning_parser",
            param=PARAM,
        )
    thoughts = Thoughts(
        budget=sampling.thinking_token_budget,
        blocks=marks.blocks,
        ends=(*marks.ends, *(marks.breaks if calls else ())),
        anywhere=marks.anywhere,
        begun=begun,
    )
    return sampling.model_copy(update={"thoughts": thoughts})


def _ids(text: TextFrontEnd, said: str) -> tuple[int, ...] | None:
    """The tokens of a text; None if they do not say it."""
    try:
        said.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from a shell
        return None
    ids = text.encode(said, add_special_tokens=False)
    spelt = b"".join([text.codec.token_bytes(token) for token in ids]).decode("utf-8", "replace")
    return tuple(ids) if spelt.removeprefix(" ") == said.removeprefix(" ") else None

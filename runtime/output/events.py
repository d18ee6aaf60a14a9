"""What the text of a model says, in the order in which it says it.

The same text gives the same events however it was cut, once neighbours of one kind are joined (`join`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Content(NamedTuple):
    """Text of the answer."""

    text: str


class Reasoning(NamedTuple):
    """Thoughts, without their markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of one answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments. All pieces joined are the JSON text of an object, if the call is whole."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, or `whole` is false: the text ended, or broke its format, inside it."""

    index: int
    whole: bool = True


Event = Content | Reasoning | CallStart | CallArguments | CallEnd


def join(events: Iterable[Event]) -> list[Event]:
    """The events with neighbouring pieces of one kind made one."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + event.text)
        elif (
            isinstance(event, CallArguments)
            and isinstance(last, CallArguments)
            and (event.index == last.index)
        ):
            joined[-1] = CallArguments(last.index, last.text + event.text)
        else:
            joined.append(event)
    return joined

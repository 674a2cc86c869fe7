"""The canonical events of an answer, which every dialect writes in its own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncengine.outputs import Chunk, FinishReason, LogprobEntry, Usage


@dataclass(slots=True)
class Event:
    """A piece of one sample of an answer."""

    index: int
    """Number of the sample; 0 unless several were asked for."""


@dataclass(slots=True)
class Piece(Event):
    """Text of either kind. `logprobs` and `token_ids` are those of the whole delivery, thoughts and calls included."""

    text: str
    logprobs: Sequence[LogprobEntry] = ()
    token_ids: Sequence[int] = ()


class Text(Piece):
    """Text of the answer."""


class Thinking(Piece):
    """Text of the reasoning before an answer."""


@dataclass(slots=True)
class CallBegin(Event):
    """A call of a tool begins."""

    call: int
    """Number of the call within its sample."""
    id: str
    name: str


@dataclass(slots=True)
class CallArguments(Event):
    """The next piece of a call's arguments, which are JSON text."""

    call: int
    text: str


@dataclass(slots=True)
class CallEnd(Event):
    """A call is complete, or was cut off."""

    call: int


@dataclass(slots=True)
class End(Event):
    """The last event of a sample."""

    reason: FinishReason
    stop: str | None = None
    """The stop string that ended the text."""


class EventReader:
    """Makes events of the chunks of one stream."""

    def __init__(self, token_ids: bool = False) -> None:
        """`token_ids`: make events of tokens without a text, too, such as the first bytes of a letter."""
        self._token_ids = token_ids
        self._open: dict[int, int] = {}
        """The call that each sample is writing."""

    def read(self, chunk: Chunk) -> list[Event]:
        """Events of a chunk, in the order in which a model writes: thoughts, text, calls, the end."""
        index, events = chunk.index, list[Event]()
        logprobs: Sequence[LogprobEntry] = chunk.logprobs or ()
        token_ids: Sequence[int] = chunk.token_ids
        if chunk.reasoning:
            events.append(Thinking(index, chunk.reasoning, logprobs, token_ids))
            logprobs = token_ids = ()
        if chunk.text or logprobs or (token_ids and self._token_ids):
            events.append(Text(index, chunk.text, logprobs, token_ids))
        for delta in chunk.tool_calls or ():
            if delta.id is not None:
                self._close(index, events)
                self._open[index] = delta.index
                events.append(CallBegin(index, delta.index, delta.id, delta.name or ""))
            if delta.arguments:
                events.append(CallArguments(index, delta.index, delta.arguments))
        if chunk.finish_reason is not None:
            self._close(index, events)
            events.append(End(index, chunk.finish_reason, chunk.stop))
        return events

    def _close(self, index: int, events: list[Event]) -> None:
        if (call := self._open.pop(index, None)) is not None:
            events.append(CallEnd(index, call))


NO_USAGE = Usage(0, 0)

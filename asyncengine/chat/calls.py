"""The calls of one output as they are read, and what one push of text brings."""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass, field
from typing import Protocol

from asyncengine.outputs import ToolCall, ToolCallDelta

ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(slots=True)
class Parsed:
    """The result of one push. The pieces put together are the whole."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list)
    complete: bool = False


class Parser(Protocol):
    """Takes one output apart while it is written: `push` its text as it comes, then `finish` once."""

    @property
    def in_reasoning(self) -> bool: ...

    def push(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed: ...

    def finished_calls(self) -> list[ToolCall]: ...

    def broken_calls(self) -> list[ToolCall]: ...


class Calls:
    """The calls of one output. `short_ids`: nine letters and digits, which the Mistral templates insist on."""

    def __init__(self, short_ids: bool) -> None:
        self._short_ids = short_ids
        self._calls: list[_Call] = []

    def begin(self, name: str, out: Parsed, written: str = "") -> None:
        """A call of `name`, with the id `written` by the model unless that has been used, or a new one."""
        if written and all(call.id != written for call in self._calls):
            identity = written
        elif self._short_ids:
            identity = "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        else:
            identity = f"call_{secrets.token_hex(12)}"
        self._calls.append(_Call(identity, name))
        out.tool_calls.append(ToolCallDelta(len(self._calls) - 1, identity, name, ""))

    def extend(self, piece: str, out: Parsed) -> None:
        """The next piece of the newest call's arguments."""
        self._calls[-1].pieces.append(piece)
        out.tool_calls.append(ToolCallDelta(len(self._calls) - 1, None, None, piece))

    def close(self) -> None:
        """The newest call has all its arguments; it counts as complete if they are a JSON object."""
        call = self._calls[-1]
        try:
            call.complete = isinstance(json.loads("".join(call.pieces)), dict)
        except (ValueError, RecursionError):
            call.complete = False

    def taken(self, complete: bool) -> list[ToolCall]:
        """The complete calls in order, or the others."""
        found = [call for call in self._calls if call.complete is complete]
        return [ToolCall(call.id, call.name, "".join(call.pieces)) for call in found]

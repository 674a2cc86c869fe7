"""Tool calls of one output as they are parsed, the result of one push of text, and the base of both output parsers."""

from __future__ import annotations

import contextlib
import json
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from asyncengine.grammar.chat.readers import JsonReader, Reader
from asyncengine.outputs import Chunk, ToolCall, ToolCallDelta

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
    steered_from: int | None = None


class Parser(ABC):
    """Parses one output while it is generated: `push` its text as it comes, then `finish` once.

    One thread at a time. A state machine, whose state `_step` is a method: it takes text that it can classify from the
    buffer and returns whether the next step can go on at once.
    """

    def __init__(self, first: Callable[[], bool], short_ids: bool = False) -> None:
        """`first`: the step to begin with. `short_ids`: calls get nine letters and digits, which the Mistral templates
        insist on."""
        self._buffer = ""
        self._out = Parsed()
        self._short_ids = short_ids
        self._calls: list[_Call] = []
        self._sealed = False
        self._steered: int | None = None
        """The `steered_from` of calls that begin from now on."""
        self._reader: Reader = JsonReader()
        """Reads the arguments of the newest call."""
        self._step = first

    @property
    @abstractmethod
    def in_reasoning(self) -> bool:
        """The text pushed last ended inside the reasoning."""

    def push(self, text: str) -> Parsed:
        """The next piece of the output; may be empty."""
        self._buffer += text
        while self._step():
            pass
        return self._taken()

    def finish(self) -> Parsed:
        """The end of the output. Text that was held back is returned."""
        rest, self._buffer = self._buffer, ""
        if self.in_reasoning:
            self._out.reasoning += rest
        else:
            self._end(rest)
        self._step = lambda: False
        return self._taken()

    def steer(self, offers: bool) -> None:
        """Text pushed from now on is the engine's and not the model's. Unless it `offers` calls all the same, the
        newest call stays as it is, and none begins."""
        self._sealed, self._steered = not offers, 0
        if self._calls and not self._calls[-1].complete:
            self._calls[-1].steered_from = sum(map(len, self._calls[-1].pieces))

    @abstractmethod
    def _end(self, rest: str) -> None:
        """Take the text that is held back, outside of the reasoning, at the end of the output."""

    def _begin_call(self, name: str, written: str = "") -> None:
        """Begin a call of `name`, with the id `written` by the model, or a new one if that is empty or used."""
        if self._sealed:
            return
        if written and all(call.id != written for call in self._calls):
            call_id = written
        elif self._short_ids:
            call_id = "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
        else:
            call_id = f"call_{secrets.token_hex(12)}"
        self._calls.append(_Call(call_id, name, steered_from=self._steered))
        self._out.tool_calls.append(ToolCallDelta(len(self._calls) - 1, call_id, name, ""))

    def _arguments(self) -> bool:
        """Read arguments of the newest call, which is complete once they are a JSON object, and never if they break."""
        if not self._buffer:
            return False
        read = self._reader.feed(self._buffer)
        self._buffer = self._buffer[read.size :]
        if read.piece and not self._sealed:
            self._calls[-1].pieces.append(read.piece)
            self._out.tool_calls.append(ToolCallDelta(len(self._calls) - 1, None, None, read.piece))
        if read.state == "done" and not self._sealed:
            with contextlib.suppress(ValueError, RecursionError):
                self._calls[-1].complete = isinstance(json.loads("".join(self._calls[-1].pieces)), dict)
        if read.state != "open":
            self._after_arguments(read.state == "done")
        return read.state != "open"

    @abstractmethod
    def _after_arguments(self, done: bool) -> None:
        """Set the step behind the arguments of a call, or behind an error in them if they are not `done`."""

    def finished_calls(self, complete: bool = True) -> list[ToolCall]:
        """The calls whose arguments are complete JSON objects, in order; if not `complete`, those that went out in
        deltas but were cut off, or whose arguments are no JSON (unconstrained output)."""
        calls = [call for call in self._calls if call.complete is complete]
        return [ToolCall(call.id, call.name, "".join(call.pieces), call.steered_from) for call in calls]

    def _taken(self) -> Parsed:
        out, self._out = self._out, Parsed()
        return out


class ChatReader:
    """One parser for each sample. Belongs to the request's consumer."""

    def __init__(self, make_parser: Callable[[], Parser], n: int, offers: bool = False) -> None:
        """`offers`: calls that the engine closed count as the model's own."""
        self._parsers = [make_parser() for _ in range(n)]
        self._offers = offers
        self.reasoning_tokens = 0
        self.thinking = set(range(n))
        """Samples whose answer has not begun."""

    def read(self, chunk: Chunk) -> None:
        """Split `chunk.text` into its fields, in place. The last chunk of a sample gets the text that was held back."""
        parser = self._parsers[chunk.index]
        parsed = [parser.push(chunk.text[: chunk.steered_from])]
        if (steered_from := chunk.steered_from) is not None:
            chunk.steered_from = len(parsed[0].text)
            parser.steer(self._offers)
            parsed.append(parser.push(chunk.text[steered_from:]))
        thinks = parser.in_reasoning
        if chunk.finish_reason is not None:
            parsed.append(parser.finish())
        chunk.text = "".join(piece.text for piece in parsed)
        chunk.reasoning = "".join(piece.reasoning for piece in parsed)
        deltas = [delta for piece in parsed for delta in piece.tool_calls]
        chunk.tool_calls = deltas or None
        if thinks and (chunk.reasoning or chunk.finish_reason is None):
            self.reasoning_tokens += len(chunk.token_ids)
        elif chunk.reasoning and not (chunk.text or deltas):
            self.reasoning_tokens += len(chunk.token_ids) - 1  # the last one of the mark that ends the thoughts
        elif chunk.text or deltas:
            self.thinking.discard(chunk.index)
        if chunk.finish_reason == "stop" and parser.finished_calls():
            chunk.finish_reason = "tool_calls"

    def calls(self, index: int, broken: bool = False) -> list[ToolCall]:
        """The finished calls of sample `index`; if `broken`, those that went out in pieces and were never finished."""
        return self._parsers[index].finished_calls(complete=not broken)

"""Reads the chunks of a chat's samples: what was text becomes answer, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable

from asyncengine.chat.calls import Parser
from asyncengine.outputs import Chunk, ToolCall


class ChatReader:
    """One parser for each sample. Belongs to the request's consumer."""

    def __init__(self, make_parser: Callable[[], Parser], n: int, offers: bool = False) -> None:
        """`offers`: calls that the engine closed count as the model's own."""
        self._parsers = [make_parser() for _ in range(n)]
        self._offers = offers
        self.reasoning_tokens = 0

    def read(self, chunk: Chunk) -> None:
        """Take `chunk.text` apart, in place. The last chunk of a sample gets what was held back."""
        parser = self._parsers[chunk.index]
        parsed = [parser.push(chunk.text[: chunk.steered_from])]
        if (own := chunk.steered_from) is not None:
            chunk.steered_from = len(parsed[0].text)
            parser.steer(self._offers)
            parsed.append(parser.push(chunk.text[own:]))
        if chunk.finish_reason is not None:
            parsed.append(parser.finish())
        chunk.text = "".join(part.text for part in parsed)
        chunk.reasoning = "".join(part.reasoning for part in parsed)
        deltas = [delta for part in parsed for delta in part.tool_calls]
        chunk.tool_calls = deltas or None
        if parser.in_reasoning or (chunk.reasoning and not chunk.text and not deltas):
            self.reasoning_tokens += len(chunk.token_ids)
        if chunk.finish_reason == "stop" and parser.finished_calls():
            chunk.finish_reason = "tool_calls"

    def calls(self, index: int) -> list[ToolCall]:
        """The finished calls of sample `index`."""
        return self._parsers[index].finished_calls()

    def broken_calls(self, index: int) -> list[ToolCall]:
        """Calls of sample `index` that went out in pieces and were never finished."""
        return self._parsers[index].broken_calls()

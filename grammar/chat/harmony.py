"""The channels of gpt-oss (the harmony format): an answer is a list of messages, each with a header.

`<|channel|>analysis<|message|>` begins reasoning, `<|channel|>final<|message|>` the answer, and
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>` a call, after which the answer is over;
commentary without a recipient is text before a call. `<|end|><|start|>assistant` stands between two messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from asyncengine.grammar.chat.calls import Parser
from asyncengine.grammar.chat.formats import Reasoning
from asyncengine.grammar.chat.lark import ANY, Answer
from asyncengine.grammar.chat.readers import JsonReader
from asyncengine.grammar.chat.scan import partial_suffix
from asyncengine.grammar.lower import fragment, inline_json
from asyncengine.grammar.marks import Markers, sequence
from asyncengine.grammar.regexes import escaped

CHANNEL, MESSAGE, END, NEXT = "<|channel|>", "<|message|>", "<|end|>", "<|start|>assistant"
MARKS = (CHANNEL, MESSAGE, END, "<|start|>", "<|constrain|>", "<|call|>", "<|return|>")
THOUGHTS = Reasoning(f"{CHANNEL}analysis{MESSAGE}", END)
ENDS = (END, "<|return|>", "<|call|>", "<|start|>")
"""Marks that end the text of a message; the last one if the model forgot the end mark."""
HEADS = (CHANNEL, NEXT, "to=", "<|end|>", "<|call|>", "<|return|>")
"""Texts that may begin a header."""
END_MARK = re.compile(r"<\|(?:end|return|call)\|>|(?=<\|start\|>)")
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")
CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
MAX_HEADER = 400
TEXT = f"{ANY} & ~/(?s:.*)({'|'.join(map(escaped, ENDS))})(?s:.*)/"
"""Text without the marks that end it, as a terminal."""


def channel_grammar(answer: Answer, markers: Markers) -> str:
    """Lark text of an answer in channels. Reasoning may come first, and commentary before free text or calls."""
    lark = markers.lark
    lines = [_message("thought", f"{CHANNEL}analysis{MESSAGE}", markers)]
    options = []
    before = "thought"
    if answer.text:
        lines.append(_message("aside", f"{CHANNEL}commentary{MESSAGE}", markers))
        before = "(thought | aside)"
        lines.append(f"TEXT: {TEXT}")
        options.append(f"{lark(f'{CHANNEL}final{MESSAGE}')} TEXT")
    if answer.final is not None:
        lines.append(f"final: {fragment(answer.final)}")
        options.append(f"{lark(f'{CHANNEL}final{MESSAGE}')} final")
    for i, tool in enumerate(answer.calls):
        arguments = inline_json(tool.schema, lenient=not tool.strict, tool=tool.name, key_order="any")
        lines.append(f"arguments_{i}: {arguments}")
        heads = (
            lark(f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}"),
            lark(f" to=functions.{tool.name}{CHANNEL}commentary <|constrain|>json{MESSAGE}"),
        )
        lines.append(f"call_{i}: ({' | '.join(heads)}) arguments_{i}")
        options.append(f"call_{i}")
    return "\n".join([f"start: {before}* ({' | '.join(options)})", *lines]) + "\n"


def _message(name: str, head: str, markers: Markers) -> str:
    """Rules for a message of free text that another one follows."""
    end, begin = markers.lark(END), markers.lark(NEXT)
    terminal = f"{name.upper()}_TEXT"
    lines, text = [f"{terminal}: {TEXT}"], f"{terminal} {end}"
    if markers.is_text(END):
        lines.append(f"{name}_text[lazy]: {text}")
        text = f"{name}_text"
    return "\n".join([*lines, f"{name}: {sequence(markers.lark(head), text, begin)}"])


class ChannelParser(Parser):
    """Parses an answer in channels, and drops a header that was cut off. `names`: the tools that may be called."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__(self._header)
        self._names = frozenset(names)
        self._thinks = False  # in the message that is read
        self._said = False
        self._gap = False

    @property
    def in_reasoning(self) -> bool:
        return self._thinks and self._step == self._message

    def _end(self, rest: str) -> None:
        if self._step == self._message:
            self._say(rest)

    # -- each step returns whether to look again

    def _header(self) -> bool:
        """Up to the mark that begins a message's text."""
        at = self._buffer.find(MESSAGE)
        if at < 0:
            text = self._buffer.lstrip()
            if len(text) < MAX_HEADER and any(text.startswith(mark) or mark.startswith(text) for mark in HEADS):
                return False
            self._thinks, self._step = False, self._message  # text without any header
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._begin_call(recipient[1])
            self._reader, self._step = JsonReader(), self._arguments
            return True
        self._thinks = channel is not None and channel[1] == "analysis"
        self._gap = self._gap if self._thinks else self._said
        self._step = self._message
        return True

    def _message(self) -> bool:
        """Text that is known to be the message's."""
        end_mark = END_MARK.search(self._buffer)
        size_known = len(self._buffer) - partial_suffix(self._buffer, *ENDS)
        size, done = (size_known, size_known) if end_mark is None else end_mark.span()
        text, self._buffer = self._buffer[:size], self._buffer[done:]
        if self._thinks:
            self._out.reasoning += text
        else:
            self._say(text)
        self._step = self._message if end_mark is None else self._header
        return end_mark is not None

    def _say(self, text: str) -> None:
        if text and self._gap:
            self._out.text += "\n\n"
        self._gap = self._gap and not text
        self._said = self._said or bool(text)
        self._out.text += text

    def _after_arguments(self, done: bool) -> None:
        self._step = self._header

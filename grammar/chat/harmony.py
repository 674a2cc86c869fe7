"""The channels of gpt-oss: every part of an answer is a message with a header that says what it is.

`<|channel|>analysis<|message|>` begins what the model thinks, `<|channel|>final<|message|>` its answer, and
`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>` a call, after which the answer is over;
commentary to nobody is said before a call. `<|end|><|start|>assistant` stands between two messages.
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
"""Marks behind the text of a message; the last where it was forgotten to end it."""
RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.:/-]+)")
KIND = re.compile(r"<\|channel\|>\s*(\w+)")
MAX_HEADER = 400


def channel_grammar(answer: Answer, markers: Markers) -> str:
    """Lark text of an answer in channels. Thoughts may come first, and before free text or calls words to the user."""
    lark = markers.lark
    lines = [_message("thought", f"{CHANNEL}analysis{MESSAGE}", markers)]
    options = []
    before = "thought"
    if answer.text:
        lines.append(_message("aside", f"{CHANNEL}commentary{MESSAGE}", markers))
        before = "(thought | aside)"
        lines.append(f"TEXT: {_text(markers)}")
        options.append(f"{lark(f'{CHANNEL}final{MESSAGE}')} TEXT")
    if answer.final is not None:
        lines.append(f"final: {fragment(answer.final)}")
        options.append(f"{lark(f'{CHANNEL}final{MESSAGE}')} final")
    for i, tool in enumerate(answer.calls):
        lines.append(
            f"arguments_{i}: {inline_json(tool.schema, lenient=not tool.strict, tool=tool.name, key_order='any')}"
        )
        heads = (
            lark(f"{CHANNEL}commentary to=functions.{tool.name} <|constrain|>json{MESSAGE}"),
            lark(f" to=functions.{tool.name}{CHANNEL}commentary <|constrain|>json{MESSAGE}"),
        )
        lines.append(f"call_{i}: ({' | '.join(heads)}) arguments_{i}")
        options.append(f"call_{i}")
    return "\n".join([f"start: {before}* ({' | '.join(options)})", *lines]) + "\n"


def _text(markers: Markers) -> str:
    """Text without the marks that end it."""
    spelled = "|".join(escaped(mark) for mark in ENDS)
    return f"{ANY} & ~/(?s:.*)({spelled})(?s:.*)/"


def _message(name: str, head: str, markers: Markers) -> str:
    """Rules for a message of free text that another one follows."""
    end, begin = markers.lark(END), markers.lark(NEXT)
    terminal = f"{name.upper()}_TEXT"
    lines = [f"{terminal}: {_text(markers)}"]
    if markers.is_text(END):
        lines += [
            f"{name}_text[lazy]: {terminal} {end}",
            f"{name}: {sequence(markers.lark(head), f'{name}_text', begin)}",
        ]
    else:
        lines.append(f"{name}: {sequence(markers.lark(head), terminal, end, begin)}")
    return "\n".join(lines)


class ChannelParser(Parser):
    """Takes an answer in channels apart, and drops a header that was cut off. `names`: the tools that may be called."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__(self._header)
        self._names = frozenset(names)
        self._said = False
        self._gap = False

    @property
    def in_reasoning(self) -> bool:
        return self._step == self._thought

    def _end(self, rest: str) -> None:
        if self._step == self._content:
            self._say(rest)

    # -- each step returns whether to look again

    def _header(self) -> bool:
        """Up to the mark that begins a message's text."""
        at = self._buffer.find(MESSAGE)
        if at < 0:
            if self._is_header():
                return False
            self._step = self._content  # text without any header
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        kind, recipient = KIND.search(header), RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._calls.begin(recipient[1], self._out)
            self._reader, self._step = JsonReader(), self._arguments
        elif kind is not None and kind[1] == "analysis":
            self._step = self._thought
        else:
            self._gap = self._said
            self._step = self._content
        return True

    def _is_header(self) -> bool:
        """Whether the text so far may be the beginning of a header."""
        text = self._buffer.lstrip()
        begins = (CHANNEL, NEXT, "to=", "<|end|>", "<|call|>", "<|return|>")
        return len(text) < MAX_HEADER and any(text.startswith(mark) or mark.startswith(text) for mark in begins)

    def _until_end(self) -> tuple[str, bool]:
        """The text known to be the message's, taken from the buffer, and whether it ends there."""
        places = [(at, mark) for mark in ENDS if (at := self._buffer.find(mark)) >= 0]
        if places:
            at, mark = min(places)
            text = self._buffer[:at]
            self._buffer = self._buffer[at + (0 if mark == "<|start|>" else len(mark)) :]
            return text, True
        keep = len(self._buffer) - max(partial_suffix(self._buffer, mark) for mark in ENDS)
        text, self._buffer = self._buffer[:keep], self._buffer[keep:]
        return text, False

    def _thought(self) -> bool:
        text, ends = self._until_end()
        self._out.reasoning += text
        self._step = self._header if ends else self._thought
        return ends

    def _content(self) -> bool:
        text, ends = self._until_end()
        self._say(text)
        self._step = self._header if ends else self._content
        return ends

    def _say(self, text: str) -> None:
        if text and self._gap:
            self._out.text += "\n\n"
        self._gap = self._gap and not text
        self._said = self._said or bool(text)
        self._out.text += text

    def _after_arguments(self, done: bool) -> None:
        self._step = self._header

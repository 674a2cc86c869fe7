"""Parses the beginning of a tool call in text that is still growing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from asyncengine.grammar.chat.formats import ToolFormat
from asyncengine.grammar.marks import NUMBER

BLANKS = " \t\r\n"
MAX_NAME = 200
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
KEY = re.compile(r'[ \t\r\n]*"(\w+)"[ \t\r\n]*:[ \t\r\n]*')
KEY_BEGIN = re.compile(r'[ \t\r\n]*(?:"\w{0,10}(?:"[ \t\r\n]*(?::[ \t\r\n]*)?)?)?')
CALL_ID = re.compile(r"\[CALL_ID\]\w*")
NAME_RUN = re.compile(r"[\w.:/-]+")
DIGITS = re.compile(r"[0-9]+")
TOKEN = re.compile(r"\{#\}|\]|<?(?:(?!\{#\})[^\s<\]])+|<")
NAMES, ARGUMENTS, REMARKS = ("name", "function"), ("arguments", "parameters"), ("type", "id")
"""Members of a call in JSON that may stand before its arguments, or behind them."""


class Head(NamedTuple):
    """The beginning of a call as far as it is known. The same text always gives the same answer, however it arrived."""

    status: Literal["complete", "incomplete", "wrong"]
    name: str = ""
    """Known before the status is complete."""
    end: int = 0
    """The index at which the arguments begin."""
    written: str = ""
    """The call's id as the model wrote it, where the format has such."""
    early: str = ""
    """The arguments, as far as they are known, where they stood before the name."""


def skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at


def may_begin(text: str, at: int, marker: str) -> bool:
    """Whether `marker` stands at `at`, as far as the text goes. False at its end."""
    rest = text[at : at + len(marker)]
    return bool(rest) and marker.startswith(rest)


def json_head(text: str, at: int) -> Head:
    """`{"name": "f", "arguments": ` and its like, up to the arguments; or up to the end of the name, behind them."""
    name, early, mark = "", "", "{"
    while True:
        at = skip_blanks(text, at)
        if at == len(text):
            return Head("incomplete", name)
        if name and early:
            return Head("complete", name, at, early=early)
        key = KEY.match(text, at + 1)
        if text[at] != mark or key is None or key.end() == len(text):
            unfinished = text[at] == mark and KEY_BEGIN.fullmatch(text, at + 1)
            return Head("incomplete" if unfinished else "wrong", name)
        at, mark = key.end(), ","
        if key[1] in ARGUMENTS and name:
            return Head("complete" if text[at] in '{"' else "wrong", name, at)
        if key[1] in ARGUMENTS and not early and text[at] == "{":
            end = Balance().feed(text[at:])
            if end is None:
                return Head("incomplete", early=text[at:])
            early, at = text[at : at + end], at + end
            continue
        string = STRING.match(text, at)
        if string is None and text[at] == '"' and (len(text) - at <= MAX_NAME or key[1] in ARGUMENTS):
            return Head("incomplete", name)
        value = decoded(string[0]) if string is not None else ""
        if key[1] in NAMES and not name and 0 < len(value) <= MAX_NAME:
            name = value
        elif key[1] in ARGUMENTS and not early and string is not None:
            early = string[0]
        elif key[1] not in REMARKS or not value or (key[1] == "type" and value != "function"):
            return Head("wrong", name)
        assert string is not None
        at = string.end()


def text_head(text: str, at: int, form: ToolFormat, alone: str) -> Head:
    """A name between two texts of a format, and the brace that begins the arguments where they are JSON. `alone`: the
    only tool, whose name the number of a call may stand for; empty: there are others."""
    begin = follow(text, at, form.name_open, form.loose)
    if begin is None or begin < 0:
        return Head("incomplete" if begin is None else "wrong")
    begin = skip_blanks(text, begin)
    run = NAME_RUN.match(text, begin)
    name, end = (run[0], run.end()) if run is not None else ("", begin)
    if end == len(text) or not name:
        return Head("incomplete" if end == len(text) and len(name) <= MAX_NAME else "wrong")
    after, written = form.name_close, ""
    if after.startswith(f":{NUMBER}"):
        name, _, digits = name.rpartition(":")
        name = name or alone
        if not digits.isdecimal() or not name:
            return Head("wrong")
        after = after.removeprefix(f":{NUMBER}")
        written = text[text.rfind(">", at, end) + 1 : end].strip()
    if may_begin(text, end, "[CALL_ID]"):
        call_id = CALL_ID.match(text, end)
        if call_id is None or call_id.end() == len(text):
            return Head("incomplete", name)
        end = call_id.end()
    stop = follow(text, end, after, form.loose)
    if stop is None:
        return Head("incomplete", name, written=written)
    if stop < 0:
        return Head("wrong", name)
    stop = skip_blanks(text, stop) if form.members is None else stop
    if form.members is None and not text.startswith("{", stop):
        return Head("incomplete" if stop == len(text) else "wrong", name, written=written)
    return Head("complete", name, stop, written)


def follow(text: str, at: int, wanted: str, loose: Sequence[str] = ()) -> int | None:
    """The end of `wanted`, which is to stand at `at`, blanks aside, perhaps without one of the parts in `loose`; None
    if the text is too short to tell, -1 if it is not there."""
    end = _follow(text, at, wanted)
    for omitted in loose:
        if end == -1 and omitted in wanted:
            end = _follow(text, at, wanted.replace(omitted, "", 1))
    return end


def _follow(text: str, at: int, wanted: str) -> int | None:
    for token in TOKEN.findall(wanted):
        at = skip_blanks(text, at)
        if token == NUMBER:
            digits = DIGITS.match(text, at)
            if digits is None:
                return None if at == len(text) else -1
            if digits.end() == len(text):
                return None
            at = digits.end()
        elif text.startswith(token, at):
            at += len(token)
        else:
            return None if at == len(text) or may_begin(text, at, token) else -1
    return at


def first_of(text: str, marks: Iterable[str]) -> int:
    """Index of the first of `marks` in `text`; -1 if there is none."""
    return min((at for mark in marks if mark and (at := text.find(mark)) >= 0), default=-1)


def decoded(literal: str) -> str:
    """The text of a JSON string; empty if it is none."""
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""


class Balance:
    """Finds the bracket that closes an object or a list, skipping strings. Takes text in pieces, in constant memory."""

    _INTERESTING = re.compile(r'[][{}"\\]')

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Index after the closing bracket; None if it is not in `text`."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = self._INTERESTING.search(text, at)
            if match is None:
                return None
            at = match.end()
            char = match[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = self._in_string
            elif not self._in_string:
                self.depth += 1 if char in "{[" else -1
                if self.depth == 0:
                    return at
        return None


def partial_suffix(text: str, *markers: str) -> int:
    """Length of the longest end of `text` that one of `markers` could continue."""
    size = 0
    for marker in filter(None, markers):
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while at >= 0 and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        size = max(size, len(text) - at) if at >= 0 else size
    return size

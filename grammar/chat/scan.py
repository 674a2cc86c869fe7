"""Reads the beginning of a tool call out of text that is still growing."""

from __future__ import annotations

import json
import re
from typing import Literal, NamedTuple

from asyncengine.grammar.chat.formats import NUMBER

BLANKS = " \t\r\n"
MAX_NAME = 200
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
CALL_ID = re.compile(r"\[CALL_ID\]\w*")
NAME_RUN = re.compile(r"[\w.:/-]+")
DIGITS = re.compile(r"[0-9]+")
TOKEN = re.compile(r"\{#\}|(?:(?!\{#\})\S)+")
JSON_HEAD = (("{",), ('"name"',), (":",), ("",), (",",), ('"arguments"', '"parameters"'), (":",))
"""Tokens before the arguments; the empty one is the name, as a JSON string."""


class Head(NamedTuple):
    """The beginning of a call as far as it is known. The same text always gives the same answer, however it arrived."""

    status: Literal["complete", "incomplete", "wrong"]
    name: str = ""
    """Known before the status is complete."""
    end: int = 0
    """The index at which the arguments begin."""
    number: str = ""
    """Behind the name, where the format has one."""


WRONG = Head("wrong")


def skip_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANKS:
        at += 1
    return at


def may_begin(text: str, at: int, marker: str) -> bool:
    """Whether `marker` stands at `at`, as far as the text goes. False at its end."""
    rest = text[at : at + len(marker)]
    return bool(rest) and marker.startswith(rest)


def json_head(text: str, at: int) -> Head:
    """`{"name": "f", "arguments": `, up to the brace that begins the arguments."""
    name = ""
    for options in JSON_HEAD:
        at = skip_blanks(text, at)
        if at == len(text):
            return Head("incomplete", name)
        if options == ("",):
            found = STRING.match(text, at)
            if found is None:
                unfinished = text[at] == '"' and len(text) - at <= MAX_NAME
                return Head("incomplete") if unfinished else WRONG
            name = _decoded(found[0])
            if not name or len(found[0]) > MAX_NAME:
                return WRONG
            at = found.end()
            continue
        token = next((option for option in options if may_begin(text, at, option)), None)
        if token is None:
            return Head("wrong", name)
        if not text.startswith(token, at):
            return Head("incomplete", name)
        at += len(token)
    return _before_brace(text, at, name)


def marked_head(text: str, at: int, marker: str) -> Head:
    """`f[ARGS]`, perhaps with an id in between, up to the brace that begins the arguments."""
    end = text.find(marker, at, at + MAX_NAME)
    if end < 0:
        return Head("incomplete") if len(text) - at < MAX_NAME and "{" not in text[at:] else WRONG
    name = CALL_ID.sub("", text[at:end]).strip(BLANKS)
    return _before_brace(text, end + len(marker), name) if name else WRONG


def text_head(text: str, at: int, before: str, after: str, braced: bool) -> Head:
    """A name between two texts of a format; `braced`: and the brace that begins the arguments."""
    begin = follow(text, at, before)
    if begin is None or begin < 0:
        return Head("incomplete") if begin is None else WRONG
    begin = skip_blanks(text, begin)
    found = NAME_RUN.match(text, begin)
    if found is None:
        return Head("incomplete") if begin == len(text) else WRONG
    if found.end() == len(text):
        return Head("incomplete") if len(found[0]) <= MAX_NAME else WRONG
    name, end, digits = found[0], found.end(), ""
    if after.startswith(f":{NUMBER}"):
        name, _, digits = name.rpartition(":")
        if not digits.isdecimal() or not name:
            return WRONG
        after = after.removeprefix(f":{NUMBER}")
    stop = follow(text, end, after)
    if stop is None:
        return Head("incomplete", name, 0, digits)
    if stop < 0:
        return Head("wrong", name)
    head = _before_brace(text, stop, name) if braced else Head("complete", name, stop)
    return head._replace(number=digits)


def follow(text: str, at: int, wanted: str) -> int | None:
    """The end of `wanted`, which is to stand at `at`, blanks aside; None if the text is too short to tell, -1 if it is
    not there."""
    for token in TOKEN.findall(wanted):
        at = skip_blanks(text, at)
        if token == NUMBER:
            found = DIGITS.match(text, at)
            if found is None:
                return None if at == len(text) else -1
            if found.end() == len(text):
                return None
            at = found.end()
        elif text.startswith(token, at):
            at += len(token)
        else:
            return None if at == len(text) or may_begin(text, at, token) else -1
    return at


def _before_brace(text: str, at: int, name: str) -> Head:
    at = skip_blanks(text, at)
    if at == len(text):
        return Head("incomplete", name)
    return Head("complete", name, at) if text[at] == "{" else Head("wrong", name)


def _decoded(literal: str) -> str:
    try:
        return str(json.loads(literal))
    except ValueError:
        return ""


class Balance:
    """Finds the bracket that closes an object or a list, through strings and escapes. Constant memory; feed it
    pieces."""

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
            found = self._INTERESTING.search(text, at)
            if found is None:
                return None
            at = found.end()
            char = found[0]
            if char == '"':
                self._in_string = not self._in_string
            elif char == "\\":
                self._escaped = self._in_string
            elif not self._in_string:
                self.depth += 1 if char in "{[" else -1
                if self.depth == 0:
                    return at
        return None


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` could continue."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0

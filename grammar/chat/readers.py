"""Readers of a call's arguments: text comes in as it is written, JSON goes out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from asyncengine.grammar.chat.formats import CDATA, Members, ToolFormat
from asyncengine.grammar.chat.scan import Balance, follow, may_begin, partial_suffix, skip_blanks

Types = Mapping[str, frozenset[str]]
"""The JSON types each argument may have."""
ANY = frozenset(("string", "number", "boolean", "null", "array", "object"))
MAX_KEY = 1024
LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
WORD = re.compile(r"[^\x00-\x20,:={}\[\]()\"'<|]+")
ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux])", re.DOTALL)


class Read(NamedTuple):
    """The result of one look at the text."""

    size: int
    """Characters that are done with."""
    piece: str = ""
    """The next piece of the arguments' JSON text."""
    state: Literal["open", "done", "broken"] = "open"


class Reader(Protocol):
    def feed(self, text: str) -> Read:
        """`text` begins where the last one was done with; nothing of it may be known twice."""
        ...


def reader(form: ToolFormat, types: Types | None) -> Reader:
    """A reader for one call. `types` None: nothing is known of the arguments."""
    if form.members is None:
        return JsonReader()
    if form.members.values == "raw":
        return RawReader(form.members, form.call_close, types or {})
    return NotationReader(form.members, form.call_close.strip()[:1])


class JsonReader:
    """A JSON object, passed on as it stands."""

    def __init__(self) -> None:
        self._balance = Balance()

    def feed(self, text: str) -> Read:
        end = self._balance.feed(text)
        return Read(len(text), text) if end is None else Read(end, text[:end], "done")


class RawReader:
    """Members between marks: strings as they are, everything else as JSON."""

    def __init__(self, members: Members, end: str, types: Types) -> None:
        self._members = members
        self._end = end.split(maxsplit=1)[0]
        self._types = types
        self._close = members.value_close.strip()
        self._trims = members.value_close.startswith("\n")
        self._allowed = ANY
        self._count = 0
        self._held = ""
        self._balance: Balance | None = None
        self._step = self._member

    def feed(self, text: str) -> Read:
        at, pieces = 0, []
        while True:
            read = self._step(text[at:])
            at += read.size
            pieces.append(read.piece)
            if read.state != "open" or not (read.size or read.piece):
                return Read(at, "".join(pieces), read.state)

    def _member(self, text: str) -> Read:
        """A key, or the end."""
        at = skip_blanks(text, 0)
        rest, own = text[at:], self._members
        if rest.startswith(self._end):
            return Read(at, "}" if self._count else "{}", "done")
        if not rest.startswith(own.key_open):
            partial = not rest or self._end.startswith(rest) or own.key_open.startswith(rest)
            return Read(at, state="open" if partial else "broken")
        begin = len(own.key_open)
        stop = rest.find(own.key_close.split()[0], begin)
        if stop < 0:
            return Read(at, state="open" if len(rest) < MAX_KEY else "broken")
        closes = [(own.key_close, False)]
        if own.string_key_close:
            closes.append((own.string_key_close, True))
        ends = [(follow(rest, stop, close.rstrip("\n")), text_only) for close, text_only in closes]
        for end, text_only in ends:
            if end is not None and end >= 0:
                return self._begin(at, rest[begin:stop], end, own, text_only)
        return Read(at, state="open" if any(end is None for end, _ in ends) else "broken")

    def _begin(self, at: int, key: str, end: int, own: Members, text_only: bool) -> Read:
        allowed = self._types.get(key, ANY)
        if own.string_key_close:
            allowed = frozenset(("string",)) if text_only else allowed - {"string"}
        self._allowed = allowed
        self._step = self._lead if own.key_close.endswith("\n") else self._first
        head = ("{" if not self._count else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._count += 1
        return Read(at + end, head)

    def _lead(self, text: str) -> Read:
        """The newline before a value is none of it."""
        if not text:
            return Read(0)
        self._step = self._first
        read = self._first(text[text.startswith("\n") :])
        return Read(read.size + text.startswith("\n"), read.piece, read.state)

    def _first(self, text: str) -> Read:
        """Read a value: its types say how and, if there may be several, its beginning."""
        self._held = ""
        if self._members.cdata and "string" in self._allowed:
            if text.startswith(CDATA[0]):
                self._step = self._marked
                return Read(len(CDATA[0]), '"')
            if not text or may_begin(text, 0, CDATA[0]):
                return Read(0)
        if self._allowed == {"string"}:
            self._step = self._string
            return Read(0, '"')
        at = skip_blanks(text, 0)
        if at == len(text):
            # blanks are the value's own where it turns out to be a string
            return Read(0)
        self._step = self._other
        if {"[": "array", "{": "object"}.get(text[at]) in self._allowed:
            self._balance = Balance()
            self._step = self._nested
        return self._step(text)

    def _value_end(self, text: str) -> tuple[int, int]:
        """(length of the value's text known for sure, length with the close or -1)."""
        found = text.find(self._close)
        if found >= 0:
            size = found - (self._trims and text[:found].endswith("\n"))
            return size, found + len(self._close)
        keep = len(text) - partial_suffix(text, self._close)
        if self._trims and text[:keep].endswith("\n"):
            keep -= 1
        return keep, -1

    def _string(self, text: str) -> Read:
        size, end = self._value_end(text)
        piece = json.dumps(text[:size], ensure_ascii=False)[1:-1]
        if end < 0:
            return Read(size, piece)
        self._step = self._member
        return Read(end, piece + '"')

    def _marked(self, text: str) -> Read:
        """A string between marks of its own."""
        end = CDATA[1]
        found = text.find(end)
        size = found if found >= 0 else len(text) - partial_suffix(text, end)
        piece = json.dumps(text[:size], ensure_ascii=False)[1:-1]
        if found < 0:
            return Read(size, piece)
        self._step = self._after_nested
        return Read(found + len(end), piece + '"')

    def _other(self, text: str) -> Read:
        """Held back until it is known what it is."""
        size, end = self._value_end(text)
        self._held += text[:size]
        if end < 0:
            return Read(size)
        self._step = self._member
        return Read(end, as_json(self._held, self._allowed))

    def _nested(self, text: str) -> Read:
        assert self._balance is not None
        end = self._balance.feed(text)
        if end is None:
            return Read(len(text), text)
        self._step = self._after_nested
        return Read(end, text[:end])

    def _after_nested(self, text: str) -> Read:
        at = skip_blanks(text, 0)
        if text.startswith(self._close, at):
            self._step = self._member
            return Read(at + len(self._close))
        return Read(0, state="open" if at == len(text) or may_begin(text, at, self._close) else "broken")


def as_json(text: str, allowed: frozenset[str]) -> str:
    """JSON of a raw value: itself where it reads as JSON of another allowed type, else a string."""
    stripped = text.strip(" \t\r\n")
    kind = "number" if NUMBER.fullmatch(stripped) else {"true": "boolean", "false": "boolean"}.get(stripped, stripped)
    if kind in allowed and kind in ("number", "boolean", "null"):
        return stripped
    return json.dumps(text, ensure_ascii=False) if "string" in allowed else stripped


class NotationReader:
    """Python's keyword arguments, or JSON with bare keys and marked strings. `end` closes the call; it is left."""

    def __init__(self, members: Members, end: str) -> None:
        self._quotes = (members.quote,) if members.quote else ('"', "'")
        self._escapes = not members.quote
        self._colon = members.key_close
        self._end = end
        self._stack = ["call"]
        self._empty = True  # nothing yet inside the innermost brackets
        self._quote = ""
        self._is_key = False
        self._expect: Literal["key", "colon", "value", "comma"] = "key"
        self._begun = False

    def feed(self, text: str) -> Read:
        at, pieces = 0, []
        if not self._begun:
            self._begun = True
            pieces.append("{")
        while True:
            read = self._inside(text, at) if self._quote else self._token(text, skip_blanks(text, at))
            at = max(at, read.size)
            pieces.append(read.piece)
            if read.state != "open" or not read.piece:
                return Read(at, "".join(pieces), read.state)

    # each returns where it stopped; a piece that is empty and "open" waits for more

    def _token(self, text: str, at: int) -> Read:
        if at == len(text):
            return Read(at)
        char = text[at]
        closes = self._end if len(self._stack) == 1 else {"{": "}", "[": "]"}[self._stack[-1]]
        if char == closes and (self._expect == "comma" or self._empty):
            return self._closed(at)
        if self._expect == "comma":
            return self._after_comma(at) if char == "," else Read(at, state="broken")
        if self._expect == "colon":
            wanted = "=" if self._colon == "=" and len(self._stack) == 1 else ":"
            if char != wanted:
                return Read(at, state="broken")
            self._expect = "value"
            return Read(at + 1, ": ")
        return self._begin(text, at)

    def _closed(self, at: int) -> Read:
        if len(self._stack) == 1:
            return Read(at, "}", "done")
        bracket = self._stack.pop()
        self._expect, self._empty = "comma", False
        return Read(at + 1, "}" if bracket == "{" else "]")

    def _after_comma(self, at: int) -> Read:
        self._expect = "value" if self._stack[-1] == "[" else "key"
        return Read(at + 1, ", ")

    def _begin(self, text: str, at: int) -> Read:
        """A key or a value."""
        key = self._expect == "key"
        for quote in self._quotes:
            if text.startswith(quote, at):
                self._quote, self._is_key = quote, key
                return Read(at + len(quote), '"')
            if len(quote) > 1 and may_begin(text, at, quote):
                return Read(at)
        if not key and text[at] in "[{":
            self._stack.append(text[at])
            self._expect, self._empty = ("value" if text[at] == "[" else "key"), True
            return Read(at + 1, text[at])
        word = WORD.match(text, at)
        if word is None or (word.end() == len(text) and word.end() - at > MAX_KEY):
            return Read(at, state="broken")
        if word.end() == len(text):
            return Read(at)
        return self._word(word[0], word.end(), key)

    def _word(self, word: str, end: int, key: bool) -> Read:
        self._empty = False
        if key:
            self._expect = "colon"
            return Read(end, json.dumps(word, ensure_ascii=False))
        self._expect = "comma"
        if word in LITERALS:
            return Read(end, LITERALS[word])
        return Read(end, word) if NUMBER.fullmatch(word) else Read(end, state="broken")

    def _inside(self, text: str, at: int) -> Read:
        """Read on inside a string."""
        quote = self._quote
        stop = text.find(quote, at)
        escape = text.find("\\", at) if self._escapes else -1
        if escape >= 0 and (stop < 0 or escape < stop):
            if escape > at:
                return Read(escape, _escaped(text[at:escape]))
            found = ESCAPE.match(text, at)
            if found is None:
                return Read(at, state="broken" if len(text) - at > 6 else "open")
            return Read(found.end(), _unescaped(found[0]))
        if stop < 0:
            keep = len(text) - partial_suffix(text, quote)
            return Read(keep, _escaped(text[at:keep]))
        self._quote, self._empty = "", False
        self._expect = "colon" if self._is_key else "comma"
        return Read(stop + len(quote), _escaped(text[at:stop]) + '"')


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _unescaped(escape: str) -> str:
    """An escape of Python's as JSON has it."""
    kind = escape[1]
    if kind == "u" or kind in 'nrtbf"\\':
        return escape
    if kind == "x":
        return _escaped(chr(int(escape[2:], 16)))
    return {"'": "'", "/": "/"}.get(kind) or _escaped(escape)

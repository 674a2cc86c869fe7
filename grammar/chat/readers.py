"""Readers of a call's arguments: they take text as it is generated and return JSON text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from json.encoder import encode_basestring
from typing import Literal, NamedTuple, Protocol

from asyncengine.grammar.chat import scan
from asyncengine.grammar.chat.formats import ToolFormat
from asyncengine.grammar.schema.arguments import CDATA, NUMBER, Members

Types = Mapping[str, frozenset[str]]
"""The JSON types each argument may have."""
ANY = frozenset(("string", "number", "boolean", "null", "array", "object"))
STRINGS = frozenset(("string",))
MAX_KEY = 1024
LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
WORD = re.compile(r"[^\x00-\x20,:={}\[\]()\"'<|]+")
ITEM = re.compile(
    r"""[ \t\r\n]*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\x00-\x20,:={}\[\]()"']+)?[ \t\r\n]*""", re.DOTALL
)
"""The first item or key behind a brace, and blanks."""
BRACKETS = re.compile(r"""\\.|[]'"()[{}]""", re.DOTALL)
CLOSERS = {"{": "}", "[": "]", "(": ")"}
ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux])", re.DOTALL)


class Read(NamedTuple):
    """The result of one `feed`."""

    size: int
    """Characters consumed."""
    piece: str = ""
    """The next piece of the arguments' JSON text."""
    state: Literal["open", "done", "broken"] = "open"


class Reader(Protocol):
    def feed(self, text: str) -> Read:
        """Read on in `text`, which begins behind the characters consumed so far."""
        ...


def reader(form: ToolFormat, types: Types | None) -> Reader:
    """A reader for one call. `types` None: nothing is known of the arguments."""
    if form.members is None:
        return JsonReader()
    if form.members.values == "raw":
        return RawReader(form.members, form.call_close, types or {})
    return NotationReader(form.members, form.call_close.strip()[:1], types or {})


class JsonReader:
    """A JSON object, passed on as it stands; or a string that holds one, passed on when it is complete."""

    def __init__(self) -> None:
        self._balance = scan.Balance()

    def feed(self, text: str) -> Read:
        at = 0 if self._balance.depth else scan.skip_blanks(text, 0)
        if not self._balance.depth and text[at : at + 1] != "{":
            string = scan.STRING.match(text, at)
            if string is None:
                return Read(at, state="open" if text[at : at + 1] in ("", '"') else "broken")
            return Read(string.end(), scan.decoded(string[0]), "done")
        end = self._balance.feed(text)
        return Read(len(text), text) if end is None else Read(end, text[:end], "done")


class RawReader:
    """Members between marks: strings as they are, everything else as JSON."""

    def __init__(self, members: Members, end: str, types: Types) -> None:
        self._members = members
        self._end = end.split(maxsplit=1)[0]
        self._types = types
        self._ends: tuple[str, ...] = members.ends
        self._trims = members.value_close.startswith("\n")
        self._allowed = ANY
        self._count = 0
        self._held = ""
        self._newline = False
        self._inner: Reader = JsonReader()
        self._step = self._member

    def feed(self, text: str) -> Read:
        at, pieces = 0, []
        while True:
            read = self._step(text[at:])
            at += read.size
            pieces.append(read.piece)
            if read.state != "open" or self._step == self._nested or not (read.size or read.piece):
                return Read(at, "".join(pieces), read.state)

    def _member(self, text: str) -> Read:
        """A key, or the end."""
        at = scan.skip_blanks(text, 0)
        rest, members = text[at:], self._members
        if rest.startswith(self._end):
            return Read(at, "}" if self._count else "{}", "done")
        if not rest.startswith(members.key_open):
            partial = not rest or self._end.startswith(rest) or members.key_open.startswith(rest)
            return Read(at, state="open" if partial else "broken")
        begin = len(members.key_open)
        stop = rest.find(members.key_close.split()[0], begin)
        if stop < 0:
            return Read(at, state="open" if len(rest) < MAX_KEY else "broken")
        closes = [close for close in (members.key_close, members.string_key_close) if close]
        ends = [scan.follow(rest, stop, close.rstrip("\n")) for close in closes]
        matching = [(end, close) for end, close in zip(ends, closes, strict=True) if end is not None and end >= 0]
        if not matching:
            return Read(at, state="open" if None in ends else "broken")
        key, text_only = rest[begin:stop], matching[0][1] == members.string_key_close
        allowed = self._types.get(key, ANY)
        if members.string_key_close:
            allowed = STRINGS if text_only and "string" in allowed else allowed - {"string"}
        self._allowed = allowed | STRINGS if text_only else allowed
        self._step, self._newline = self._first, members.key_close.endswith("\n")
        head = ("{" if not self._count else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        self._count += 1
        return Read(at + matching[0][0], head)

    def _first(self, text: str) -> Read:
        """Read a value: its types say how and, if there may be several, its beginning."""
        if self._newline:  # it is none of the value
            self._newline = not text
            return Read(int(text.startswith("\n"))) if text[:1] in ("", "\n") else self._first(text)
        self._held, self._ends = "", self._members.ends
        if self._members.cdata and "string" in self._allowed:
            if text.startswith(CDATA[0]):
                self._step, self._ends = self._string, CDATA[1:]
                return Read(len(CDATA[0]), '"')
            if not text or scan.may_begin(text, 0, CDATA[0]):
                return Read(0)
        if self._allowed == {"string"}:
            self._step = self._string
            return Read(0, '"')
        at = scan.skip_blanks(text, 0)
        if at == len(text):
            # blanks are the value's own where it turns out to be a string
            return Read(0)
        self._step = self._other
        if {"[": "array", "{": "object"}.get(text[at]) in self._allowed:
            self._inner = NotationReader(Members())
            self._step = self._nested
        return self._step(text)

    def _value_end(self, text: str) -> tuple[int, int]:
        """(length of the value's text known for sure, length with the close or -1)."""
        end_at, close = scan.first_of(text, self._ends), self._ends[0]
        if end_at >= 0:
            size = end_at - (self._trims and text[:end_at].endswith("\n"))
            return size, end_at + text.startswith(close, end_at) * len(close)
        keep = len(text) - scan.partial_suffix(text, *self._ends)
        if self._trims and text[:keep].endswith("\n"):
            keep -= 1
        return keep, -1

    def _string(self, text: str) -> Read:
        size, end = self._value_end(text)
        if end < 0:
            return Read(size, _escaped(text[:size]))
        self._step = self._member if self._ends == self._members.ends else self._after_nested
        return Read(end, _escaped(text[:size]) + '"')

    def _other(self, text: str) -> Read:
        """A value that is held back until its end, for its type depends on all of it."""
        size, end = self._value_end(text)
        self._held += text[:size]
        if end < 0:
            return Read(size)
        self._step = self._member
        return Read(end, as_json(self._held, self._allowed))

    def _nested(self, text: str) -> Read:
        read = self._inner.feed(text)
        if read.state == "done":
            self._step = self._after_nested
        return read if read.state == "broken" else Read(read.size, read.piece)

    def _after_nested(self, text: str) -> Read:
        at = scan.skip_blanks(text, 0)
        close = self._members.ends[0]
        if text.startswith(close, at):
            self._step = self._member
            return Read(at + len(close))
        return Read(0, state="open" if at == len(text) or scan.may_begin(text, at, close) else "broken")


def as_json(text: str, allowed: frozenset[str]) -> str:
    """JSON of a raw value: itself where it reads as JSON of another allowed type, else a string. Python's words count
    where it cannot be a string."""
    stripped = text.strip(" \t\r\n")
    word = stripped if "string" in allowed else LITERALS.get(stripped, stripped)
    json_type = "number" if NUMBER.fullmatch(word) else {"true": "boolean", "false": "boolean"}.get(word, word)
    if json_type in allowed and json_type in ("number", "boolean", "null"):
        return word
    return json.dumps(text, ensure_ascii=False) if "string" in allowed else stripped


class NotationReader:
    """Python's keyword arguments, or JSON with bare keys and marked strings. `end` closes the call; it is left.
    Without an `end`: one value of Python's or JSON's in brackets.

    Sets and tuples are lists. A quote that nothing follows which may follow a string is one of its characters. What is
    left of a call of Python's behind an error is passed over.
    """

    def __init__(self, members: Members, end: str = "", types: Types | None = None) -> None:
        self._quotes = (members.quote,) if members.quote else ('"', "'")
        self._escapes = not members.quote
        self._called = bool(end)
        self._equals = self._called and members.key_close == "="
        self._types = types or {}
        self._allowed = ANY  # of the argument that is read
        self._stack = [(end, "}")] if end else []  # what closes each bracket, and how that is written: "}" has keys
        self._quote = ""
        self._is_key = False
        self._held = False  # the string is perhaps a number
        self._expect: Literal["item", "colon", "value", "comma"] = "item" if end else "value"
        self._before = "{" if end else ""  # is written before the next item
        self._passes = ""  # after an error: the quote of a string, or a blank outside

    def feed(self, text: str) -> Read:
        at, pieces = 0, []
        while True:
            if self._passes:
                read = self._pass_over(text, at)
            else:
                read = self._inside(text, at) if self._quote else self._token(text, scan.skip_blanks(text, at))
            waits, at = read.size <= at and not read.piece, max(at, read.size)
            if read.state == "broken" and self._equals:
                self._passes = self._quote or " "
                continue
            pieces.append(read.piece)
            if read.state != "open" or waits:
                return Read(at, "".join(pieces), read.state)

    # each returns where it stopped; one that neither moved on nor has a piece waits for more

    def _pass_over(self, text: str, at: int) -> Read:
        for match in BRACKETS.finditer(text, at):
            char = match[0]
            if char in self._quotes and self._passes in (" ", char):
                self._passes = char if self._passes == " " else " "
            elif self._passes == " " and char in CLOSERS:
                self._stack.append((CLOSERS[char], ""))
            elif self._passes == " " and char == self._stack[-1][0]:
                self._stack.pop()
                if not self._stack:
                    return Read(match.start(), state="done")
        rest = len(text) - len(text.rstrip("\\"))
        return Read(len(text) - rest % 2)

    def _token(self, text: str, at: int) -> Read:
        if at == len(text):
            return Read(at)
        char = text[at]
        if self._stack and char == self._stack[-1][0] and self._expect in ("item", "comma"):
            _, written = self._stack.pop()
            piece = self._before.rstrip(", ") + written  # a brace of a call without arguments, no comma at the end
            self._expect, self._before = "comma", ""
            return Read(at + (not self._called or bool(self._stack)), piece, "open" if self._stack else "done")
        if self._expect == "comma":
            if char != "," and self._escapes:
                return Read(at, state="broken")
            self._expect, self._before = "item", ", "
            return Read(at + 1) if char == "," else self._begin(text, at)
        if self._expect == "colon":
            if char != ("=" if self._equals and len(self._stack) == 1 else ":"):
                return Read(at, state="broken")
            self._expect = "value"
            return Read(at + 1, ": ")
        return self._begin(text, at)

    def _item(self, end: int, piece: str) -> Read:
        piece, self._before = self._before + piece, ""
        return Read(end, piece)

    def _begin(self, text: str, at: int) -> Read:
        """A key or a value."""
        is_key = self._expect == "item" and self._stack[-1][1] == "}"
        for quote in self._quotes:
            if text.startswith(quote, at):
                self._quote, self._is_key = quote, is_key
                single = not is_key and len(self._stack) == 1
                self._held = single and not self._escapes and "string" not in self._allowed
                return self._item(at + len(quote), "" if self._held else '"')
            if len(quote) > 1 and scan.may_begin(text, at, quote):
                return Read(at)
        if not is_key and text[at] in CLOSERS:
            written = self._bracket(text, at)
            if not written:
                return Read(at)
            self._stack.append((CLOSERS[text[at]], written))
            self._expect = "item"
            return self._item(at + 1, "{" if written == "}" else "[")
        word = WORD.match(text, at)
        if word is None or (word.end() == len(text) and word.end() - at > MAX_KEY):
            return Read(at, state="broken")
        if word.end() == len(text):
            return Read(at)
        if is_key:
            self._expect, self._allowed = "colon", self._types.get(word[0], ANY)
            return self._item(word.end(), json.dumps(word[0], ensure_ascii=False))
        self._expect = "comma"
        value = LITERALS.get(word[0]) or _number(word[0])
        return self._item(word.end(), value) if value else Read(at, state="broken")

    def _bracket(self, text: str, at: int) -> str:
        """The bracket of JSON's that closes the one at `at`; a brace without keys is a set's. Empty: not known yet."""
        if text[at] != "{" or not self._escapes:
            return "}" if text[at] == "{" else "]"
        item = ITEM.match(text, at + 1)
        assert item is not None
        behind = text[item.end() : item.end() + 1]
        if not behind or (not item[1] and behind in self._quotes):
            return ""
        return "]" if behind in "([{" or (item[1] and behind in ",}") else "}"

    def _inside(self, text: str, at: int) -> Read:
        """Read on inside a string."""
        quote = self._quote
        stop = text.find(quote, at)
        escape = text.find("\\", at) if self._escapes else -1
        if escape >= 0 and (stop < 0 or escape < stop):
            if escape > at:
                return Read(escape, _escaped(text[at:escape]))
            match = ESCAPE.match(text, at)
            if match is None:
                return Read(at, state="broken" if len(text) - at > 6 else "open")
            return Read(match.end(), _unescaped(match[0]))
        if stop < 0:
            keep = at if self._held else len(text) - scan.partial_suffix(text, quote)
            return Read(keep, _escaped(text[at:keep]))
        ends = self._escapes and self._ends(text, stop + 1)
        if self._escapes and not ends:
            size = stop + (ends is False)
            return Read(size, _escaped(text[at:size]))
        self._quote, self._expect = "", "colon" if self._is_key else "comma"
        if self._held:
            return Read(stop + len(quote), as_json(text[at:stop], self._allowed | STRINGS))
        return Read(stop + len(quote), _escaped(text[at:stop]) + '"')

    def _ends(self, text: str, at: int) -> bool | None:
        """Whether the quote before `at` ends its string. None: that depends on what comes next."""
        at = scan.skip_blanks(text, at)
        behind = text[at : at + 2]
        if behind and self._is_key:
            return behind[0] == ":"
        if behind[:1] == ")" and len(self._stack) == 1 and self._equals:
            return None if behind == ")" else behind[1] != ")"
        return behind[0] in ",)]}" if behind else None


def _number(word: str) -> str:
    """JSON of a number of Python's; empty if it is none."""
    try:
        plain = json.dumps(ast.literal_eval(re.sub(r"^([-+]?)0+(?=\d)", r"\1", word)), allow_nan=False)
    except (ValueError, TypeError, SyntaxError):
        return ""
    return word if NUMBER.fullmatch(word) else plain


def _escaped(text: str) -> str:
    return encode_basestring(text)[1:-1]


def _unescaped(escape: str) -> str:
    """An escape of Python's as JSON has it."""
    letter = escape[1]
    if letter == "u" or letter in 'nrtbf"\\':
        return escape
    if letter == "x":
        return _escaped(chr(int(escape[2:], 16)))
    return {"'": "'", "/": "/"}.get(letter) or _escaped(escape)

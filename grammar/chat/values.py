"""The grammar of an argument's value where it is not JSON: Python's literals, bare keys, strings between marks."""

from __future__ import annotations

import json
import re
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.chat.formats import CDATA, Members
from asyncengine.grammar.chat.marks import Markers, literal_pattern, sequence
from asyncengine.grammar.chat.schemas import Schema
from asyncengine.grammar.chat.shapes import Reader, as_schema, type_of
from asyncengine.grammar.lark import literal, regex
from asyncengine.grammar.lower import inline_json
from asyncengine.grammar.regexes import portable
from asyncengine.grammar.schema.formats import DATES

STRING_KEYS = ("type", "minLength", "maxLength", "pattern", "enum", "format")
RAW_FORMATS = {**DATES, "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"}
"""Formats that are enforced where a string stands as it is; others are remarks there. Read only."""
NUMBER_KEYS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum")
ARRAY_KEYS = ("type", "items", "prefixItems", "minItems", "maxItems", "enum")
BARE_KEY = r"[^\x00-\x20\x7f:={}\[\]<>,\"'()|]+"
"""A key that needs no quotes, in the dialect of grammars."""
ANYTHING = r"[\s\S]*"
ANY_DEPTH = 4
"""Nesting of values of which the schema says nothing."""


class ValueRules:
    """Writes rules for the values of one tool; `lines` are the rules so far."""

    def __init__(self, prefix: str, members: Members, markers: Markers, reader: Reader) -> None:
        self.lines: list[str] = []
        self._prefix = prefix
        self._members = members
        self._cdata = members.cdata
        self._markers = markers
        self._reader = reader
        self._known: dict[str, str] = {}

    def rule(self, schema: Schema) -> str:
        """The name of a rule for values of `schema`."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            self._known[key] = name = f"{self._prefix}_v{len(self._known)}"
            options = [self._option(option) for option in self._reader.options(schema)]
            if not options:
                raise GrammarUnsupported("tools", [("enum", "")])
            self.lines.append(f"{name}: {' | '.join(dict.fromkeys(options))}")
        return self._known[key]

    def terminal(self, pattern: str) -> str:
        """The name of a terminal."""
        if pattern not in self._known:
            self._known[pattern] = name = f"{self._prefix.upper()}_T{len(self._known)}"
            self.lines.append(f"{name}: {pattern}")
        return self._known[pattern]

    def _option(self, option: Schema) -> str:
        kind = option.get("type")
        if kind is None:
            return self._anything(ANY_DEPTH)
        if "enum" in option:
            return self._listed(option["enum"])
        if kind == "string":
            self._reader.only(option, STRING_KEYS)
            return self._string(option)
        if kind in ("integer", "number"):
            self._reader.only(option, NUMBER_KEYS)
            return inline_json({key: value for key, value in option.items() if key in NUMBER_KEYS})
        if kind == "boolean":
            return self._literals("true", "false")
        if kind == "null":
            return self._literals("null")
        if kind == "array":
            return self._array(option)
        return self._object(option)

    def _literals(self, *names: str) -> str:
        python = {"true": "True", "false": "False", "null": "None"}
        both = [spelling for name in names for spelling in (name, python.get(name, name))]
        return " | ".join(literal(name) for name in dict.fromkeys(both if self._members.values == "python" else names))

    def _listed(self, values: list[Any]) -> str:
        if not all(type_of(value) in ("string", "integer", "number", "boolean", "null") for value in values):
            raise GrammarUnsupported("tools", [("enum", "")])
        written = (self._quoted(v) if isinstance(v, str) else self._literals(json.dumps(v)) for v in values)
        return " | ".join(written)

    def _quoted(self, text: str) -> str:
        if self._members.values == "bare":
            mark = self._markers.lark(self._members.quote)
            return sequence(mark, literal(text) if text else "", mark)
        double = json.dumps(text, ensure_ascii=False)
        single = "'" + double[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
        return f"{literal(double)} | {literal(single)}"

    def _string(self, option: Schema) -> str:
        plain = {key: value for key, value in option.items() if key in STRING_KEYS}
        if self._members.values == "bare":
            mark = self._members.quote
            return f"{self._markers.lark(mark)} {self.raw(plain, mark)}"
        if len(plain) > 1:
            return inline_json(plain)  # in double quotes and with escapes that are Python's too
        escape = r"\\(?:[\"'\\\/bfnrt]|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2})"
        # half a character cannot be said: no escapes of surrogates
        escape = escape.replace("u[0-9a-fA-F]{4}", "u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})")
        quoted = (f"{quote}(?:[^{quote}\\\\\\x00-\\x1f]|{escape})*{quote}" for quote in "\"'")
        return " | ".join(self.terminal(f"/{pattern}/") for pattern in quoted)

    def raw(self, option: Schema, close: str, beside: str = "") -> str:
        """A string as it is, up to and with `close`. `beside`: a pattern of texts that mean something else."""
        core = close.strip()
        ends = self._members.ends if close == self._members.value_close else (core,)
        forbidden = [*([beside] if beside else []), *([f"{literal_pattern(CDATA[0])}(?s:.*)"] if self._cdata else [])]
        if "enum" in option:
            taken = [
                text
                for text in option["enum"]
                if not any(end in text for end in ends) and not (beside and re.fullmatch(beside, text))
            ]
            if not taken:
                raise GrammarUnsupported("tools", [("enum", "")])
            end = self._markers.lark(close)
            written = [self._members.string(text) for text in taken]
            return "(" + " | ".join(sequence(literal(text) if text else "", end) for text in written) + ")"
        parts = [f"/(?s:.{{{option.get('minLength', 0)},{option.get('maxLength', '')}}})/"]
        for pattern in (option.get("pattern"), RAW_FORMATS.get(str(option.get("format")))):
            if isinstance(pattern, str):
                parts.append(regex(portable(_anywhere(pattern))))
        text = " & ".join([*parts, *(f"~/{pattern}/" for pattern in (*map(_with, ends), *forbidden))])
        if not self._cdata:
            return self.closed(text, close)
        begin, end = CDATA
        inside = " & ".join([*parts, f"~/{_with(end)}/"])
        return f"({self.closed(text, close)} | {literal(begin)} {self.closed(inside, end + close)})"

    def closed(self, text: str, close: str) -> str:
        """A terminal of texts without `close`, and `close`."""
        before, special, after = self._markers.split(close)
        if not special:
            name = f"{self._prefix}_t{len(self._known)}"
            body = self.terminal(text)
            self._known[name] = name
            self.lines.append(f"{name}[lazy]: {body} {literal(close)}")
            return name
        if not before:
            return sequence(self.terminal(text), special, after)
        # what stands before a special token belongs to the longest text before it
        name = f"{self._prefix.upper()}_E{len(self._known)}"
        self._known[name] = name
        self.lines.append(f"{name}: {self.terminal(text)} {literal(before)}")
        return sequence(name, special, after)

    def _array(self, option: Schema) -> str:
        self._reader.only(option, ARRAY_KEYS)
        low, high = int(option.get("minItems", 0)), option.get("maxItems")
        if (first := option.get("prefixItems")) is not None:
            if not low == high == len(first) or not first:
                raise GrammarUnsupported("tools", [("prefixItems", "")])
            return f'"[" {f" {self.comma} ".join(self.rule(as_schema(item)) for item in first)} "]"'
        item = self.rule(as_schema(option.get("items", True)))
        comma = self.comma
        if high == 0:
            return '"[" "]"'
        more = f"({comma} {item}){{{max(low - 1, 0)},{'' if high is None else int(high) - 1}}}"
        inside = f"{item} {more}"
        return f'"[" {inside} "]"' if low else f'"[" ({inside})? "]"'

    @property
    def comma(self) -> str:
        """Between two values."""
        return self.terminal("/,[ ]?/")

    def _object(self, option: Schema) -> str:
        shape = self._reader.shape(option)

        def member(key: str) -> str:
            return f"{self._key(key)} {self.rule(shape.properties[key])}"

        extra = None
        if shape.extra is not None:
            extra = f"{self._any_key(list(shape.properties))} {self.rule(shape.extra)}"
        name = f"{self._prefix}_o{len(self._known)}"
        self._known[name] = name
        heads = [(member(key), key in shape.required) for key in shape.properties]
        self.lines += chain(name, heads, self.comma, extra)
        return f'"{{" {name} "}}"'

    def _key(self, key: str) -> str:
        if self._members.values == "bare":
            return literal(checked_key(key) + self._members.key_close)
        return f"({self._quoted(key)}) {self._colon}"

    @property
    def _colon(self) -> str:
        return self.terminal("/:[ ]?/")

    def _any_key(self, but: list[str]) -> str:
        if self._members.values == "bare":
            other = "".join(f" & ~/{literal_pattern(key + self._members.key_close)}/" for key in but)
            return self.terminal(f"/{BARE_KEY}{literal_pattern(self._members.key_close)}/{other}")
        other = "".join(f" & ~/[\"']{literal_pattern(key)}[\"']/" for key in but)
        pattern = "|".join(f"{quote}[^{quote}\\\\\\x00-\\x1f]*{quote}" for quote in "\"'")
        return f"{self.terminal(f'/{pattern}/{other}')} {self._colon}"

    def _anything(self, depth: int) -> str:
        scalars = [self._string({"type": "string"}), inline_json({"type": "number"})]
        scalars.append(self._literals("true", "false", "null"))
        if depth:
            name = f"{self._prefix}_any{depth}"
            if name not in self._known:
                self._known[name] = name
                self.lines.append(f"{name}: {self._anything(depth - 1)}")
                self.lines.append(f"{name}_member: {self._any_key([])} {name}")
                self.lines += chain(f"{name}_members", [], self.comma, f"{name}_member")
            scalars += [f'"[" ({name} ({self.comma} {name})*)? "]"', f'"{{" {name}_members "}}"']
        return " | ".join(scalars)


def chain(name: str, members: list[tuple[str, bool]], separator: str, extra: str | None = None) -> list[str]:
    """Rules for members in their order, those that are not required perhaps left out, with `separator` between two."""
    count = len(members)
    lines = []
    for index in range(count, -1, -1):
        if index == count:
            again = sequence(separator, extra or "")
            first = f"({extra} ({again})*)?" if extra else '""'
            rest = f"({again})*" if extra else '""'
        else:
            written, required = members[index]
            after = f"{name}_rest{index + 1}"
            first = f"{written} {after}"
            rest = sequence(separator, written, after)
            if not required:
                first += f" | {name}_first{index + 1}"
                rest += f" | {after}"
        lines += [f"{name}_first{index}: {first}", f"{name}_rest{index}: {rest}"]
    return [f"{name}: {name}_first0", *lines]


def _with(text: str) -> str:
    """A pattern of all texts that contain `text`."""
    return f"(?s:.*){literal_pattern(text)}(?s:.*)"


def _anywhere(pattern: str) -> str:
    """JSON schema's patterns may match anywhere in a string; this one matches all of it."""
    outside = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", pattern)
    while (inner := re.sub(r"\([^()]*\)", "", outside)) != outside:
        outside = inner
    begins, ends = outside.startswith("^"), outside.endswith("$")
    if "|" in outside and (begins or ends):
        raise GrammarUnsupported("tools", [("pattern", "")])  # an anchor of one alternative only
    core = pattern[begins : len(pattern) - ends]
    return f"{'' if begins else ANYTHING}(?:{core}){'' if ends else ANYTHING}"


def checked_key(key: str) -> str:
    """`key`, if it can be written without quotes."""
    if not re.fullmatch(BARE_KEY, key):
        raise GrammarUnsupported("tools", [("properties", f"/properties/{key}")])
    return key

"""The grammar of arguments that a format writes one by one."""

from __future__ import annotations

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.chat.formats import Members
from asyncengine.grammar.chat.marks import Markers, literal_pattern, sequence
from asyncengine.grammar.chat.readers import NUMBER
from asyncengine.grammar.chat.schemas import Schema
from asyncengine.grammar.chat.shapes import ArgumentShape, Reader
from asyncengine.grammar.chat.tools import Tool
from asyncengine.grammar.chat.values import BARE_KEY, STRING_KEYS, ValueRules, chain, checked_key
from asyncengine.grammar.lower import inline_json
from asyncengine.grammar.schema.numbers import Numbers

SCALARS = {"number": NUMBER.pattern, "boolean": "(true|false)", "null": "null"}
STARTS = {"array": r"\[", "object": r"\{"}
BLANK = r"[ \t\r\n]*"


def member_rules(name: str, tool: Tool, members: Members, markers: Markers) -> list[str]:
    """Rules, the first called `name`, for the arguments of `tool`. Raises `GrammarUnsupported` naming a keyword."""
    return _Writer(name, tool, members, markers).write()


class _Writer:
    def __init__(self, name: str, tool: Tool, members: Members, markers: Markers) -> None:
        self._name = name
        self._members = members
        self._markers = markers
        self._lenient = not tool.strict
        self._reader = Reader(dict(tool.schema), tool.strict)
        self._values = ValueRules(name, members, markers, self._reader)

    def write(self) -> list[str]:
        names, lines = [], []
        for index, shape in enumerate(self._reader.shapes()):
            names.append(f"{self._name}_s{index}")
            members = [(self._member(key, value), key in shape.required) for key, value in shape.properties.items()]
            lines += chain(names[-1], members, self._separator, self._extra(shape))
        return [f"{self._name}: {' | '.join(names)}", *lines, *self._values.lines]

    @property
    def _separator(self) -> str:
        separator = self._members.separator
        return self._values.comma if separator.strip() == "," else self._markers.lark(separator)

    def _member(self, key: str, schema: Schema) -> str:
        own = self._members
        self._check(key)
        head = self._markers.lark(f"{own.key_open}{key}{own.key_close}")
        if own.values != "raw":
            return sequence(head, self._values.rule(schema))
        typed = own.string_key_close and self._markers.lark(f"{own.key_open}{key}{own.string_key_close}")
        return f"({self._raw(head, schema, typed)})"

    def _check(self, key: str) -> None:
        own = self._members
        if own.values != "raw":
            checked_key(key)
        elif not key or key != key.strip() or own.key_close.split()[0][0] in key or "\n" in key:
            raise GrammarUnsupported("tools", [("properties", f"/properties/{key}")])

    def _extra(self, shape: ArgumentShape) -> str | None:
        """A member that is not declared."""
        if shape.extra is None:
            return None
        own = self._members
        before, opened = self._markers.behind_special(own.key_open)
        heads = []
        for close in dict.fromkeys((own.key_close, own.string_key_close or own.key_close)):
            closed, special, after = self._markers.split(close)
            but = "".join(f" & ~/{literal_pattern(opened + key + closed)}/" for key in shape.properties)
            pattern = f"/{literal_pattern(opened)}{BARE_KEY}{literal_pattern(closed)}/{but}"
            heads.append(sequence(before, self._values.terminal(pattern), special, after))
        if own.values != "raw":
            return sequence(heads[0], self._values.rule(shape.extra))
        return f"({self._raw(heads[0], shape.extra, heads[-1])})"

    def _raw(self, head: str, schema: Schema, typed: str = "") -> str:
        """Head and value: strings as they are, the rest as JSON. With heads of its own (`typed`) a string may look like
        anything; else what reads as JSON of an allowed type is that."""
        options = self._reader.options(schema)
        strings = [option for option in options if option.get("type", "string") == "string"]
        others = [option for option in options if option.get("type") not in ("string", None)]
        if any("type" not in option for option in options):
            others += [{"type": kind} for kind in ("number", "boolean", "null", "array", "object")]
        if not options:
            raise GrammarUnsupported("tools", [("enum", "")])
        close = self._members.value_close
        out = []
        if typed and typed != head:
            out += [sequence(typed, self._string(option, "")) for option in strings]
            out += [sequence(head, self._json(option), self._markers.lark(close)) for option in others]
            return " | ".join(out)
        beside = _beside(others)
        taken = [sequence(head, self._string(option, beside)) for option in strings]
        for option in others:
            kind = str(option["type"])
            if strings and kind not in STARTS and "enum" not in option:
                out.append(sequence(head, self._scalar(kind, option)))
            else:
                out.append(sequence(head, self._json(option), self._markers.lark(close)))
        return " | ".join(dict.fromkeys([*taken, *out]))

    def _string(self, option: Schema, beside: str) -> str:
        self._reader.only(option, STRING_KEYS)
        return self._values.raw(option, self._members.value_close, beside)

    def _scalar(self, kind: str, option: Schema) -> str:
        """JSON that a string could begin like: text for the lexer, up to the close."""
        self._reader.only(option, ("type",))
        written = Numbers(integer=kind == "integer").spelling("").patterns[0]
        pattern = SCALARS[kind] if kind in ("boolean", "null") else written
        return self._values.closed(f"/{pattern}/", self._members.value_close)

    def _json(self, option: Schema) -> str:
        plain = {key: value for key, value in option.items() if key != "x-guidance"}
        return inline_json(self._reader.standing_alone(plain), lenient=self._lenient)


def _beside(others: list[Schema]) -> str:
    """A pattern of all texts that read as JSON of these types; empty for none."""
    kinds = {"number" if option["type"] == "integer" else str(option["type"]) for option in others}
    found = [rf"{BLANK}{SCALARS[kind]}{BLANK}" for kind in sorted(kinds) if kind in SCALARS]
    found += [rf"{BLANK}{STARTS[kind]}(?s:.*)" for kind in sorted(kinds) if kind in STARTS]
    return "|".join(found)

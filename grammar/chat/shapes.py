"""Arguments of a tool one by one, for formats that write them one by one, as its schema has them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.chat.schemas import Schema
from asyncengine.grammar.schemas import moved, resolve

JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset((
    "title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment",
    "$schema", "$id", "$defs", "definitions", "discriminator", "format", "contentEncoding", "contentMediaType",
    "x-guidance",
))  # fmt: skip
"""Say nothing that could be enforced here."""
TYPE_NAMES: Mapping[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", NoneType: "null",
}  # fmt: skip
MAX_OPTIONS = 256
"""Alternatives of one value."""


@dataclass(frozen=True, slots=True)
class ArgumentShape:
    """One way the arguments may be: members in their order."""

    properties: Mapping[str, Schema]
    required: frozenset[str]
    extra: Schema | None
    """The schema of members that are not declared; None: there are none."""


class Reader:
    """Reads one document's schemas. `strict`: raises `GrammarUnsupported` naming what it cannot tell apart; else such
    parts are left out."""

    def __init__(self, root: Schema, strict: bool = True) -> None:
        self._root = root
        self._strict = strict

    def shapes(self) -> list[ArgumentShape]:
        """The ways the arguments may be. At least one."""
        options = [part for part in self.options(self._root) if part.get("type", "object") == "object"]
        return [self.shape(part) for part in options] or [ArgumentShape({}, frozenset(), {})]

    def shape(self, part: Schema) -> ArgumentShape:
        """The shape of a schema of objects, one of `options`."""
        self.only(part, ("type", "properties", "required", "additionalProperties"))
        properties = {str(key): as_schema(value) for key, value in (part.get("properties") or {}).items()}
        required = [str(key) for key in part.get("required") or ()]
        others = part.get("additionalProperties", True)
        extra = None if others is False else as_schema(others)
        for key in required:
            if key not in properties:
                if extra is None:
                    raise GrammarUnsupported("tools", [("required", f"/properties/{key}")])
                properties[key] = extra
        return ArgumentShape(properties, frozenset(required), extra)

    def options(self, schema: Schema) -> list[Schema]:
        """`schema` as alternatives, each without references and combinations at its top, and of one type or of any."""
        found = list(self._split(schema, 0))
        if len(found) > MAX_OPTIONS:
            raise GrammarUnsupported("tools", [("anyOf", "")])
        return found

    def _split(self, schema: Schema, depth: int) -> Iterator[Schema]:
        if depth > 64:
            raise GrammarUnsupported("tools", [("$ref", "")])
        own = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
        if isinstance(reference := own.pop("$ref", None), str):
            target = resolve(self._root, schema)
            if target is None:
                raise GrammarUnsupported("tools", [("$ref", reference)])
            yield from self._split(self._merged(as_schema(target), own), depth + 1)
            return
        for key in ("anyOf", "oneOf"):
            if isinstance(options := own.pop(key, None), list):
                for option in options:
                    yield from self._split(self._merged(as_schema(option), own), depth + 1)
                return
        if isinstance(every := own.pop("allOf", None), list):
            for part in map(as_schema, every):
                combined = any(key in part for key in ("$ref", "anyOf", "oneOf", "allOf"))
                flat = list(self._split(part, depth + 1)) if combined else [part]
                own = self._merged(flat[0] if len(flat) == 1 else {"anyOf": flat}, own)
            yield from self._split(own, depth + 1)
            return
        yield from self._typed(own)

    def _typed(self, own: Schema) -> Iterator[Schema]:
        if "const" in own:
            own = {**own, "enum": [own["const"]]}
            del own["const"]
        kinds = own.get("type")
        if isinstance(values := own.get("enum"), list):
            for kind in JSON_TYPES:
                of_kind = [value for value in values if type_of(value) == kind]
                if of_kind and (kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)):
                    yield {"type": kind, "enum": of_kind}
            return
        if isinstance(kinds, list):
            for kind in kinds:
                yield {**own, "type": kind}
            return
        if kinds is None and set(own) - ANNOTATIONS:
            found = "object" if "properties" in own else "array" if "items" in own else None
            if found is None:
                self.only(own, ())
            yield {**own, "type": found} if found else {}
            return
        yield own

    def _merged(self, one: Schema, other: Schema) -> Schema:
        """The schema that says what both say, where one can."""
        out = dict(one)
        for key, value in other.items():
            if key not in out or key in ANNOTATIONS or out[key] == value:
                out[key] = value
            elif key == "required":
                out[key] = [*dict.fromkeys([*out[key], *value])]
            elif key == "properties" and not set(out[key]) & set(value):
                out[key] = {**out[key], **value}
            elif self._strict:
                raise GrammarUnsupported("tools", [(key, "")])
        return out

    def only(self, part: Schema, keys: tuple[str, ...]) -> None:
        """Raises if `part` says more than `keys`, where everything must be enforced."""
        more = [key for key in part if key not in keys and key not in ANNOTATIONS]
        if more and self._strict:
            raise GrammarUnsupported("tools", [(key, "") for key in more])

    def standing_alone(self, part: Schema) -> Schema:
        """A copy of a part of the document that can be a document of its own."""
        if '"$ref"' not in json.dumps(part):
            return part
        return {**moved(part, "#/$defs/arguments"), "$defs": {"arguments": moved(self._root, "#/$defs/arguments")}}

    def types(self, schema: Schema) -> frozenset[str]:
        """The JSON types a value may have ("number" for integers too)."""
        found: set[str] = set()
        for option in self.options(schema):
            kind = option.get("type")
            found |= {"number" if kind == "integer" else str(kind)} if kind else set(JSON_TYPES) - {"integer"}
        return frozenset(found)


def member_types(schema: Schema, strict: bool) -> dict[str, frozenset[str]]:
    """The JSON types of each declared argument of a tool; the grammar and the parser go by the same."""
    reader = Reader(schema, strict)
    found: dict[str, frozenset[str]] = {}
    for shape in reader.shapes():
        for key, value in shape.properties.items():
            found[key] = found.get(key, frozenset()) | reader.types(value)
    return found


def as_schema(value: Any) -> Schema:
    """`true` and `false` written out."""
    if isinstance(value, dict):
        return value
    return {} if value is not False else {"enum": []}


def type_of(value: Any) -> str:
    """The JSON type of a value."""
    return TYPE_NAMES[type(value)]

"""Fields of requests: the tables of fields.txt, and reading a body by one of them."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

from asyncengine.checks import MAX_COUNT, Check, as_choice, as_integer, as_seconds, as_switch, as_text
from asyncengine.errors import InvalidParameter
from asyncengine.sampling_params import LOOP, OFFERED, SamplingParams

Values = defaultdict[str, dict[str, Any]]
"""Values of fields by where they go, then by their names here: "outer.inner" within an object."""


class Field(NamedTuple):
    """A line of a table, as fields.txt explains them."""

    ours: str
    to: str
    check: Check | None = None
    takes: str = ""
    note: str = ""
    needed: bool = False
    inner: Table | None = None
    """The fields of an object."""


Table = dict[str, Field]


def as_object(name: str, value: object) -> Mapping[str, Any]:
    """A JSON object. Raises `InvalidParameter`."""
    if not isinstance(value, Mapping):
        raise InvalidParameter(name, "must be an object", value)
    return value


def as_list(name: str, value: object) -> list[Any]:
    """A JSON list. Raises `InvalidParameter`."""
    if not isinstance(value, list):
        raise InvalidParameter(name, "must be a list", value)
    return value


def as_texts(name: str, value: object) -> str | list[Any]:
    """A text, or a list whose items are checked where they are used. Raises `InvalidParameter`."""
    if not isinstance(value, str | list):
        raise InvalidParameter(name, "must be a text or a list", value)
    return value


CHECKS: dict[str, Check] = {
    "text": as_text, "texts": as_texts, "list": as_list, "switch": as_switch, "object": as_object, "mapping": as_object,
    "seconds": as_seconds,
}  # fmt: skip
"""Checks by the word for a field's type in fields.txt; other words have no check."""


def _check(takes: str) -> Check | None:
    word, _, rest = takes.partition(" ")
    if word == "integer":
        low, high = rest.split("..")
        return functools.partial(as_integer, low=int(low), high=int(high or MAX_COUNT))
    if word == "one":
        return functools.partial(as_choice, choices=rest.removeprefix("of ").split(", "))
    return CHECKS.get(word)


PATHS: dict[str, str] = {}
"""The table by which requests are read, for each path that has one."""


def _tables() -> dict[str, Table]:
    tables: dict[str, Table] = {}
    table: Table = {}
    marked = SamplingParams.declared().items()
    offered = " ".join(name for name, marks in marked if OFFERED in marks and LOOP not in marks)
    for line in (resources.files(__package__) / "fields.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            head, _, included = line[2:].partition(": ")
            name, *paths = head.split()
            table = tables[name] = {}
            PATHS.update(dict.fromkeys(paths, name))
            for base in filter(None, included.split(", ")):
                table |= tables[base]
        elif line and line[0] != ";":
            names, to, takes, note = (cell.strip() for cell in line.split("|", 3))
            for spec in names.replace("OFFERED", offered).split():
                theirs, _, ours = spec.rstrip("!").partition("=")
                field = Field(ours or theirs, to, _check(takes), takes, note, spec.endswith("!"))
                outer, _, within = theirs.partition(".")
                if within:
                    parent = table.get(outer, Field(outer, to, takes="object"))
                    field = field._replace(to="own") if to == "hint" else field
                    table[outer] = parent._replace(inner={**(parent.inner or {}), within: field})
                else:
                    table[theirs] = field
    return tables


TABLES = _tables()


class Fields:
    """The fields of a request's body that have not been read yet."""

    def __init__(self, body: object, *, strict: bool = False, name: str = "", outer: Fields | None = None) -> None:
        """`strict`: fields that would be passed over are refused. `name`: that of the field of `outer` whose object it
        is.

        Raises `InvalidParameter` unless it is an object.
        """
        self._left: dict[str, Any] = dict(as_object(name or "body", body))
        self._strict = strict
        self._within = f"{name}." if name else ""
        self.ignored: list[str] = outer.ignored if outer else []
        """Names of fields that were given and change nothing; they are listed in a header of the response."""
        self.names: dict[str, str] = outer.names if outer else {}
        """The request's own names of the engine's parameters, for error messages."""

    def take(self, name: str) -> Any:
        """Read a field: its value, or None where it is missing."""
        return self._left.pop(name, None)

    def peek(self, name: str) -> Any:
        """The value of a field, which stays unread; None where it is missing or was read."""
        return self._left.get(name)

    def read(self, table: Table, values: Values | None = None) -> Values:
        """The values of all fields that are given and not null. Raises `InvalidParameter` for a value that a check does
        not pass, for a refused field, for one that is needed and missing, and where `strict` for one passed over."""
        values = defaultdict(dict) if values is None else values
        for name, field in table.items():
            value, full = self._left.pop(name, None), self._within + name
            if value is None:
                if field.needed:
                    raise InvalidParameter(full, f"is missing: {field.note}")
            elif field.to == "ignored" or (
                field.to == "hint" and not isinstance(value, Mapping if field.inner else bool)
            ):
                self.skip(name)
            elif field.to == "refused":
                if value:
                    raise InvalidParameter(full, field.note, value)
            elif field.inner is not None:
                Fields(value, strict=self._strict, name=full, outer=self).read(field.inner, values)
            else:
                kept = value if field.check is None else field.check(full, value)
                values["own" if field.to == "hint" else field.to][field.ours] = kept
                self.names["max_tokens" if field.to == "limit" else field.ours] = full
        for name in [name for name, value in self._left.items() if value is not None]:
            if "*" in table:
                raise InvalidParameter((self._within + name)[:100], table["*"].note)
            self.skip(name)
        return values

    def skip(self, name: str) -> None:
        """Note that a field, or an item of one, changes nothing. Raises `InvalidParameter` where `strict`."""
        name = (self._within + name)[:100]
        if self._strict:
            raise InvalidParameter(name, "is not served here")
        self.ignored.append(name)


def objects(name: str, value: object, form: str = "a list of objects") -> list[tuple[str, Mapping[str, Any]]]:
    """The objects in a list, each with its path ("tools[2]"). Raises `InvalidParameter`; it calls the list `form`."""
    if not isinstance(value, (list, tuple)):
        raise InvalidParameter(name, f"must be {form}", value)
    return [(f"{name}[{at}]", as_object(f"{name}[{at}]", item)) for at, item in enumerate(value)]

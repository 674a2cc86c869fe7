"""Formats: those of JSON Schema hold, any other says nothing, or is refused by name where that is asked for."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone
from random import Random
from typing import Any, get_type_hints
from uuid import UUID

import pytest
from pydantic import (
    UUID1,
    UUID4,
    AwareDatetime,
    BaseModel,
    FutureDate,
    IPvAnyAddress,
    NaiveDatetime,
    PastDatetime,
    TypeAdapter,
)
from support.data import cases_of

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar import Grammar
from asyncengine.grammar.lower import fragment
from asyncengine.grammar.schema.formats import PATTERNS
from asyncengine.grammar.schemas import class_schema

from .oracle import accepts, complaint, matcher
from .schema_check import is_format
from .test_readable_json import text_of_walk

ROWS: dict[str, Any] = cases_of(__file__)


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_written_has_the_format(name: str) -> None:
    found, random = matcher(Grammar.json_schema({"type": "string", "format": name})), Random(name)
    for _ in range(200):
        text = text_of_walk(found, random)
        assert is_format(name, text), text


NESTED = ROWS["nested"]


def test_strict_refuses_by_name_what_a_string_can_meet() -> None:
    features = (("format", "/properties/a/format"), ("format", "/properties/b/items/format"))
    for make in (
        lambda: matcher(Grammar.json_schema(NESTED, formats="strict")),
        lambda: fragment(Grammar.json_schema(NESTED, formats="strict")),
    ):
        with pytest.raises(GrammarUnsupported) as refused:
            make()
        assert refused.value.features == features
    for name in PATTERNS:
        assert complaint(Grammar.json_schema({"type": "string", "format": name}, formats="strict")) == ""
    tool = {"name": "f", "parameters": NESTED}
    assert "'format' at /$defs/tool_0/properties/a/format" in complaint(Grammar.tool_calls([tool], formats="strict"))
    with pytest.raises(GrammarError, match="formats"):
        Grammar.json_schema(True, formats="loose")  # type: ignore[arg-type]
    assert Grammar.json_schema(NESTED, formats="strict").key != Grammar.json_schema(NESTED).key


@pytest.mark.parametrize("options", [{}, *({"formats": "strict", "unsupported": u} for u in ("ignore", "validate"))])
def test_other_formats_say_nothing_beside_a_bound_and_without(options: dict[str, Any]) -> None:
    for schema in (NESTED, {"type": "string", "allOf": [{"format": "x"}, {"format": "y", "minLength": 1}]}):
        grammar = Grammar.json_schema(schema, **options)
        text = '{"a": "x", "n": 0.75, "b": ["y"]}' if schema is NESTED else '"x"'
        assert accepts(grammar, text)
        assert accepts(Grammar.lark(f"start: {fragment(grammar)}"), text)
    assert accepts(Grammar.lark('start: %json {"type": "string", "format" : "x"}'), '"y"')
    assert not accepts(Grammar.json_schema(NESTED), '{"c": "x"}')


class Ids(BaseModel):
    """Identifiers of every kind."""

    one: UUID1
    four: UUID4
    any: UUID
    host: IPvAnyAddress


class Times(BaseModel):
    """Dates and times of every kind."""

    naive: NaiveDatetime
    aware: AwareDatetime
    either: datetime
    clock: time
    span: timedelta


@pytest.mark.parametrize(("model", "name"), [(model, name) for model in (Ids, Times) for name in model.model_fields])
def test_formats_of_pydantic_s_own_types_are_what_pydantic_reads(model: type[BaseModel], name: str) -> None:
    schema = class_schema(model)["properties"][name]
    found, random = matcher(Grammar.json_schema(schema, formats="strict")), Random(name)
    for _ in range(100):
        TypeAdapter(get_type_hints(model, include_extras=True)[name]).validate_python(text_of_walk(found, random))


class Dated(Times):
    """Further dates and times, some of which no format tells apart."""

    past: PastDatetime
    day: FutureDate
    perhaps: datetime | None


EAST = timezone(timedelta(hours=5, minutes=30))
NAIVE, AWARE = datetime(2020, 2, 29, 9, 30, 1, 5), datetime(2020, 2, 29, 9, 30, tzinfo=EAST)


@pytest.mark.parametrize(
    ("one", "clock", "span"),
    [
        (NAIVE, time(9, 30), timedelta(seconds=-1.5)),
        (AWARE, time(9, 30, 0, 7, EAST), timedelta(days=400, microseconds=3)),
    ],
)
def test_what_pydantic_writes_of_dates_and_times_can_be_written(one: datetime, clock: time, span: timedelta) -> None:
    found = Dated(
        naive=NAIVE, aware=AWARE, either=one, clock=clock, span=span, past=one, day=date(2400, 1, 1), perhaps=one
    )
    assert accepts(Grammar.json_schema(Dated), found.model_dump_json())
    wrong = found.model_dump_json().replace('"naive":"2020-02-29T09:30:01.000005"', f'"naive":"{AWARE.isoformat()}"')
    assert wrong != found.model_dump_json()
    assert not accepts(Grammar.json_schema(Dated), wrong)

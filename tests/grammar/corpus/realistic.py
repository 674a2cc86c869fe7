"""Schemas as people write them: function calls, records to extract, documents of known standards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make
from .combined import INTEGER, NULL, STRING, record

NUMBER = {"type": "number"}
BOOLEAN = {"type": "boolean"}
DATE = {"type": "string", "format": "date"}


def _enquiries() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    unit = {"enum": ["celsius", "fahrenheit"]}
    return {
        "get_weather": (record({"city": STRING, "unit": unit}, "unit"), {"city": "Zürich", "unit": "celsius"}),
        "search": (
            record(
                {"query": {"type": "string", "minLength": 1}, "limit": {"type": "integer", "minimum": 1, "maximum": 50}}
            ),
            {"query": "asyncio queues", "limit": 5},
        ),
        "send_email": (
            record(
                {
                    "to": {"type": "array", "items": {"type": "string", "format": "email"}, "minItems": 1},
                    "subject": STRING,
                    "body": STRING,
                }
            ),
            {"to": ["me@example.org"], "subject": "Hi", "body": "Line one\nLine two"},
        ),
        "create_event": (
            record(
                {
                    "title": STRING,
                    "start": {"type": "string", "format": "date-time"},
                    "minutes": {"type": "integer", "multipleOf": 15, "minimum": 15},
                }
            ),
            {"title": "Stand-up", "start": "2026-11-21T09:00:00Z", "minutes": 30},
        ),
    }


def _actions() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    return {
        "convert": (
            record(
                {
                    "amount": {"type": "number", "exclusiveMinimum": 0},
                    "from": {"enum": ["EUR", "USD"]},
                    "to": {"enum": ["EUR", "USD"]},
                }
            ),
            {"amount": 12.5, "from": "EUR", "to": "USD"},
        ),
        "read_file": (
            record({"path": {"type": "string", "pattern": "^/[^\\x00]*$"}, "lines": {"anyOf": [INTEGER, NULL]}}),
            {"path": "/etc/hosts", "lines": None},
        ),
        "run_sql": (
            record(
                {"statement": STRING, "parameters": {"type": "array", "items": {"type": ["string", "number", "null"]}}}
            ),
            {"statement": "select ?", "parameters": [1, None, "a"]},
        ),
        "set_light": (
            record(
                {
                    "room": {"enum": ["kitchen", "hall"]},
                    "on": BOOLEAN,
                    "level": {"type": "integer", "minimum": 0, "maximum": 100},
                },
                "level",
            ),
            {"room": "hall", "on": True},
        ),
        "no_arguments": (record({}), {}),
        "translate": (
            record({"text": STRING, "to": {"type": "string", "pattern": "^[a-z]{2}(-[A-Z]{2})?$"}}),
            {"text": "你好", "to": "en-GB"},
        ),
    }


def tools() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name -> (schema of the arguments, a call)."""
    return {**_enquiries(), **_actions()}


def calls() -> Iterator[Case]:
    known = tools()
    branches = []
    for name, (schema, call) in known.items():
        yield make("tool", name, schema, [call])
        branches.append(record({"name": {"const": name}, "arguments": schema}))
    valid = [{"name": name, "arguments": call} for name, (_, call) in known.items()]
    crossed = [{"name": "get_weather", "arguments": known["search"][1]}, {"name": "no_such", "arguments": {}}]
    yield make("tool", "any_of_all", {"anyOf": branches}, valid, crossed)
    yield make(
        "tool",
        "list_of_calls",
        {"type": "array", "items": {"anyOf": branches}, "minItems": 1},
        [valid, valid[:1]],
        [[], crossed],
    )


def patches() -> Iterator[Case]:
    pointer = {"type": "string", "pattern": "^(/[^/~]*(~[01][^/~]*)*)*$"}
    value_ops = record({"op": {"enum": ["add", "replace", "test"]}, "path": pointer, "value": {}})
    move_ops = record({"op": {"enum": ["move", "copy"]}, "path": pointer, "from": pointer})
    remove = record({"op": {"const": "remove"}, "path": pointer})
    patch = {"type": "array", "items": {"anyOf": [value_ops, move_ops, remove]}}
    good = [
        {"op": "add", "path": "/a/b", "value": [1]},
        {"op": "move", "path": "/c", "from": "/d~1e"},
        {"op": "remove", "path": "/x"},
    ]
    bad = [[{"op": "add", "path": "/a"}], [{"op": "remove", "path": "a"}], [{"op": "drop", "path": "/a"}]]
    yield make("document", "json_patch", patch, [good, []], bad)


def maps() -> Iterator[Case]:
    position = {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 3}
    point = record({"type": {"const": "Point"}, "coordinates": position})
    line = record({"type": {"const": "LineString"}, "coordinates": {"type": "array", "items": position, "minItems": 2}})
    feature = record(
        {"type": {"const": "Feature"}, "geometry": {"anyOf": [point, line]}, "properties": {"type": ["object", "null"]}}
    )
    collection = record({"type": {"const": "FeatureCollection"}, "features": {"type": "array", "items": feature}})
    place = {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [8.54, 47.37]},
        "properties": {"name": "Zürich"},
    }
    yield make("document", "geojson", collection, [{"type": "FeatureCollection", "features": [place]}])
    entity = record(
        {"id": INTEGER, "label": {"type": "string", "minLength": 1}, "kind": {"enum": ["person", "place", "thing"]}}
    )
    edge = record({"source": INTEGER, "target": INTEGER, "relation": STRING})
    graph = record({"nodes": {"type": "array", "items": entity}, "edges": {"type": "array", "items": edge}})
    nodes = [{"id": 1, "label": "Ada", "kind": "person"}, {"id": 2, "label": "London", "kind": "place"}]
    yield make(
        "document",
        "knowledge_graph",
        graph,
        [{"nodes": nodes, "edges": [{"source": 1, "target": 2, "relation": "lives in"}]}],
    )


def answers() -> Iterator[Case]:
    steps = record({"explanation": STRING, "output": STRING})
    reasoning = record(
        {
            "steps": {"type": "array", "items": steps, "minItems": 1},
            "answer": NUMBER,
            "confidence": {"type": "number", "minimum": 0, "maximum": 1},
        }
    )
    yield make(
        "document",
        "worked_answer",
        reasoning,
        [{"steps": [{"explanation": "2x = 4", "output": "x = 2"}], "answer": 2, "confidence": 0.9}],
    )
    label = record(
        {
            "sentiment": {"enum": ["positive", "neutral", "negative"]},
            "topics": {"type": "array", "items": {"enum": ["price", "service", "food"]}, "maxItems": 3},
        }
    )
    yield make("document", "classification", label, [{"sentiment": "neutral", "topics": ["food"]}])


def files() -> Iterator[Case]:
    package = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]*$", "maxLength": 60},
            "version": {"type": "string", "pattern": "^\\d+\\.\\d+\\.\\d+$"},
            "scripts": {"type": "object", "additionalProperties": STRING},
            "dependencies": {
                "type": "object",
                "patternProperties": {"^[a-z@][a-z0-9/-]*$": STRING},
                "additionalProperties": False,
            },
            "private": BOOLEAN,
        },
        "required": ["name", "version"],
    }
    yield make(
        "document",
        "package",
        package,
        [
            {
                "name": "a-b",
                "version": "1.0.0",
                "scripts": {"t": "x"},
                "dependencies": {"@a/b": "^1"},
                "private": True,
                "more": [1],
            }
        ],
        [{"name": "A", "version": "1.0.0"}],
    )


def people() -> Iterator[Case]:
    parts = {
        "title": STRING,
        "born": DATE,
        "email": {"type": "string", "format": "email"},
        "site": {"type": "string", "format": "uri"},
    }
    person = record(
        {
            **parts,
            "id": {"type": "string", "format": "uuid"},
            "phone": {"type": ["string", "null"], "pattern": "^\\+[0-9]{6,15}$"},
        },
        "site",
        "phone",
    )
    someone = {
        "title": "Dr",
        "born": "1980-02-29",
        "email": "a@b.org",
        "site": "https://b.org/",
        "id": "123e4567-e89b-12d3-a456-426614174000",
        "phone": "+41441234567",
    }
    yield make(
        "document", "contact", person, [someone], [{**someone, "born": "1980-02-30"}, {**someone, "phone": "044"}]
    )
    span = record(
        {"start": {"type": "integer", "minimum": 0}, "end": {"type": "integer", "minimum": 0}, "text": STRING}
    )
    extraction = {
        "type": "object",
        "additionalProperties": {"type": "array", "items": span, "minItems": 1},
        "minProperties": 1,
    }
    yield make(
        "document",
        "extraction_by_label",
        extraction,
        [{"PER": [{"start": 0, "end": 3, "text": "Ada"}]}],
        [{}, {"PER": []}],
    )


def machines() -> Iterator[Case]:
    state = {
        "$defs": {
            "state": record(
                {
                    "on": {"type": "object", "additionalProperties": STRING},
                    "states": {"type": "object", "additionalProperties": {"$ref": "#/$defs/state"}},
                },
                "states",
            )
        },
        "$ref": "#/$defs/state",
    }
    yield make("document", "state_machine", state, [{"on": {"go": "b"}, "states": {"b": {"on": {}}}}, {"on": {}}])


def realistic() -> Iterator[Case]:
    yield from calls()
    yield from patches()
    yield from maps()
    yield from answers()
    yield from files()
    yield from people()
    yield from machines()

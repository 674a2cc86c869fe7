"""GET /openapi.json: the paths of an app and the fields of their requests, in the form of OpenAPI 3.1."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from asyncengine import __version__
from asyncengine.checks import as_choice, as_integer, as_number, as_seconds, as_switch, as_text
from asyncengine.sampling_params import SamplingParams
from asyncengine.serve.fields import PATHS, TABLES, Field, Table, as_object

TYPES: Mapping[Any, str] = {
    as_integer: "integer", as_number: "number", as_seconds: "number", as_switch: "boolean", as_text: "string",
    as_choice: "string", as_object: "object",
}  # fmt: skip
"""JSON's types of what a check takes."""
FORMS = {"list": ("array",), "texts": ("string", "array"), "mapping": ("object",)}
"""JSON's types of fields that are checked where they are used."""
TEXT, MAYBE = {"type": "string"}, {"type": ["string", "null"]}


def schema_of(field: Field) -> dict[str, Any]:
    """JSON schema of a field's values; null is as good as no field, where it is not needed."""
    if field.inner is not None:
        return object_of(field.inner)
    check, _ = SamplingParams.checks().get(field.ours, (None, True)) if field.to == "params" else (field.check, True)
    keywords: dict[str, Any] = getattr(check, "keywords", {})
    kind = TYPES.get(getattr(check, "func", check))
    types = FORMS.get(field.takes, ()) if kind is None else (kind,)
    nothing = () if field.needed else ("null",)
    low = "exclusiveMinimum" if keywords.get("exclusive_low") else "minimum"
    made = {"type": [*types, *nothing], low: keywords.get("low"), "maximum": keywords.get("high")} if types else {}
    made["enum"] = [*keywords["choices"], None] if "choices" in keywords else None
    note = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", field.note)
    made["description"] = "passed over: it changes nothing here" if field.to == "ignored" else note
    return {name: value for name, value in made.items() if value not in (None, "")}


def object_of(table: Table) -> dict[str, Any]:
    """JSON schema of the objects that are read by a table, without the fields that it refuses."""
    known = {name: schema_of(field) for name, field in table.items() if field.to != "refused"}
    return _object(known, [name for name, field in table.items() if field.needed])


def _object(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _operation(path: str, method: str) -> dict[str, Any]:
    name = PATHS.get(path, "")
    error = "anthropic_error" if name == "messages" else "error"
    kinds = ["application/json", "text/event-stream"] if "stream" in TABLES.get(name, {}) else ["application/json"]
    made: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", method + path),
        "responses": {
            "200": {"description": "The answer", "content": {kind: {} for kind in kinds} if name else {}},
            "default": {"description": "A refusal or a failure", "content": _json(error)},
        },
        "parameters": [
            {"name": each, "in": "path", "required": True, "schema": TEXT} for each in re.findall(r"{(\w+)", path)
        ],
    }
    return made | ({"requestBody": {"required": True, "content": _json(name)}} if name else {})


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def route(routes: Sequence[BaseRoute]) -> Route:
    """The path of the document, which has all of `routes` in it."""
    error = _object({"message": TEXT, "type": TEXT, "param": MAYBE, "code": MAYBE}, ("message", "type"))
    theirs = _object({"message": TEXT, "type": TEXT}, ("message", "type"))
    schemas = {name: object_of(TABLES[name]) for name in dict.fromkeys(PATHS.values())} | {
        "error": _object({"error": error}, ("error",)),
        "anthropic_error": _object({"type": TEXT, "error": theirs, "request_id": MAYBE}, ("type", "error")),
    }

    async def openapi(_request: Request) -> Response:
        return JSONResponse(document)

    made, paths = Route("/openapi.json", openapi, methods=["GET"]), dict[str, dict[str, Any]]()
    for each in [*(each for each in routes if isinstance(each, Route)), made]:
        for method in sorted((each.methods or set()) - {"HEAD"}):
            operation = _operation(each.path, method.lower())
            paths.setdefault(each.path.replace(":path}", "}"), {})[method.lower()] = operation
    info = {"title": "asyncengine", "version": __version__}
    document = {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
    return made

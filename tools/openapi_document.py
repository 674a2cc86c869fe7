"""integrations/http/page/openapi.json: the paths of an app and the fields of their requests, as OpenAPI 3.1 has them.

    python -m tools.openapi_document           writes the file

Fields and their limits are those by which requests are read (`integrations/http/fields.txt`, `SamplingParams`), paths
are those of an app's routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route

from asyncengine import __version__
from asyncengine.checks import as_choice, as_integer, as_number, as_seconds, as_switch, as_text
from asyncengine.integrations.http.asgi import routes
from asyncengine.integrations.http.fields import PATHS, TABLES, Field, Table, as_object
from asyncengine.integrations.http.models import Serving
from asyncengine.sampling_params import SamplingParams

FILE = Path(__file__).parents[1] / "integrations" / "http" / "page" / "openapi.json"

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
    error = "anthropic_error" if name == "messages" else "ollama_error" if path.startswith("/api/") else "error"
    stream = "application/x-ndjson" if path.startswith("/api/") else "text/event-stream"
    kinds = ["application/json", stream] if "stream" in TABLES.get(name, {}) else ["application/json"]
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


def document() -> dict[str, Any]:
    """The whole document."""
    error = _object({"message": TEXT, "type": TEXT, "param": MAYBE, "code": MAYBE}, ("message", "type"))
    theirs = _object({"message": TEXT, "type": TEXT}, ("message", "type"))
    schemas = {name: object_of(TABLES[name]) for name in dict.fromkeys(PATHS.values())} | {
        "error": _object({"error": error}, ("error",)),
        "ollama_error": _object({"error": TEXT}, ("error",)),
        "anthropic_error": _object({"type": TEXT, "error": theirs, "request_id": MAYBE}, ("type", "error")),
    }
    models: Any = SimpleNamespace(group=None, watch=lambda _: None)
    paths: dict[str, dict[str, Any]] = {}
    for each in [each for each in routes(Serving(models)) if isinstance(each, Route)]:
        for method in sorted((each.methods or set()) - {"HEAD"}):
            operation = _operation(each.path, method.lower())
            paths.setdefault(each.path.replace(":path}", "}"), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0", "info": {"title": "asyncengine", "version": __version__},
        "servers": [{"url": ".", "description": "Wherever the app is mounted"}],
        "paths": paths, "components": {"schemas": schemas},
    }  # fmt: skip


def _lines(parts: Mapping[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(name)}: {json.dumps(part)}" for name, part in parts.items())


def text() -> str:
    """The whole file, a line for each path and each table, so that changes can be read."""
    made = document()
    parts = made.pop("components")["schemas"], made.pop("paths")
    schemas, paths = (
        ",\n".join(f"{json.dumps(name)}: {json.dumps(each)}" for name, each in part.items()) for part in parts
    )
    return f'{json.dumps(made)[:-1]},\n"components": {{"schemas": {{\n{schemas}\n}}}},\n"paths": {{\n{paths}\n}}}}\n'


def main() -> None:
    FILE.touch()  # an app reads it when it is made
    FILE.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()

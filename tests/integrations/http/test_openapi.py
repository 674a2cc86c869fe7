"""/openapi.json is a valid document, and says of requests what the server does with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from support.data import cases_of

from asyncengine.integrations.http.fields import PATHS

ROWS: dict[str, Any] = cases_of(__file__)

HTTP = {"get", "post", "delete"}
ASK: dict[str, dict[str, Any]] = ROWS["ask"]


@pytest.fixture(scope="module")
def document(demo_url: str) -> dict[str, Any]:
    answer = httpx.get(f"{demo_url}/openapi.json")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from [node["$ref"]] if "$ref" in node else []
    for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from refs(inner)


def validator(document: dict[str, Any], name: str) -> Draft202012Validator:
    return Draft202012Validator(document["components"]["schemas"][name])


def test_it_follows_the_specification(document: dict[str, Any]) -> None:
    """The rules of OpenAPI 3.1 that this document can break; openapi-spec-validator, by hand, found no others."""
    assert re.fullmatch(r"3\.1\.\d+", document["openapi"])
    assert document.keys() == {"openapi", "info", "servers", "paths", "components"}
    assert {"title", "version"} <= document["info"].keys()
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for ref in refs(document):
        assert ref.removeprefix("#/components/schemas/") in document["components"]["schemas"]
    ids = []
    for path, item in document["paths"].items():
        assert path.startswith("/")
        assert item.keys() <= HTTP
        for operation in item.values():
            ids.append(operation["operationId"])
            assert [each["name"] for each in operation["parameters"]] == re.findall(r"{(.*?)}", path)
            assert all(each["in"] == "path" and each["required"] is True for each in operation["parameters"])
            assert all(response["description"] for response in operation["responses"].values())
            assert {"200", "default"} == operation["responses"].keys()
    assert len(ids) == len(set(ids))


def test_every_path_is_in_it(document: dict[str, Any]) -> None:
    assert document["paths"].keys() >= {*PATHS, "/openapi.json", "/health", "/v1/models/{name}", "/v1/responses/{id}"}
    assert [path for path in PATHS if "requestBody" not in document["paths"][path]["post"]] == []


@pytest.mark.parametrize("path", ASK)
def test_limits_are_the_servers(demo_url: str, document: dict[str, Any], path: str) -> None:
    """A value beyond a limit breaks the schema, and is refused by the server in the form of its error."""
    operation = document["paths"][path]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    error = operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = document["components"]["schemas"][name]
    valid = {**ASK[path], "foo": 1, "user": None}
    validator(document, name).validate(valid)
    assert httpx.post(demo_url + path, json=valid).status_code == 200
    wrong: list[dict[str, Any]] = [{name: None} for name in schema["required"]]
    for field, about in schema["properties"].items():
        if "passed over" in about.get("description", ""):
            continue
        if "minimum" in about or "exclusiveMinimum" in about:
            wrong.append({field: about.get("minimum", about.get("exclusiveMinimum")) - ("minimum" in about)})
        wrong += [{field: about["maximum"] + 1}] if about.get("maximum", 1 << 40) < 1 << 40 else []
        wrong += [{field: "none of them"}] if "enum" in about else []
        wrong += [{field: "yes"}] if about.get("type") == ["boolean", "null"] and field != "think" else []
    assert len(wrong) > 5 or path == "/tokenize"
    for given in wrong:
        assert not validator(document, name).is_valid({**ASK[path], **given}), given
        answer = httpx.post(demo_url + path, json={**ASK[path], **given})
        assert answer.status_code == 400, (given, answer.text)
        validator(document, error).validate(answer.json())
        assert "anthropic" in error or answer.json()["error"]["param"], json.dumps(given)

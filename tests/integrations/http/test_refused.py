"""Bodies that cannot be read, and requests with a wrong field to every path: each is refused, and named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.http_server import serving_models

from asyncengine.integrations.http import body
from asyncengine.integrations.http.problems import Problem

PATHS: dict[str, Any] = json.loads((Path(__file__).parent / "refused.json").read_text(encoding="utf-8"))
"""A good body for each path, and rows of changes of it with the name in the error, and with the status if not 400."""
ROWS = [(path, *row, *[400][: 3 - len(row)]) for path, about in PATHS.items() for row in about["refused"]]


def grown(value: Any) -> Any:
    """A value of the file, in which {"of": X, "times": N} stands for X repeated so many times."""
    if isinstance(value, list):
        return [grown(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"of", "times"}:
        return value["of"] * value["times"]
    return {name: grown(inner) for name, inner in value.items()}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    models = {"demo": "demo", "embedder": "demo-embed", "reranker": "demo-rerank"}
    settings = {"num_threads": 1, "kv_cache_memory": "16MiB"}
    with serving_models(models, settings) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.mark.parametrize(("path", "change", "field", "status"), ROWS)
def test_the_error_names_the_field(client: httpx.Client, path: str, change: Any, field: str, status: int) -> None:
    answer = client.post(path, json=grown({**PATHS[path]["body"], **change}))
    assert answer.status_code == status, answer.text
    told = answer.json()
    if path.startswith("/api/"):
        assert told.keys() == {"error"}
        assert field in told["error"]
    elif path == "/v1/messages":
        assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
        assert told["error"]["message"].startswith(field)
        assert told["request_id"] == answer.headers["request-id"] != ""
    else:
        assert told["error"]["param"] == field
        assert told["error"]["message"]


VALUE = {"a": [1, -2.5e3, 'é "\\ \u2028 😀', None, True, {"b": {}, "c": []}], "": [[[]]]}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_body_in_any_encoding_of_json(encoding: str) -> None:
    assert body._parse(json.dumps(VALUE, ensure_ascii=False).encode(encoding)) == VALUE
    assert body._parse(json.dumps(VALUE, indent=1).encode(encoding)) == VALUE


@pytest.mark.parametrize(
    "value", [[0] * (body.MOST_VALUES + 1), {str(n): "" for n in range(body.MOST_STRINGS // 2 + 1)}], ids=type
)
def test_too_many_values_are_refused_before_they_are_made(value: Any) -> None:
    with pytest.raises(Problem, match=f"over {body.MOST_STRINGS} and {body.MOST_VALUES}") as refused:
        body._parse(json.dumps(value).encode())
    assert refused.value.status == 413
    assert body._parse(json.dumps('"' * body.MOST_STRINGS * 2).encode()).count('"') == 2 * body.MOST_STRINGS

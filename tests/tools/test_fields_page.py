"""docs/http_fields.md and page/openapi.json say what the tables of fields say: `python -m tools.fields_page` and
`python -m tools.openapi_document` write them anew."""

from __future__ import annotations

from dataclasses import fields

from asyncengine.integrations.http.fields import PATHS, TABLES
from asyncengine.integrations.http.turn import Turn
from asyncengine.options import ChatKeywords, RequestOptions
from asyncengine.sampling_params import SamplingParams
from tools import fields_page, openapi_document


def test_it_is_as_written() -> None:
    assert fields_page.PAGE.read_text(encoding="utf-8") == fields_page.page(), "run python -m tools.fields_page"
    written = openapi_document.FILE.read_text(encoding="utf-8")
    assert written == openapi_document.text(), "run python -m tools.openapi_document"


def test_fields_go_where_there_is_such_a_name() -> None:
    """A name in a table is the engine's own: a misspelt one would be an error of the server at each request."""
    known = {
        "params": {field.name for field in fields(SamplingParams)},
        "options": {field.name for field in fields(RequestOptions)},
        "chat": {*ChatKeywords.__annotations__, "response_format"},
        "turn": {field.name for field in fields(Turn)},
    }
    for name in ("chat", "completions", "responses", "messages"):
        rows = [row for _, row in fields_page.rows(TABLES[name])]
        assert [row for row in rows if row.to in known and row.ours not in known[row.to]] == []
        assert [row for row in rows if row.to not in (*known, *OTHERS)] == []
    assert set(PATHS.values()) <= TABLES.keys()


OTHERS = ("own", "hint", "ignored", "refused", "extra", "guide", "limit", "template")

"""docs/http_fields.md: every field of HTTP requests, from the tables by which they are read.

python -m tools.fields_page                writes the page
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from asyncengine.integrations.http.fields import PATHS, TABLES, Field, Table

PAGE = Path(__file__).parents[1] / "docs" / "http_fields.md"
WORDS = {"switch": "true or false", "object": "an object", "mapping": "an object", "list": "a list", "text": "a text"}
WORDS["texts"] = "a text or a list"


def rows(table: Table, within: str = "") -> list[tuple[str, Field]]:
    """Every field with its full name, those within objects in the place of the object."""
    found: list[tuple[str, Field]] = []
    for name, field in table.items():
        found += rows(field.inner, f"{within}{name}.") if field.inner else [(within + name, field)]
    return found


def section(name: str) -> str:
    """The part of one table: what is read, what is refused, what is passed over."""
    paths = ", ".join(f"`{path}`" for path, table in PATHS.items() if table == name)
    fields = [(field, row) for field, row in rows(TABLES[name]) if not field.endswith("*")]
    fields.sort(key=lambda each: not each[1].needed)
    lines = [f"## {paths}", "", "| field | takes | what comes of it |", "|---|---|---|"]
    read = [(field, row) for field, row in fields if row.to not in ("ignored", "refused")]
    for (takes, note), alike in groupby(read, lambda each: (each[1].takes, each[1].note)):
        words = WORDS.get(takes, takes.replace("..", " to ").removesuffix(" to ") + " or more" * takes.endswith(".."))
        lines.append(f"| {', '.join(shown(*each) for each in alike)} | {words} | {note} |")
    refused = [f"| `{field}` | refused | {row.note} |" for field, row in fields if row.to == "refused"]
    ignored = [f"`{field}`" for field, row in fields if row.to == "ignored"]
    return "\n".join([*lines, *refused, *(["", f"Passed over: {', '.join(ignored)}."] if ignored else [])])


def shown(name: str, field: Field) -> str:
    """A field as the page names it, with its name in the engine where that is another one."""
    other = field.to in ("params", "options", "chat") and field.ours != name
    return f"`{name}`" + (" (needed)" if field.needed else f" (`{field.ours}` in process)" if other else "")


def page() -> str:
    """The whole file."""
    sections = "\n\n".join(map(section, dict.fromkeys(PATHS.values())))
    return f"""# Fields of HTTP requests

Every field that [the server](howto/serve.md) knows, by path. Written by `python -m tools.fields_page` from the tables
by which requests are read (`integrations/http/fields.txt`); `tests/tools/test_fields_page.py` fails when this page does
not say what they say. Not to be edited by hand. A server has the same as JSON at `/openapi.json`, with the limits of
[sampling parameters](settings.md#sampling-parameters) as well.

null is as good as no field. Fields that are not listed are passed over like those that are: the response's header
`x-asyncengine-ignored` names them, and with `--strict` they are refused. A refused field may be null, false, 0 or
empty.

{sections}
"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

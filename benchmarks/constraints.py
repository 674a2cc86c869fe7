"""The constraints that grammar measurements are made on: data only, each with outputs that satisfy it.

The names are those of the tables of published comparisons kept with the project; the constraints are our own.
JSON samples are written compactly; lay them out as the whitespace under test wants.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Constraint:
    name: str
    kind: Literal["regex", "choice", "json_schema", "lark"]
    value: Any
    """The pattern, the list of strings, the schema, or the Lark text."""
    samples: tuple[str, ...]


INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
STRING: dict[str, Any] = {"type": "string"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}


def record(properties: dict[str, Any], *optional: str) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def array(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


def text(low: int, high: int) -> dict[str, Any]:
    return {"type": "string", "minLength": low, "maxLength": high}


def dumped(*instances: Any) -> tuple[str, ...]:
    return tuple(json.dumps(instance, ensure_ascii=False, separators=(",", ":")) for instance in instances)


# ---------------------------------------------------------------- regular

EMAIL = r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*\.[a-zA-Z]{2,10}"
FEELINGS = ["positive", "negative", "neutral", "mixed", "not enough information"]

# ---------------------------------------------------------------- JSON

SMALL = record({"name": STRING, "age": {"type": "integer", "minimum": 0, "maximum": 150}, "active": BOOLEAN})

ADDRESS = record({"street": STRING, "city": STRING, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})
MEDIUM = record(
    {
        "id": INTEGER,
        "name": text(1, 60),
        "email": {"type": "string", "format": "email"},
        "roles": array({"enum": ["admin", "editor", "viewer"]}, minItems=1),
        "address": ADDRESS,
        "score": {"type": ["number", "null"]},
        "tags": array(STRING),
    },
    "tags",
)
PERSON = {"id": 17, "name": "Ada Lovelace", "email": "ada@example.org", "roles": ["admin", "viewer"]}
PLACE = {"street": "12 St James's Square", "city": "London", "zip": "12345"}

LARGE_GROUPS = ("customer", "billing", "shipping", "payment", "contact", "audit")
LARGE_FIELDS = {
    "identifier": INTEGER,
    "label": text(0, 40),
    "enabled": BOOLEAN,
    "amount": {"type": "number", "minimum": 0},
    "state": {"enum": ["new", "open", "held", "closed"]},
    "created": {"type": "string", "format": "date"},
    "notes": array(STRING),
    "owner": {"anyOf": [STRING, {"type": "null"}]},
}
LARGE = record(
    {group: record({f"{group}_{name}": part for name, part in LARGE_FIELDS.items()}) for group in LARGE_GROUPS}
)


def large(label: str, amount: float, owner: str | None) -> dict[str, Any]:
    values = [1024, label, True, amount, "open", "2026-11-21", ["checked", label], owner]
    return {
        group: {f"{group}_{name}": value for name, value in zip(LARGE_FIELDS, values, strict=True)}
        for group in LARGE_GROUPS
    }


NODE = {"$ref": "#/$defs/node"}
RECURSIVE = {"$defs": {"node": record({"name": STRING, "value": INTEGER, "children": array(NODE)})}, **NODE}


def tree(depth: int, width: int) -> dict[str, Any]:
    children = [tree(depth - 1, width) for _ in range(width)] if depth else []
    return {"name": f"node at {depth}", "value": depth, "children": children}


ENUM_200 = [
    f"{colour}_{thing}_{index}"
    for index in range(10)
    for colour in ("red", "green", "blue", "black")
    for thing in ("fox", "owl", "bear", "hare", "toad")
]
ENUM = record({"first": {"enum": ENUM_200}, "second": {"enum": ENUM_200}})

TOOLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "get_weather": (
        record({"city": STRING, "unit": {"enum": ["celsius", "fahrenheit"]}}),
        {"city": "Zürich", "unit": "celsius"},
    ),
    "search_web": (
        record({"query": text(1, 200), "limit": {"type": "integer", "minimum": 1, "maximum": 20}}),
        {"query": "asyncio", "limit": 5},
    ),
    "send_email": (
        record({"to": array({"type": "string", "format": "email"}, minItems=1), "subject": STRING, "body": STRING}),
        {"to": ["a@b.org"], "subject": "Hi", "body": "See you."},
    ),
    "create_event": (
        record({"title": STRING, "start": {"type": "string", "format": "date-time"}, "minutes": INTEGER}),
        {"title": "Call", "start": "2026-11-21T09:00:00Z", "minutes": 30},
    ),
    "convert_money": (
        record(
            {"amount": NUMBER, "source": {"enum": ["EUR", "USD", "CHF"]}, "target": {"enum": ["EUR", "USD", "CHF"]}}
        ),
        {"amount": 12.5, "source": "EUR", "target": "CHF"},
    ),
    "read_file": (
        record({"path": STRING, "first_line": INTEGER, "lines": INTEGER}, "first_line", "lines"),
        {"path": "/etc/hosts"},
    ),
    "write_file": (
        record({"path": STRING, "content": STRING, "append": BOOLEAN}),
        {"path": "a.txt", "content": "one\ntwo\n", "append": False},
    ),
    "run_query": (
        record({"statement": STRING, "parameters": array({"type": ["string", "number", "null"]})}),
        {"statement": "select ?", "parameters": [1, None]},
    ),
    "set_light": (
        record(
            {"room": {"enum": ["kitchen", "hall", "attic"]}, "level": {"type": "integer", "minimum": 0, "maximum": 100}}
        ),
        {"room": "hall", "level": 40},
    ),
    "translate": (
        record({"text": STRING, "language": {"type": "string", "pattern": "^[a-z]{2}$"}}),
        {"text": "Guten Tag", "language": "en"},
    ),
}
CALLS = {"anyOf": [record({"name": {"const": name}, "arguments": schema}) for name, (schema, _) in TOOLS.items()]}

MAX_LENGTH = record({"title": text(1, 100), "summary": text(10, 500), "body": text(0, 1000)})
SENTENCE = "The quick brown fox jumps over the lazy dog, and nobody minds. "

FORMATS = record(
    {
        "id": {"type": "string", "format": "uuid"},
        "day": {"type": "string", "format": "date"},
        "at": {"type": "string", "format": "date-time"},
        "mail": {"type": "string", "format": "email"},
        "host": {"type": "string", "format": "hostname"},
        "address": {"type": "string", "format": "ipv4"},
        "link": {"type": "string", "format": "uri"},
    }
)


def formatted(number: int) -> dict[str, str]:
    return {
        "id": f"123e4567-e89b-12d3-a456-4266141740{number:02d}",
        "day": f"2026-11-{number:02d}",
        "at": f"2026-11-{number:02d}T10:20:30.5+01:00",
        "mail": f"user.{number}@mail.example.org",
        "host": f"node-{number}.example.org",
        "address": f"10.0.{number}.254",
        "link": f"https://example.org/items/{number}?view=full#top",
    }


# ---------------------------------------------------------------- context-free

ARITHMETIC = r"""start: sum
sum: product (("+" | "-") product)*
product: power (("*" | "/") power)*
power: atom ("^" power)?
atom: NUMBER | "-" atom | "(" sum ")" | NAME "(" sum ("," sum)* ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z][a-z0-9]*/
%ignore / /
"""

SQL = r"""start: query
query: "SELECT " columns " FROM " table join* where? group? order? limit?
columns: "*" | column (", " column)*
column: expression (" AS " NAME)?
expression: NAME ("." NAME)? | CALL "(" ("*" | NAME ("." NAME)?) ")" | value
table: NAME (" " ALIAS)?
join: (" LEFT" | " INNER")? " JOIN " table " ON " condition
where: " WHERE " condition
condition: conjunction (" OR " conjunction)*
conjunction: comparison (" AND " comparison)*
comparison: expression OPERATOR (expression | "(" query ")") | expression " IS NULL" | membership
    | "NOT " comparison | "(" condition ")"
membership: expression " IN (" value (", " value)* ")"
group: " GROUP BY " expression (", " expression)* (" HAVING " condition)?
order: " ORDER BY " expression DIRECTION? (", " expression DIRECTION?)*
limit: " LIMIT " /[1-9][0-9]{0,5}/
value: /-?[0-9]+(\.[0-9]+)?/ | /'([^'\n]|'')*'/ | "NULL" | "TRUE" | "FALSE"
DIRECTION: " ASC" | " DESC"
CALL: "COUNT" | "SUM" | "AVG" | "MIN" | "MAX"
OPERATOR: " = " | " <> " | " < " | " > " | " <= " | " >= " | " LIKE "
ALIAS: /[a-z]/
NAME: /[a-z_][a-z0-9_]{0,30}/
"""

ANYTHING = [
    {"a": [1, 2.5, None, True], "b": {"c": "text", "日本": "🙂"}},
    {},
    {"list": [[], [[]], {"deep": {"deeper": {"deepest": [1e21, -0.5]}}}], "quote": 'say "hi"\n'},
]

CONSTRAINTS: tuple[Constraint, ...] = (
    Constraint(
        "regex_simple",
        "regex",
        r"\([0-9]{3}\) [0-9]{3}-[0-9]{4}",
        ("(555) 123-4567", "(010) 000-0000", "(999) 876-5432"),
    ),
    Constraint("regex_email", "regex", EMAIL, ("ada@example.org", "first.last+tag@mail.example.co.uk", "x_1%y@a-b.io")),
    Constraint("choice_5", "choice", FEELINGS, tuple(FEELINGS)),
    Constraint(
        "json_small",
        "json_schema",
        SMALL,
        dumped(
            {"name": "Ada", "age": 36, "active": True},
            {"name": "Zoë 🙂", "age": 0, "active": False},
            {"name": "", "age": 150, "active": True},
        ),
    ),
    Constraint(
        "json_medium",
        "json_schema",
        MEDIUM,
        dumped(
            {**PERSON, "address": PLACE, "score": 0.93, "tags": ["math", "loom"]},
            {**PERSON, "address": PLACE, "score": None},
            {**PERSON, "address": PLACE, "score": -12, "tags": []},
        ),
    ),
    Constraint(
        "json_large",
        "json_schema",
        LARGE,
        dumped(large("first", 12.5, None), large("Übung", 0, "Ada"), large("", 99999.99, "")),
    ),
    Constraint("json_recursive", "json_schema", RECURSIVE, dumped(tree(0, 0), tree(2, 2), tree(6, 1))),
    Constraint(
        "json_enum200",
        "json_schema",
        ENUM,
        dumped(*({"first": ENUM_200[index], "second": ENUM_200[-1 - index]} for index in (0, 77, 131))),
    ),
    Constraint(
        "tools10",
        "json_schema",
        CALLS,
        dumped(*({"name": name, "arguments": call} for name, (_, call) in TOOLS.items())),
    ),
    Constraint(
        "json_maxlen",
        "json_schema",
        MAX_LENGTH,
        dumped(*({"title": "On foxes", "summary": SENTENCE, "body": SENTENCE * times} for times in (0, 1, 15))),
    ),
    Constraint("json_formats", "json_schema", FORMATS, dumped(formatted(1), formatted(12), formatted(30))),
    Constraint("any_json", "json_schema", {"type": "object"}, dumped(*ANYTHING)),
    Constraint("ebnf_arith", "lark", ARITHMETIC, ("1", "2 * (x1(3, 4.5) - -1) ^ 2 / 7", "max(1, min(2, 3)) + 4")),
    Constraint(
        "ebnf_sql",
        "lark",
        SQL,
        (
            "SELECT * FROM users",
            "SELECT u.name, COUNT(*) AS n FROM users u LEFT JOIN orders o ON u.id = o.user_id"
            " WHERE u.age >= 18 AND (u.city = 'Zürich' OR u.city IS NULL)"
            " GROUP BY u.name HAVING COUNT(*) > 2 ORDER BY n DESC LIMIT 10",
            "SELECT id FROM items WHERE price < (SELECT AVG(price) FROM items) AND kind IN ('a', 'it''s', 3)",
        ),
    ),
)

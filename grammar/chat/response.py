"""From a request's `response_format` to a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.grammar.chat.schemas import TYPES, close_objects, plain_json, with_json_types
from asyncengine.grammar.schemas import with_local_references

FIELD = "response_format"


def response_grammar(response_format: object) -> Grammar | None:
    """The grammar that an answer must match; None for free text.

    OpenAI's {"type": "text" | "json_object" | "json_schema", ...}, a JSON schema as a dict, a `Grammar`, or a class or
    term that `Grammar.of` takes. Objects of a schema are closed unless its `strict` is False; then, too, what the
    grammar library cannot enforce is left out. Raises `InvalidParameter` naming the part.
    """
    if response_format is None:
        return None
    if isinstance(response_format, Grammar):
        return response_format
    if not isinstance(response_format, Mapping):
        try:
            return Grammar.of(response_format)
        except GrammarError as error:
            if type(error) is not GrammarError or error.field != "grammar":
                raise
            raise GrammarError(FIELD, error.limit, error.value) from None
        except (InvalidParameter, TypeError, ValueError) as error:
            raise InvalidParameter(FIELD, f"cannot be read as a grammar: {error}", response_format) from error
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and "schema" in response_format:  # as llama.cpp and Together write it
        return _schema_grammar(f"{FIELD}.schema", response_format["schema"], strict=True)
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "json_schema":
        return _named_schema(response_format.get("json_schema"))
    if not response_format or (isinstance(kind, str) and kind.lower() not in TYPES):
        shape = "must say its type: 'text', 'json_object' or 'json_schema', or be a JSON schema"
        raise InvalidParameter(FIELD, shape, response_format)
    return _schema_grammar(FIELD, response_format, strict=True)


def _named_schema(given: object) -> Grammar:
    at = f"{FIELD}.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidParameter(at, "must be a dict with name and schema", given)
    if "schema" not in given:
        raise InvalidParameter(f"{at}.schema", "is missing: the JSON schema of the answer")
    strict = given.get("strict")
    if strict not in (None, True, False):
        raise InvalidParameter(f"{at}.strict", "must be a bool", strict)
    grammar = _schema_grammar(f"{at}.schema", given["schema"], strict is not False)
    if given.get("key_order") is None:
        return grammar
    try:
        return replace(grammar, key_order=given["key_order"])
    except GrammarError as error:
        raise InvalidParameter(f"{at}.key_order", error.limit, error.value) from None


def _schema_grammar(field: str, schema: Any, strict: bool) -> Grammar:
    if not isinstance(schema, Mapping):
        raise InvalidParameter(field, "must be a JSON schema, as a dict", schema)
    plain = with_json_types(field, plain_json(field, schema))
    plain = with_local_references(plain, json.dumps(plain))
    text = json.dumps(close_objects(plain) if strict else plain, ensure_ascii=False, separators=(",", ":"))
    return Grammar(kind="json_schema", text=text, unsupported="error" if strict else "ignore")

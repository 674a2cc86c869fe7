"""`Grammar.of`: what a Python value or type stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_origin

from asyncengine.errors import GrammarError
from asyncengine.grammar.schemas import is_json, json_of
from asyncengine.grammar.spec import Grammar


def grammar_of(spec: Any) -> Grammar:
    """See `Grammar.of`."""
    if isinstance(spec, Grammar):
        return spec
    if isinstance(spec, str):
        raise GrammarError(
            "grammar",
            "a str could be a pattern, a schema or a grammar: use Grammar.regex, Grammar.json_schema, Grammar.ebnf, "
            "Grammar.lark or Grammar.choice",
            spec,
        )
    if isinstance(spec, Mapping):
        return _mapping(spec)
    if type(spec).__module__.startswith("genson"):
        return Grammar.json_schema(spec.to_json())
    if type(spec).__module__.startswith("outlines"):
        from asyncengine.grammar.outlines_types import term_grammar

        return term_grammar(spec)
    if spec is not None and (not callable(spec) and get_origin(spec) is None and not hasattr(spec, "__value__")):
        limit = "must be a Grammar, a JSON schema (dict), a Python type or an outlines type"
        hint = "; for a list of texts use Grammar.choice" if isinstance(spec, (list, tuple)) else ""
        raise GrammarError("grammar", limit + hint, spec)
    return _type(spec)


def _mapping(spec: Mapping[Any, Any]) -> Grammar:
    """A JSON schema, or OpenAI's `response_format`: told apart by "type"."""
    kind = spec.get("type")
    if kind == "json_object" and "properties" not in spec:
        return Grammar.json_object()
    if kind == "json_schema":
        inner = spec.get("json_schema")
        if not isinstance(inner, Mapping) or (schema := inner.get("schema")) is None:
            raise GrammarError(
                "grammar", 'a response_format of type "json_schema" needs {"json_schema": {"schema": ...}}'
            )
        return Grammar.json_schema(schema, key_order=inner.get("key_order") or "schema")
    if kind == "text":
        raise GrammarError("grammar", 'response_format {"type": "text"} asks for no grammar: pass None')
    if kind == "structural_tag":
        if "structures" in spec:
            return Grammar.structural_tags(spec)
        raise GrammarError("grammar", 'a structural tag needs "structures" and "triggers"; "format" is not supported')
    return Grammar.json_schema(dict(spec))


def _type(spec: Any) -> Grammar:
    if is_json(spec):
        return Grammar.json_schema(json_of(spec))
    try:
        from asyncengine.grammar.outlines_types import term_grammar, type_term
    except ModuleNotFoundError as error:  # outlines 1.3 refuses to be installed on Python 3.14
        instead = "use Grammar.choice, Grammar.regex, Grammar.json_schema or a pydantic model"
        raise GrammarError(
            "grammar", f"plain Python types need the package outlines, which is not installed: {instead}", spec
        ) from error
    return term_grammar(type_term(spec))

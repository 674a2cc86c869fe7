"""`Grammar.of`: what a Python value or type stands for."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, get_origin

from asyncengine.errors import GrammarError
from asyncengine.grammar.schemas import annotation_schema, class_schema, is_typed_dict
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


def is_json(spec: Any) -> bool:
    """The type is written as JSON: models, containers, constrained types, functions (their arguments)."""
    if is_typed_dict(spec) or isinstance(spec, (types.FunctionType, functools.partial)):
        return True
    if hasattr(spec, "__metadata__") or hasattr(spec, "__value__"):
        return True
    if isinstance(spec, type) and get_origin(spec) is None:
        model = hasattr(spec, "model_json_schema") or (hasattr(spec, "__fields__") and hasattr(spec, "schema"))
        return model or dataclasses.is_dataclass(spec) or spec in (list, tuple, dict, set, frozenset)
    return isinstance(get_origin(spec), type) and not is_union(spec)


def is_union(spec: Any) -> bool:
    import typing

    return get_origin(spec) is typing.Union or isinstance(spec, types.UnionType)


def json_of(spec: Any) -> dict[str, Any]:
    """The JSON schema of a type for which `is_json`."""
    if isinstance(spec, (types.FunctionType, functools.partial)):
        return arguments_schema(spec)
    if isinstance(spec, type) and get_origin(spec) is None and spec not in (list, tuple, dict, set, frozenset):
        return class_schema(spec)
    return annotation_schema(spec)


def arguments_schema(function: Any) -> dict[str, Any]:
    """The keyword arguments a function takes, as a JSON object; those with a default may be left out."""
    import inspect

    import pydantic

    from asyncengine.grammar.schemas import closed

    name = getattr(function, "__name__", "Arguments")
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        if untyped := [parameter.name for parameter in parameters if parameter.annotation is parameter.empty]:
            raise TypeError(f"{untyped[0]} has no type annotation")
        fields: dict[str, Any] = {
            parameter.name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
            for parameter in parameters
        }
        return closed(pydantic.create_model(name, **fields).model_json_schema())
    except Exception as error:
        raise GrammarError("grammar", f"no schema for the arguments of {name}: {str(error)[:120]}") from error

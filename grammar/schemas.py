"""JSON schemas: from dicts, text and Python classes to canonical text, and a walk over their subschemas."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any, Union, get_origin
from urllib.parse import quote, unquote, urljoin

from asyncengine.errors import GrammarError, GrammarImpossible
from asyncengine.grammar.lark import tokenize
from asyncengine.grammar.spec import Grammar, canonical_json, parse_json

TABLES = json.loads((resources.files(__package__) / "keywords.json").read_text(encoding="utf-8"))
"""JSON Schema's keywords: "schemas" by whether their value is a schema, a list of schemas, or maps names to schemas;
"values" of which the kind is checked; "about" what they speak ("nothing": they may stand beside references; "own": the
value itself, without applicators; "negated": opposites of what is in them; "conditions": as the schema around them lets
it; "lost": without an opposite); "classes": formats that pydantic writes for types of its own, and what they are;
"whitespace": the library's options; "straight": those that the library's compiler may get, and others that restrict;
the "opposites" of counts (type, keyword, step to its bound); and "types" as other languages write them, in small
letters. JSON, read fast. Read only."""
ONE, MANY, NAMED = (frozenset(TABLES["schemas"][kind]) for kind in ("one", "many", "named"))
_ANCHORS = ("$anchor", "$dynamicAnchor")
_NAMES_A_PLACE = "|".join(map(re.escape, (*_ANCHORS, "$dynamicRef")))
ACCEPTED = "a dict, JSON text, True, or a pydantic model, dataclass or TypedDict class"


def schema_text(schema: Any) -> str:
    """Canonical text of a schema given as a dict, JSON text, bool or class. Always a JSON object."""
    if isinstance(schema, str):
        schema = parse_json(schema)
    elif isinstance(schema, type):
        schema = class_schema(schema)
    if schema is True:
        return "{}"
    if schema is False:
        raise GrammarImpossible("grammar", "the schema `false` allows no output")
    if not isinstance(schema, dict):
        raise GrammarError("grammar", f"a JSON schema must be an object: pass {ACCEPTED}", schema)
    text = canonical_json(schema)
    local = with_local_references(schema, text)
    return text if local is schema else canonical_json(local)


def is_typed_dict(cls: Any) -> bool:
    """A TypedDict class, of `typing` or of `typing_extensions` (which `typing.is_typeddict` does not know)."""
    return isinstance(cls, type) and hasattr(cls, "__required_keys__") and hasattr(cls, "__total__")


def class_schema(cls: Any) -> dict[str, Any]:
    """The schema of a pydantic model (v1 or v2), dataclass or TypedDict, closed: no undeclared keys."""
    if callable(getattr(cls, "model_json_schema", None)):
        return closed(_asked(cls, lambda: pydantic_schema(cls)))
    if hasattr(cls, "__fields__") and callable(getattr(cls, "schema", None)):
        return closed(_asked(cls, cls.schema))
    if dataclasses.is_dataclass(cls) or is_typed_dict(cls):
        return annotation_schema(cls)
    raise GrammarError("grammar", f"no JSON schema for this class: pass {ACCEPTED}", cls)


def annotation_schema(annotation: Any) -> dict[str, Any]:
    """The schema of any type pydantic understands, closed like `class_schema`."""
    from pydantic import TypeAdapter

    subject = _modern(annotation)
    return closed(_asked(annotation, lambda: pydantic_schema(TypeAdapter(subject))))


def pydantic_schema(source: Any) -> dict[str, Any]:
    """The schema of a model class or a `TypeAdapter` of pydantic, with formats that say which of its dates and times
    have a time zone: what pydantic writes itself asks for one everywhere."""
    ask: Any = getattr(source, "model_json_schema", None) or source.json_schema
    parameters = inspect.signature(ask).parameters.values()  # of a class that has its own it may take nothing
    takes_generator = any(one.name == "schema_generator" or one.kind is one.VAR_KEYWORD for one in parameters)
    return dict(ask(schema_generator=_generator()) if takes_generator else ask())


@functools.cache
def _generator() -> Any:
    from pydantic.json_schema import GenerateJsonSchema

    class WithTimeZones(GenerateJsonSchema):
        def datetime_schema(self, schema: Any) -> dict[str, Any]:
            return _zoned(super().datetime_schema(schema), schema.get("tz_constraint"))

        def time_schema(self, schema: Any) -> dict[str, Any]:
            return _zoned(super().time_schema(schema), schema.get("tz_constraint"))

        def timedelta_schema(self, schema: Any) -> dict[str, Any]:
            found = super().timedelta_schema(schema)
            return {**found, "format": "timedelta"} if "format" in found else found

    return WithTimeZones


def _zoned(node: dict[str, Any], zone: object) -> dict[str, Any]:
    """The schema of a date or time; `zone`: pydantic's `tz_constraint`, where either will do None."""
    name = node.get("format")  # None: written as a number
    if name is None or (zone is not None and zone != "naive"):
        return node
    local = {"format": f"{name}-local"}
    return {**node, **local} if zone else {"type": node["type"], "anyOf": [{"format": name}, local]}


def _asked(subject: Any, ask: Callable[[], Any]) -> dict[str, Any]:
    """The library's schema; whatever it raises about the class becomes a `GrammarError` naming the class."""
    try:
        schema = ask()
    except Exception as error:
        name = getattr(subject, "__name__", subject)
        reason = str(error).splitlines()[0][:160] if str(error) else type(error).__name__
        raise GrammarError("grammar", f"no JSON schema for {str(name)[:80]}: {reason}") from error
    if not isinstance(schema, dict):
        raise GrammarError("grammar", "a class's JSON schema must be an object", schema)
    return schema


def _modern(annotation: Any) -> Any:
    """`typing.TypedDict` in the form pydantic wants before Python 3.12 (the top one; nested ones it refuses itself)."""
    import sys

    if sys.version_info >= (3, 12) or not is_typed_dict(annotation):
        return annotation
    import typing

    import typing_extensions

    if type(annotation).__module__ == "typing_extensions" or get_origin(annotation) is not None:
        return annotation
    hints = typing.get_type_hints(annotation, include_extras=True)
    required = annotation.__required_keys__
    fields = {k: _modern(v) if k in required else typing_extensions.NotRequired[_modern(v)] for k, v in hints.items()}
    return typing_extensions.TypedDict(annotation.__name__, fields)  # type: ignore[operator]


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A class's schema without undeclared keys, otherwise as `as_meant`."""
    for _, node in subschemas(schema):
        if isinstance(node.get("properties"), dict) or node.get("type") == "object":
            node.setdefault("additionalProperties", False)
    return as_meant(schema)


def as_meant(schema: dict[str, Any]) -> dict[str, Any]:
    """A class's schema, changed in place to what the class reads: a union's discriminator is required, even if it has a
    default, and formats of pydantic's own types become patterns."""
    for _, node in list(subschemas(schema)):
        if (replacement := TABLES["classes"].get(str(node.get("format")))) is not None:
            del node["format"]
            node.update(replacement)
        discriminator = node.get("discriminator")
        if isinstance(discriminator, dict) and isinstance(node.get("oneOf"), list):
            name = discriminator.get("propertyName")
            for member in (resolve(schema, member) for member in node["oneOf"]):
                if isinstance(member, dict) and name in (member.get("properties") or {}):
                    member["required"] = list(dict.fromkeys([*member.get("required", []), name]))
    return schema


def resolve(root: Any, node: Any) -> Any:
    """The target of a local `$ref`; `node` itself where there is none; None where the pointer leads nowhere."""
    if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
        return node
    mark, _, pointer = node["$ref"].partition("#")
    return None if mark else pointed(root, unquote(pointer))


def pointed(root: Any, pointer: str) -> Any:
    """The value that a JSON pointer (RFC 6901) leads to; None where there is none."""
    value = root if not pointer or pointer[0] == "/" else None
    for token in pointer.split("/")[1:]:
        name = unescape(token)
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(value):
            value = value[int(name[:9])]
        else:
            return None
    return value


def take_formats(schema: dict[str, Any], typed: Any, root: dict[str, Any]) -> None:
    """Put the formats of `typed`, a part of `root` as `pydantic_schema` has it, into `schema`, in which another library
    has written the same part, perhaps with its references resolved."""
    typed = resolve(root, typed)
    if "format" in schema and isinstance(typed, dict):
        del schema["format"]
        schema |= {key: typed[key] for key in [key for key in ("anyOf", "format", "pattern") if key in typed][:1]}
        return
    for step, child in children(schema):
        take_formats(child, pointed(typed, step), root)


def moved(schema: dict[str, Any], base: str) -> dict[str, Any]:
    """A copy whose local references still hold when it is put at the reference `base` of another document."""
    copy: dict[str, Any] = json.loads(json.dumps(schema))
    copy.pop("$schema", None)
    for _, node in subschemas(copy):
        target = node.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            node["$ref"] = base + target[1:]
    return copy


def with_local_references(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """A copy in which each reference to a place in the document, by address, URN or anchor, is `#/...`; `schema`
    itself where nothing has such a name. `text` is its JSON text.

    A reference that leads out of the document keeps its absolute address. Draft 4 writes `id` for `$id`, draft 7 writes
    anchors as `$id: "#name"`.
    """
    key = "id" if "draft-04" in str(schema.get("$schema")) else "$id"
    if not re.search(f'"(?:{re.escape(key)}|{_NAMES_A_PLACE})"\\s*:\\s*"', text):
        return schema
    root: dict[str, Any] = json.loads(text)
    resources: dict[str, str] = {}
    anchors: dict[tuple[str, str], str] = {}
    dynamic = [node["$dynamicAnchor"] for _, node in subschemas(root) if "$dynamicAnchor" in node]
    nodes: list[tuple[str, dict[str, Any]]] = []  # (base address, schema)
    stack = [("", root, "")]
    while stack:
        pointer, node, base = stack.pop()
        identifier = node.pop(key, None)
        address, _, fragment = identifier.partition("#") if isinstance(identifier, str) else ("", "", "")
        base = _joined(base, address)
        resources.setdefault(base, pointer)
        for name in (fragment, *(node.pop(name, None) for name in _ANCHORS)):
            if isinstance(name, str) and name:
                anchors.setdefault((base, name), pointer)
        nodes.append((base, node))
        stack.extend((pointer + step, child, base) for step, child in children(node))
    for base, node in nodes:
        dynamic_name = str(node.get("$dynamicRef")).rpartition("#")[2]
        if "$dynamicRef" in node and "$ref" not in node and dynamic.count(dynamic_name) <= 1:  # one meaning everywhere
            node["$ref"] = node.pop("$dynamicRef")
        if isinstance(reference := node.get("$ref"), str):
            address, _, fragment = reference.partition("#")
            target = _joined(base, address)
            if fragment.startswith("/") and target in resources:
                pointer_in_root: str | None = resources[target] + unquote(fragment)
            else:
                pointer_in_root = anchors.get((target, fragment)) if fragment else resources.get(target)
            outside = reference if not target else f"{target}#{fragment}"
            node["$ref"] = outside if pointer_in_root is None else "#" + quote(pointer_in_root, safe="/~!$&'()*+,;=:@")
    return root


def _joined(base: str, address: str) -> str:
    """`address`, which may be relative to `base`."""
    try:
        return urljoin(base, address) if address else base
    except ValueError:  # no address at all
        return address


def escape(name: str) -> str:
    """A key as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """The key that a part of a JSON pointer names."""
    return token.replace("~1", "/").replace("~0", "~")


def children(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(relative JSON pointer, subschema) of the schemas directly under `node`, in its key order. Booleans left out."""
    for keyword, value in node.items():
        if isinstance(value, dict):
            if keyword in ONE:
                yield f"/{keyword}", value
            elif keyword in NAMED:
                for name, child in value.items():
                    if isinstance(child, dict):
                        yield f"/{keyword}/{escape(name)}", child
        elif isinstance(value, list) and keyword in MANY:
            for index, child in enumerate(value):
                if isinstance(child, dict):
                    yield f"/{keyword}/{index}", child


def subschemas(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON pointer, subschema) of `schema` and everything under it, each once, without recursion.

    Values of `const`, `enum`, `default` and `examples` are data and not entered.
    """
    if not isinstance(schema, dict):
        return
    stack: list[tuple[str, dict[str, Any]]] = [("", schema)]
    while stack:
        pointer, node = stack.pop()
        yield pointer, node
        stack.extend(reversed([(pointer + step, child) for step, child in children(node)]))


def schemas_of(grammar: Grammar) -> Iterator[Any]:
    """The schema that a grammar is, or those embedded in its Lark text."""
    if grammar.kind == "json_schema":
        yield json.loads(grammar.text)
    elif grammar.kind == "lark":
        yield from (json.loads(text) for kind, text, _ in tokenize(grammar.text) if kind == "json")


def is_json(spec: Any) -> bool:
    """Whether a type is written as JSON: models, containers, constrained types, functions (their arguments)."""
    if is_typed_dict(spec) or isinstance(spec, (types.FunctionType, functools.partial)):
        return True
    if hasattr(spec, "__metadata__") or hasattr(spec, "__value__"):
        return True
    if isinstance(spec, type) and get_origin(spec) is None:
        model = hasattr(spec, "model_json_schema") or (hasattr(spec, "__fields__") and hasattr(spec, "schema"))
        return model or dataclasses.is_dataclass(spec) or spec in (list, tuple, dict, set, frozenset)
    return isinstance(get_origin(spec), type) and not is_union(spec)


def is_union(spec: Any) -> bool:
    return get_origin(spec) is Union or isinstance(spec, types.UnionType)


def json_of(spec: Any) -> dict[str, Any]:
    """The JSON schema of a type for which `is_json`."""
    if isinstance(spec, (types.FunctionType, functools.partial)):
        return arguments_schema(spec)
    if isinstance(spec, type) and get_origin(spec) is None and spec not in (list, tuple, dict, set, frozenset):
        return class_schema(spec)
    return annotation_schema(spec)


def arguments_schema(function: Any) -> dict[str, Any]:
    """The keyword arguments a function takes, as a JSON object; those with a default may be left out."""
    import pydantic

    name = getattr(function, "__name__", "Arguments")
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        if untyped := [parameter.name for parameter in parameters if parameter.annotation is parameter.empty]:
            raise TypeError(f"{untyped[0]} has no type annotation")
        fields: dict[str, Any] = {
            parameter.name: (parameter.annotation, ... if parameter.default is parameter.empty else parameter.default)
            for parameter in parameters
        }
        return closed(pydantic_schema(pydantic.create_model(name, **fields)))
    except Exception as error:
        raise GrammarError("grammar", f"no schema for the arguments of {name}: {str(error)[:120]}") from error

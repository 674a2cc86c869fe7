"""`Grammar`: what an output must match, as plain frozen data. Nothing is compiled here.

A JSON value has one spelling in it: no insignificant whitespace, keys in the order given. Hostile input is
refused by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_origin

from asyncengine.errors import GrammarError, GrammarTooLarge

MAX_CONSTRUCT_DEPTH = 256
"""Deepest nesting that is looked at all. Well above what `check_limits` lets through, below Python's own recursion."""
MAX_CONSTRUCT_SIZE = 16 << 20
"""Most characters that are looked at all, where each value counts as `NODE_SIZE` more."""
NODE_SIZE = 8


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value (dict, list, tuple, str, int, float, bool, None).

    Raises `GrammarError` for anything else (other keys than str, NaN, infinity, NUL, lone surrogates) and
    `GrammarTooLarge` where the value is cyclic, deeply nested or huge. No recursion, so no `RecursionError`.
    """
    _check(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError("grammar", f"must be JSON: {str(error)[:80]}") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises as `canonical_json`."""
    if len(text) > MAX_CONSTRUCT_SIZE:
        raise GrammarTooLarge("grammar", f"must not exceed {MAX_CONSTRUCT_SIZE} characters", len(text))
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarTooLarge("grammar", f"must not nest deeper than {MAX_CONSTRUCT_DEPTH} levels") from None
    except ValueError as error:
        raise GrammarError("grammar", f"is not JSON text: {str(error)[:80]}") from None


def _check(value: Any) -> None:
    """Walk all of `value` with a stack of our own. A cycle shows as depth, shared parts as size."""
    stack = [(value, 1)]
    size = 0
    while stack:
        node, depth = stack.pop()
        size += NODE_SIZE
        if isinstance(node, str):
            size += len(node)
        elif isinstance(node, dict):
            for key in node:
                if not isinstance(key, str):
                    raise GrammarError("grammar", "keys of JSON objects must be str", key)
                size += len(key)
            stack.extend([(child, depth + 1) for child in node.values()])
        elif isinstance(node, (list, tuple)):
            stack.extend([(child, depth + 1) for child in node])
        elif node is not None and not isinstance(node, (bool, int, float)):
            raise GrammarError("grammar", f"must be JSON, not {type(node).__name__}")
        if depth > MAX_CONSTRUCT_DEPTH:
            raise GrammarTooLarge("grammar", f"must not nest deeper than {MAX_CONSTRUCT_DEPTH} levels (or is cyclic)")
        if size > MAX_CONSTRUCT_SIZE or len(stack) * NODE_SIZE > MAX_CONSTRUCT_SIZE:
            raise GrammarTooLarge("grammar", f"must not exceed {MAX_CONSTRUCT_SIZE} characters")


Kind = Literal["json_schema", "regex", "choice", "lark"]
Whitespace = Literal["flexible", "single_space", "compact"]
Unsupported = Literal["error", "ignore", "validate"]
Formats = Literal["known", "strict"]
KeyOrder = Literal["schema", "any"]
Backend = Literal["auto", "llguidance"]
_OPTIONS = ("kind", "whitespace", "unsupported", "backend", "formats", "key_order")
_KNOWN = dict(zip(_OPTIONS, map(get_args, (Kind, Whitespace, Unsupported, Backend, Formats, KeyOrder)), strict=True))

KEY_VERSION = 4
"""Goes into `Grammar.key`; raise it when the same text comes to mean something else."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole output. Make one with a constructor below; equal grammars have equal `key`s.

    >>> Grammar.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}).kind
    'json_schema'
    >>> Grammar.regex(r"^[0-9]{4}$").text
    '[0-9]{4}'
    >>> Grammar.choice(["yes", "no"]).text
    '["yes","no"]'

    Raises `GrammarError` (field "grammar") for malformed input. Limits that the engine sets are checked at submit by
    `check_limits`; whether the library can enforce the grammar is known when it is compiled.
    """

    kind: Kind
    text: str
    """Canonical: JSON without insignificant whitespace and with its key order kept; a pattern; a JSON list; Lark."""
    whitespace: Whitespace = "flexible"
    """Between JSON tokens. "flexible": nothing, one space, or one newline and at most 40 blanks of indentation;
    "single_space": as `json.dumps` writes; "compact": nothing. Other kinds ignore it."""
    unsupported: Unsupported = "error"
    """The treatment of schema keywords that the library cannot enforce: refuse, leave them out, or leave them out and
    check the finished text."""
    backend: Backend = "auto"
    formats: Formats = "known"
    """The treatment of a `format` that cannot be enforced: it says nothing, or ("strict") is treated as `unsupported`
    says."""
    key_order: KeyOrder = "schema"
    """The order of an object's keys: the schema's, undeclared ones last; or any, each declared key once. Objects with
    more than 58 declared keys keep the schema's, and so do those that `minProperties` or `maxProperties` bounds."""

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if (value := getattr(self, name)) not in known:
                raise GrammarError(name, f"must be one of {', '.join(map(repr, known))}", value)
        check_text(self.text)

    @property
    def key(self) -> str:
        """SHA-256 (hex) of everything that decides the language. The order of JSON keys does: it is output order."""
        parts = [KEY_VERSION, *(getattr(self, field.name) for field in fields(self))]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @classmethod
    def json_schema(
        cls, schema: Any, *, whitespace: Whitespace = "flexible", unsupported: Unsupported = "error",
        backend: Backend = "auto", formats: Formats = "known", key_order: KeyOrder = "schema",
    ) -> Grammar:  # fmt: skip
        """JSON that is valid under `schema`: a dict, JSON text, `True` (any JSON), or a class.

        A pydantic model (v1 or v2), dataclass or TypedDict is closed: keys it does not declare are not generated. A
        dict or text means what JSON Schema says, so an object without `"additionalProperties": false` may get more
        keys. Properties are generated in the order the schema lists them, unless `key_order` is "any". A `format` that
        JSON Schema does not define says nothing, unless `formats` is "strict".

        >>> Grammar.json_schema('{"type": "array", "items": {"type": "integer"}}', whitespace="compact").text
        '{"type":"array","items":{"type":"integer"}}'
        """
        from asyncengine.grammar.schemas import schema_text

        return cls("json_schema", schema_text(schema), whitespace, unsupported, backend, formats, key_order)

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "flexible", backend: Backend = "auto") -> Grammar:
        """Any JSON object."""
        return cls("json_schema", '{"type":"object"}', whitespace, backend=backend)

    @classmethod
    def regex(cls, pattern: str, *, backend: Backend = "auto") -> Grammar:
        """Text that `pattern` matches from end to end.

        The dialect is that of Python's `re` without what no automaton has: look-behind, back-references, atomic groups,
        word boundaries. `^` and `$` are allowed at the ends, look-aheads in groups that are not repeated.

        >>> Grammar.regex(r"[a-z]+@[a-z]+\\.com").kind
        'regex'
        """
        from asyncengine.grammar.regexes import portable

        return cls("regex", portable(pattern), backend=backend)

    @classmethod
    def choice(cls, options: Iterable[str], *, backend: Backend = "auto") -> Grammar:
        """One of `options`, letter for letter. Repeated options count once.

        >>> Grammar.choice(["not", "not enough information"]).text
        '["not","not enough information"]'
        """

        if isinstance(options, (str, bytes, Mapping)) or not isinstance(options, Iterable):
            raise GrammarError("grammar", "a choice takes a list of str", options)
        items = list(options)
        for item in items:
            check_text(item, "each option of a choice")
        if not items:
            raise GrammarError("grammar", "a choice needs at least one option")
        return cls("choice", canonical_json(list(dict.fromkeys(str(item) for item in items))), backend=backend)

    @classmethod
    def ebnf(cls, text: str) -> Grammar:
        """A context-free grammar, in llama.cpp's GBNF (`root ::= ...`) or in Lark (`start: ...`).

        >>> Grammar.ebnf('root ::= "a" [0-9]+').text.endswith('start: "a" /[0-9]/+\\n')
        True
        """
        from asyncengine.grammar.lark import ebnf_to_lark

        return cls("lark", ebnf_to_lark(text))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """A grammar in llguidance's variant of Lark, with a `start` rule. `%json {...}` embeds a JSON schema.

        >>> Grammar.lark('start: "answer: " %json {"type": "integer"}').kind
        'lark'
        """
        from asyncengine.grammar.lark import checked_lark

        return cls("lark", checked_lark(text))

    @classmethod
    def structural_tags(
        cls, tags: Sequence[Mapping[str, Any]] | Mapping[str, Any], *, triggers: Sequence[str] | None = None,
        at_least_one: bool = False, stop_after_first: bool = False,
    ) -> Grammar:  # fmt: skip
        """Free text in which tagged parts are constrained; the free text contains no trigger.

        Each tag is `{"begin": str, "schema": {...}, "end": str}`, or has a `"grammar"` (a `Grammar`) in place of the
        schema. Where a trigger appears, one of the tags whose `begin` starts with it must follow. Without `triggers`
        each `begin` is one. `{"structures": [...], "triggers": [...]}`, as other engines take it, is accepted.
        Triggers are text: a special token of the tokenizer never spells one.

        >>> tag = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
        >>> Grammar.structural_tags([tag]).kind
        'lark'
        """
        from asyncengine.grammar.lower import tags_to_lark

        return cls("lark", tags_to_lark(tags, triggers, at_least_one, stop_after_first))

    @classmethod
    def tool_calls(
        cls, tools: Sequence[Mapping[str, Any]], *, tool_choice: str | Mapping[str, Any] = "required",
        parallel: bool = True, whitespace: Whitespace = "flexible", unsupported: Unsupported = "error",
        formats: Formats = "known", key_order: KeyOrder = "schema",
    ) -> Grammar:  # fmt: skip
        """The whole output is `{"name": ..., "arguments": {...}}`, or a non-empty list of them if `parallel`.

        `tools` are OpenAI function tools or `{"name", "parameters"}`. `tool_choice` is "required", a name, or
        `{"type": "function", "function": {"name": ...}}`.
        """
        from asyncengine.grammar.lower import tool_call_schema

        schema = tool_call_schema(tools, tool_choice, parallel)
        return cls.json_schema(
            schema, whitespace=whitespace, unsupported=unsupported, formats=formats, key_order=key_order
        )

    @classmethod
    def of(cls, spec: Any) -> Grammar:
        """The grammar that `spec` stands for.

        - a `Grammar` is itself; a dict is a JSON schema, or an OpenAI `response_format`;
        - a pydantic model, dataclass, TypedDict, `list[...]`, `tuple[...]`, `dict[...]` is JSON;
        - `int`, `float`, `bool`, `str`, dates, `Literal`, `Enum`, `None` are text as outlines writes them (`42`,
          `True`, `"quoted"`, the bare value); a `Union` is any of its members;
        - terms of `outlines.types` (`Regex`, `CFG`, `JsonSchema`, `Choice`, `either`, ...) mean what they mean there.

        A plain str is refused: it could be a pattern, a schema or a grammar.

        >>> Grammar.of({"type": "json_object"}) == Grammar.json_object()
        True
        """
        if isinstance(spec, Grammar):
            return spec
        if isinstance(spec, str):
            limit = "a str could be a pattern, a schema or a grammar: use Grammar.regex, .json_schema, .ebnf, .lark"
            raise GrammarError("grammar", f"{limit} or .choice", spec)
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
        from asyncengine.grammar.schemas import is_json, json_of

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


def check_text(text: object, what: str = "") -> str:
    """`text`; refuses what no tokenizer can spell or a C library may trip over: NUL, lone surrogates, anything but str.
    `what` it is, for the message."""
    if not isinstance(text, str):
        raise GrammarError("grammar", f"{what} must be a str".lstrip(), text)
    if "\0" in text:
        raise GrammarError("grammar", "must not contain NUL characters")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise GrammarError("grammar", "must not contain lone surrogates (it cannot be encoded as UTF-8)") from None
    return text


def _mapping(spec: Mapping[Any, Any]) -> Grammar:
    """A JSON schema, or OpenAI's `response_format`: told apart by "type"."""
    type_name = spec.get("type")
    if type_name == "json_object" and "properties" not in spec:
        return Grammar.json_object()
    if type_name == "json_schema":
        inner = spec.get("json_schema")
        if not isinstance(inner, Mapping) or (schema := inner.get("schema")) is None:
            limit = 'a response_format of type "json_schema" needs {"json_schema": {"schema": ...}}'
            raise GrammarError("grammar", limit)
        return Grammar.json_schema(schema, key_order=inner.get("key_order") or "schema")
    if type_name == "text":
        raise GrammarError("grammar", 'response_format {"type": "text"} asks for no grammar: pass None')
    if type_name == "structural_tag":
        if "structures" in spec:
            return Grammar.structural_tags(spec)
        raise GrammarError("grammar", 'a structural tag needs "structures" and "triggers"; "format" is not supported')
    return Grammar.json_schema(dict(spec))

"""From the terms of `outlines.types` to grammars, exactly.

A regular term becomes one pattern. A term with a JSON schema or a context-free grammar inside becomes Lark with
`%json` and `%lark` in place: `outlines.types.dsl.to_regex` writes schemas as regexes that both refuse valid and admit
invalid documents. In Lark a regular part takes the longest text it can before what follows begins, so end it with
something that cannot be part of it (a newline, a bracket).
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from outlines.types import dsl

from asyncengine.errors import GrammarError, GrammarTooLarge
from asyncengine.grammar.lark import ebnf_to_lark, literal, regex
from asyncengine.grammar.lower import inline_json
from asyncengine.grammar.regexes import escaped, portable
from asyncengine.grammar.schema.formats import CLOCK, DATE
from asyncengine.grammar.schema.numbers import WRITTEN_DIGITS
from asyncengine.grammar.schemas import is_json, is_union, json_of, schema_text
from asyncengine.grammar.spec import Grammar

MAX_TERM_DEPTH = 64
"""Deepest nesting of terms."""

_TEXTS: dict[type, str] = {
    int: rf"[+-]?(?:0|[1-9][0-9]{{0,{WRITTEN_DIGITS - 1}}})",
    datetime.date: DATE,
    datetime.time: CLOCK,
    datetime.datetime: f"{DATE} {CLOCK}",
}
"""Patterns for types whose terms in outlines match what Python refuses: 30 February, 24 o'clock, 10,000 digits."""
_FIXED: dict[Any, Any] = {dsl.KleeneStar: (0, None), dsl.KleenePlus: (1, None), dsl.Optional: (0, 1)}
"""Bounds of the repetitions whose class determines them. Read only."""
_REPEATS = (*_FIXED, dsl.QuantifyExact, dsl.QuantifyMinimum, dsl.QuantifyMaximum, dsl.QuantifyBetween)


class _Expression(NamedTuple):
    """A term as a pattern (None if it contains a schema or a grammar) and as a Lark expression."""

    pattern: str | None
    lark: str

    @classmethod
    def regular(cls, pattern: str) -> _Expression:
        return cls(pattern, regex(pattern))


def term_grammar(term: Any) -> Grammar:
    """The grammar of an outlines term (or of a class of outlines, such as an `Enum` of airports).

    Raises `GrammarUnsupported` for patterns with look-around (`types.isbn`), `GrammarError` for any other object.
    """
    if not isinstance(term, dsl.Term):
        raise GrammarError("grammar", f"{type(term).__name__} is not an output type of outlines.types")
    if isinstance(term, dsl.JsonSchema) and term.whitespace_pattern is None:
        return Grammar.json_schema(term.schema)
    if isinstance(term, dsl.CFG):
        return Grammar.ebnf(term.definition)
    term = _chosen(term)
    members = term.terms if isinstance(term, dsl.Alternatives) else [term]
    strings = [str(member.value) for member in members if isinstance(member, dsl.String)]
    if strings and len(strings) == len(members):
        return Grammar.choice(strings)
    whole = _part(term, 0)
    return Grammar.lark(f"start: {whole.lark}\n") if whole.pattern is None else Grammar("regex", whole.pattern)


def type_term(spec: Any) -> Any:
    """The term of a Python type: as outlines has it, but containers and models are JSON, alone and in unions."""
    if is_union(spec):
        return dsl.Alternatives([type_term(member) for member in get_args(spec)])
    if spec is None or spec is type(None):
        return dsl.Regex("None")
    if isinstance(spec, dsl.Term):
        return spec
    if isinstance(spec, type) and spec in _TEXTS:
        return dsl.Regex(_TEXTS[spec])
    if is_json(spec):
        return dsl.JsonSchema(schema_text(json_of(spec)))
    try:
        return dsl.python_types_to_terms(spec)
    except Exception as error:
        name = getattr(spec, "__name__", spec)
        raise GrammarError("grammar", f"no grammar for the type {str(name)[:80]}: {str(error)[:120]}") from error


def _chosen(term: Any) -> Any:
    """A `Choice` as `Alternatives` of its items; any other term itself."""
    if not isinstance(term, dsl.Choice):
        return term
    if not isinstance(term.items, (list, tuple)) or not term.items:
        raise GrammarError("grammar", "an outlines Choice needs at least one item")
    return dsl.Alternatives([type_term(item) for item in term.items])


def _part(term: Any, depth: int) -> _Expression:
    if depth > MAX_TERM_DEPTH:
        raise GrammarTooLarge("grammar", f"outlines terms must not nest deeper than {MAX_TERM_DEPTH} levels")
    match _chosen(term):
        case dsl.String(value=value):
            return _Expression(escaped(str(value)), literal(str(value)))
        case dsl.Regex(pattern=pattern):
            return _Expression.regular(portable(pattern))
        case dsl.JsonSchema(schema=schema, whitespace_pattern=blank):
            options = {} if blank is None else {"whitespace_pattern": blank}
            return _Expression(None, inline_json(schema_text(schema), **options))
        case dsl.CFG(definition=definition):
            return _Expression(None, "%lark {\n" + ebnf_to_lark(definition).rstrip("\n") + "\n}")
        case dsl.Alternatives(terms=terms):
            if not terms:
                raise GrammarError("grammar", "an outlines alternative needs at least one member")
            return _joined([_part(member, depth + 1) for member in terms], "|", " | ")
        case dsl.Sequence():
            # neighbouring regular terms are one terminal: as two, the lexer would give all it can to the first
            parts = list[_Expression]()
            members = (_part(member, depth + 1) for member in _flat(term))
            for regular, run in itertools.groupby(members, key=lambda part: part.pattern is not None):
                run_parts = [*run]
                parts += [_joined(run_parts, "", "")] if regular and len(run_parts) > 1 else run_parts
            return _joined(parts, "", " ")
    if not isinstance(term, _REPEATS):
        raise GrammarError("grammar", f"{type(term).__name__} is not an output type of outlines.types")
    count = getattr(term, "count", None)
    bounds = getattr(term, "min_count", count or 0), getattr(term, "max_count", count)
    low, high = _FIXED.get(type(term), bounds)
    times = f"{{{low},{'' if high is None else high}}}"
    inner = _part(term.term, depth + 1)
    if inner.pattern is not None:
        return _Expression.regular(f"(?:{inner.pattern}){times}")
    return _Expression(None, '""' if high == 0 else f"({inner.lark}){times}")


def _flat(term: Any) -> Iterator[Any]:
    """The members of a sequence, nested sequences flattened."""
    for member in term.terms:
        yield from _flat(member) if isinstance(member, dsl.Sequence) else (member,)


def _joined(parts: list[_Expression], glue: str, lark_glue: str) -> _Expression:
    patterns = [f"(?:{part.pattern})" for part in parts if part.pattern is not None]
    if len(patterns) == len(parts):
        return _Expression.regular(glue.join(patterns))
    return _Expression(None, f"({lark_glue.join(part.lark for part in parts)})")

"""From the terms of `outlines.types` to grammars, exactly.

A regular term becomes one pattern. A term with a JSON schema or a context-free grammar inside becomes Lark with
`%json` and `%lark` in place: `outlines.types.dsl.to_regex` writes schemas as regexes that both refuse valid and admit
invalid documents. In Lark a regular part takes the longest text it can before what follows begins, so end it with
something that cannot be part of it (a newline, a bracket).
"""

from __future__ import annotations

import datetime
from typing import Any, get_args

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
"""Types whose terms in outlines match what Python does not read: 30 February, 24 o'clock, 10,000 digits. Read only."""
_FIXED: dict[Any, Any] = {dsl.KleeneStar: (0, None), dsl.KleenePlus: (1, None), dsl.Optional: (0, 1)}
"""Repetitions whose bounds their class says. Read only."""
_REPEATS = (*_FIXED, dsl.QuantifyExact, dsl.QuantifyMinimum, dsl.QuantifyMaximum, dsl.QuantifyBetween)


def term_grammar(term: Any) -> Grammar:
    """The grammar of an outlines term (or of a class of outlines, such as an `Enum` of airports).

    Raises `GrammarUnsupported` for patterns with look-around (`types.isbn`), `GrammarError` for what is no term.
    """
    if not isinstance(term, dsl.Term):
        raise GrammarError("grammar", f"{type(term).__name__} is not an output type of outlines.types")
    if isinstance(term, dsl.JsonSchema) and term.whitespace_pattern is None:
        return Grammar.json_schema(term.schema)
    if isinstance(term, dsl.CFG):
        return Grammar.ebnf(term.definition)
    term = _plain(term, 0)
    strings = _strings(term)
    if strings is not None:
        return Grammar.choice(strings)
    pattern = _pattern(term)
    if pattern is not None:
        return Grammar("regex", pattern)
    return Grammar.lark(f"start: {_rule(term)}\n")


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


def _plain(term: Any, depth: int) -> Any:
    """The term with `Choice` written out, nested sequences joined, and every pattern in the portable dialect."""
    if depth > MAX_TERM_DEPTH:
        raise GrammarTooLarge("grammar", f"outlines terms must not nest deeper than {MAX_TERM_DEPTH} levels")
    if isinstance(term, dsl.Regex):
        return dsl.Regex(portable(term.pattern))
    if isinstance(term, dsl.Choice):
        if not isinstance(term.items, (list, tuple)) or not term.items:
            raise GrammarError("grammar", "an outlines Choice needs at least one item")
        term = dsl.Alternatives([type_term(item) for item in term.items])
    if isinstance(term, dsl.Alternatives):
        if not term.terms:
            raise GrammarError("grammar", "an outlines alternative needs at least one member")
        return dsl.Alternatives([_plain(member, depth + 1) for member in term.terms])
    if isinstance(term, dsl.Sequence):
        flat: list[Any] = []
        for member in term.terms:
            plain = _plain(member, depth + 1)
            flat.extend(plain.terms if isinstance(plain, dsl.Sequence) else [plain])
        return dsl.Sequence(flat)
    if isinstance(term, _REPEATS):
        low, high = _bounds(term)
        inner = _plain(term.term, depth + 1)
        return dsl.QuantifyMinimum(inner, low) if high is None else dsl.QuantifyBetween(inner, low, high)
    if isinstance(term, (dsl.String, dsl.JsonSchema, dsl.CFG)):
        return term
    raise GrammarError("grammar", f"{type(term).__name__} is not an output type of outlines.types")


def _bounds(term: Any) -> tuple[int, int | None]:
    """The bounds of the number of times that a repeated term may occur."""
    if (fixed := _FIXED.get(type(term))) is not None:
        return fixed[0], fixed[1]
    count = getattr(term, "count", None)
    return getattr(term, "min_count", count or 0), getattr(term, "max_count", count)


def _strings(term: Any) -> list[str] | None:
    """The texts of a term that is a plain list of texts."""
    members = term.terms if isinstance(term, dsl.Alternatives) else [term]
    strings = [str(member.value) for member in members if isinstance(member, dsl.String)]
    return strings if len(strings) == len(members) else None


def _pattern(term: Any) -> str | None:
    """The pattern of a regular term (one `_plain` made); None if a schema or a grammar is inside."""
    if isinstance(term, dsl.String):
        return escaped(str(term.value))
    if isinstance(term, dsl.Regex):
        return str(term.pattern)
    if isinstance(term, (dsl.Alternatives, dsl.Sequence)):
        parts = [_pattern(member) for member in term.terms]
        if any(part is None for part in parts):
            return None
        glue = "|" if isinstance(term, dsl.Alternatives) else ""
        return glue.join(f"(?:{part})" for part in parts)
    if isinstance(term, (dsl.QuantifyMinimum, dsl.QuantifyBetween)):
        inner = _pattern(term.term)
        return None if inner is None else f"(?:{inner}){_count(*_bounds(term))}"
    return None


def _count(low: int, high: int | None) -> str:
    return f"{{{low},{'' if high is None else high}}}"


def _rule(term: Any) -> str:
    """A term as a Lark expression. Neighbouring regular parts are one terminal, or the first would eat the second."""
    pattern = _pattern(term)
    if pattern is not None:
        return literal(str(term.value)) if isinstance(term, dsl.String) else regex(pattern)
    if isinstance(term, dsl.JsonSchema):
        extra = {} if term.whitespace_pattern is None else {"whitespace_pattern": term.whitespace_pattern}
        return inline_json(schema_text(term.schema), **extra)
    if isinstance(term, dsl.CFG):
        return "%lark {\n" + ebnf_to_lark(term.definition).rstrip("\n") + "\n}"
    if isinstance(term, dsl.Alternatives):
        return "(" + " | ".join(_rule(member) for member in term.terms) + ")"
    if isinstance(term, dsl.Sequence):
        return "(" + " ".join(_runs(term.terms)) + ")"
    low, high = _bounds(term)
    return '""' if high == 0 else f"({_rule(term.term)}){_count(low, high)}"


def _runs(terms: list[Any]) -> list[str]:
    parts: list[str] = []
    run: list[Any] = []
    for term in [*terms, None]:
        if term is not None and _pattern(term) is not None:
            run.append(term)
            continue
        if run:
            parts.append(_rule(run[0] if len(run) == 1 else dsl.Sequence(run)))
        run = []
        if term is not None:
            parts.append(_rule(term))
    return parts

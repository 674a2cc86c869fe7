"""Arguments of tool calls that are not one JSON object: the rules of JSON with other spellings of keys and values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncengine.errors import GrammarError, GrammarUnsupported
from asyncengine.grammar.lark import literal
from asyncengine.grammar.marks import Markers
from asyncengine.grammar.regexes import escaped, words
from asyncengine.grammar.schema import members as demands
from asyncengine.grammar.schema.builder import Builder
from asyncengine.grammar.schema.rules import Checkpoint, Rules, Symbols
from asyncengine.grammar.schema.terms import DERIVED, Alternatives, Conjunction, Entry, Term
from asyncengine.grammar.schemas import escape
from asyncengine.grammar.shapes.nodes import Rule

CDATA = ("<![CDATA[", "]]>")
"""XML's marks around text in which only the second has a meaning."""
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
SCALARS = {"number": NUMBER.pattern, "boolean": "(true|false)", "null": "null"}
STARTS = {"array": r"\[", "object": r"\{"}
BLANK = r"[ \t\r\n]*"
BARE_KEY = r"[^\x00-\x20\x7f:={}\[\]<>,\"'()|]+"
"""A key that needs no quotes, as a Lark pattern."""
_ESCAPE = r"\\(?:[\"'\\\/bfnrt]|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})|x[0-9a-fA-F]{2})"
"""An escape of Python's, surrogates excluded: one alone is no character."""
_QUOTED = [f"/{quote}(?:[^{quote}\\\\\\x00-\\x1f]|{_ESCAPE})*{quote}/" for quote in "\"'"]
_PYTHON = {"true": "True", "false": "False", "null": "None"}


@dataclass(frozen=True, slots=True)
class Members:
    """Arguments that are not one JSON object: each is `key_open` + key + `key_close` + value + `value_close`.

    "raw" values are strings as they are, up to `value_close`, and everything else is JSON. "python" values are Python's
    or JSON's: quotes of either kind, `True` or `true`. "bare" values are JSON but for keys without quotes and strings
    between `quote`, where nothing is escaped.
    """

    key_open: str = ""
    key_close: str = "="
    value_close: str = ""
    separator: str = ", "
    values: Literal["raw", "python", "bare"] = "python"
    string_key_close: str = ""
    """Replaces `key_close` where the value is a string; empty: it does not."""
    quote: str = ""
    cdata: bool = False
    """A raw string may stand between the marks `CDATA`, and does if it contains XML's characters or newlines."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a raw value: its close and, where that is on a line of its own, the next key."""
        close = self.value_close.strip()
        return (close, f"\n{self.key_open}") if self.value_close.startswith("\n") else (close,)

    def string(self, text: str) -> str:
        """A raw string as it is written."""
        needs = self.cdata and any(char in text for char in "<&\n") and CDATA[1] not in text
        return text.join(CDATA) if needs else text


def member_types(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """The JSON types of each declared argument of a tool ("number" for integers, too), as far as they can be told."""
    alternatives, types_of = Alternatives(dict(schema)), dict[str, frozenset[str]]()
    try:
        for term in alternatives.of((Entry("", schema),)):
            entries = term.having(*demands.OBJECT)
            for key in dict.fromkeys(key for entry in entries for key in entry.schema.get("properties", {})):
                value = [child for entry in entries for child in demands.property_of(entry, key)]
                names = (name for branch in alternatives.of(value) for name in branch.types)
                types_of[key] = types_of.get(key, frozenset()) | {_json_type(name) for name in names}
    except GrammarError:  # compiling the grammar raises it again, with the request to answer
        pass
    return types_of


def _json_type(name: str) -> str:
    return "number" if name in ("integer", "fraction") else name


class ArgumentBuilder(Builder):
    """Rules of a call's arguments. `options` has a `Members` and the special tokens in its texts."""

    def __init__(self, root: dict[str, Any], options: dict[str, Any], checkpoint: Checkpoint) -> None:
        super().__init__(root, options, checkpoint)
        self._members = Members(**options["members"])
        self._markers = Markers(options["marks"])
        self._outer = True
        """The rules of the arguments themselves are made, and not yet those of nested values."""

    def build(self) -> tuple[Rules, Rule]:
        start, comma = self.rules.new(), self._comma
        self._comma = [] if self._members.values == "raw" else comma
        for term in self._alternatives.of((Entry("", self.root),)):
            if "object" in term.types:
                self._object(start, term)
        self._comma, self._outer = comma, False
        return self._complete(start)

    @property
    def _as_json(self) -> bool:
        return self._members.values == "raw" and not self._outer

    def _symbols(self, text: str) -> Symbols:
        """The symbols of a format's text, in which special tokens may stand."""
        return [self.rules.terminal(part) for part in self._markers.parts(text)]

    def _around(self, brackets: str, *inside: Any) -> Symbols:
        return [*inside] if self._outer else super()._around(brackets, *inside)

    def _keyword(self, text: str) -> list[Symbols]:
        python = [[self._literal(_PYTHON[text])]] if self._members.values == "python" else []
        return [*super()._keyword(text), *python]

    # ---------------------------------------------------------------- strings

    def _string(self, rule: Rule, term: Term) -> None:
        texts, mark = demands.Texts.of(term), self._members.quote
        if self._members.values != "raw" and (listed := texts.listed) is not None:
            self.rules.add(rule, *(spelled for text in listed for spelled in self._quoted(text)))
        elif self._members.values == "bare":
            self.rules.add(rule, *([*self._symbols(mark), *symbols] for symbols in self._strings(texts, mark)))
        elif self._members.values == "python" and not (texts.schemas or texts.excluded):
            for quoted in _QUOTED:
                self.rules.add(rule, [self.rules.terminal(quoted)])
        else:
            super()._string(rule, term)

    def _quoted(self, text: str) -> list[Symbols]:
        """The spellings of a string, each an alternative."""
        if self._members.values == "bare":
            mark = self._symbols(self._members.quote)
            return [[*mark, *([self._literal(text)] if text else []), *mark]]
        double = json.dumps(text, ensure_ascii=False)
        single = "'" + double[1:-1].replace('\\"', '"').replace("'", "\\'") + "'"
        return [[self._literal(double)], [self._literal(single)]]

    def _strings(self, texts: demands.Texts, close: str, beside: str = "") -> list[Symbols]:
        """Raw strings, up to and with `close`. `beside`: a pattern of texts that would be read as another type."""
        ends = self._members.ends if close == self._members.value_close else (close.strip(),)
        if (listed := texts.listed) is not None:
            pattern = re.compile(beside or r"(?!)")
            allowed = [text for text in listed if not any(end in text for end in ends) and not pattern.fullmatch(text)]
            written = map(self._members.string, allowed)
            return [[*([self._literal(text)] if text else []), *self._symbols(close)] for text in written]
        inside, excluded = texts.raw(), [*map(_containing, ends), *([f"~/{beside}/"] if beside else [])]
        if not self._members.cdata:
            return [self._until([*inside, *excluded], close)]
        begin, end = CDATA
        marked = [self._literal(begin), *self._until([*inside, _containing(end)], end + close)]
        return [self._until([*inside, *excluded, f"~/{escaped(begin)}(?s:.*)/"], close), marked]

    def _until(self, expressions: Iterable[str], close: str) -> Symbols:
        """The texts that match all `expressions`, then `close`."""
        text = " & ".join(expressions)
        before, special, _ = self._markers.split(close)
        if not special:
            return [self.rules.terminal(text, literal(close))]
        # the lexer takes the longest text before a special token, so the close's own text must be part of it
        text = f"({text}) {literal(before)}" if before else text
        return [self.rules.terminal(text), *self._symbols(close[len(before) :])]

    # ---------------------------------------------------------------- members

    def _pair(self, key: str, value: Conjunction) -> Rule:
        style = self._members
        if self._as_json:
            return super()._pair(key, value)
        if not self._outer and style.values == "python":
            return self.rules.shared(*([*quoted, *self._colon, self.node(value)] for quoted in self._quoted(key)))
        fits = re.fullmatch(BARE_KEY, key) is not None
        if style.values == "raw":
            fits = key.strip() == key != "" and style.key_close.split()[0][0] not in key and "\n" not in key
        if not fits:
            raise GrammarUnsupported("grammar", [("properties", f"/properties/{escape(key)}")])
        opening = style.key_open if self._outer else ""
        closes = filter(None, (style.key_close, style.string_key_close))
        heads = [self._symbols(f"{opening}{key}{close}") for close in closes]
        return self.rules.shared(*self._values_behind(heads, value))

    def _undeclared(
        self, entries: list[Entry], declared: list[str], name_schemas: list[tuple[Term, demands.Texts]] | None
    ) -> Rule | None:
        style = self._members
        keywords = ("patternProperties", "propertyNames")
        unsupported = [(key, f"{entry.location}/{key}") for entry in entries for key in keywords if key in entry.schema]
        if self._as_json or (unsupported and not self._outer and style.values == "python"):
            return super()._undeclared(entries, declared, name_schemas)
        if unsupported:
            raise GrammarUnsupported("grammar", unsupported)
        value = tuple(map(demands.additional, entries))
        if any(child.schema is False for child in value):
            return None
        if not self._outer and style.values == "python":
            excluding = "".join(f" & ~/[\"']{escaped(key)}[\"']/" for key in declared)
            pattern = "|".join(f"{quote}[^{quote}\\\\\\x00-\\x1f]*{quote}" for quote in "\"'")
            return self.rules.new([self.rules.terminal(f"/{pattern}/{excluding}"), *self._colon, self.node(value)])
        before, opened = self._markers.behind_special(style.key_open if self._outer else "")
        heads = []
        for close in filter(None, (style.key_close, style.string_key_close)):
            closed, _, _ = self._markers.split(close)
            excluding = "".join(f" & ~/{escaped(opened + key + closed)}/" for key in declared)
            key = self.rules.terminal(f"/{escaped(opened)}{BARE_KEY}{escaped(closed)}/{excluding}")
            heads.append([*self._symbols(before), key, *self._symbols(close[len(closed) :])])
        return self.rules.new(*self._values_behind(heads, value))

    def _values_behind(self, heads: list[Symbols], value: Conjunction) -> list[Symbols]:
        """Alternatives of a head and a value: raw strings, all else as JSON. Strings with a head of their own (the
        second) may look like anything; otherwise a text that reads as JSON of an allowed type is read so."""
        head, close = heads[0], self._members.value_close
        if self._members.values != "raw":
            return [[*head, self.node(value)]]
        terms = self._alternatives.of(value)
        names = list(dict.fromkeys(name for term in terms for name in term.types if name != "string"))
        texts = [demands.Texts.of(term) for term in terms if "string" in term.types]
        is_unambiguous = not texts or len(heads) > 1
        beside = "" if is_unambiguous else _beside({_json_type(name) for name in names})
        alternatives = [[*heads[-1], *symbols] for text in texts for symbols in self._strings(text, close, beside)]
        if not is_unambiguous:
            alternatives += [[*head, *scalar] for term in terms for scalar in self._scalars(term, close)]
        if names := names if is_unambiguous else [name for name in names if name in STARTS]:
            entry = Entry(DERIVED + "+".join(names), {"type": names}, plain=True)
            alternatives.append([*head, self.node((*value, entry)), *self._symbols(close)])
        return alternatives

    def _scalars(self, term: Term, close: str) -> list[Symbols]:
        """Scalars of JSON, each one lexeme up to the close: a raw string may begin alike."""
        texts = [text for name in ("null", "boolean") for text in self._constants(term, name)]
        alternatives = [self._until([words(texts)], close)] if texts else []
        if (number := self._number(term)) is not None:
            is_text = number.text.startswith("/")
            alternatives.append(self._until([number.text], close) if is_text else [number, *self._symbols(close)])
        return alternatives


def _beside(names: Iterable[str]) -> str:
    """A pattern of the texts that read as JSON of these types; empty for no types."""
    patterns = [rf"{BLANK}{SCALARS[name]}{BLANK}" for name in sorted(names) if name in SCALARS]
    return "|".join([*patterns, *(rf"{BLANK}{STARTS[name]}(?s:.*)" for name in sorted(names) if name in STARTS)])


def _containing(text: str) -> str:
    """A Lark expression of the texts that do not contain `text`."""
    return f"~/(?s:.*){escaped(text)}(?s:.*)/"

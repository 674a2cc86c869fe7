"""Shapes of Lark text as llguidance reads it: rules are made of lexemes, and each terminal is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from asyncengine.grammar.lark import placed
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.patterns import regex_shape
from asyncengine.grammar.shapes.products import Product
from asyncengine.grammar.vocabulary import Vocabulary

_OPEN, _CLOSE = ("(", "[", "{"), (")", "]", "}")
_ENDS = ("", "|", "&", *_CLOSE)
_COUNTS = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_PREFIX = re.compile(r"(?m)^([ \t]*)[?!](?=[A-Za-z_])")
_ANY = nodes.Times(nodes.Letters(nodes.span(0, 255)), 0, None)
Token = tuple[str, str, int]
"""(kind, text, where it begins), see `lark.placed`."""


def expression_shape(text: str, json: bool = False) -> nodes.Shape:
    """The shape of a terminal's expression without names; `json`: of patterns, as for `regex_shape`. Raises
    `Unmodelled`."""
    return _Parser([*placed(text)], None, json=json).whole()


def lark_shape(text: str, embedded: list[nodes.Shape], vocabulary: Vocabulary) -> nodes.Shape:
    """The shape of a grammar. `embedded`: those of the schemas in it, in its order. Raises `Unmodelled`."""
    tokens = [*placed(_PREFIX.sub(r"\1 ", text))]
    places = (begin for kind, _, begin in tokens if kind == "json")
    return _Scope(tokens, dict(zip(places, embedded, strict=True)), vocabulary).start()


class _Definition(NamedTuple):
    body: list[Token]
    attributes: list[Token]


class _Scope:
    """The names of one grammar and their shapes."""

    def __init__(self, tokens: list[Token], embedded: Mapping[int, nodes.Shape], vocabulary: Vocabulary) -> None:
        self.embedded = embedded
        self.vocabulary = vocabulary
        self.made: list[nodes.Chain | nodes.Either | nodes.Times | nodes.Unordered] = []
        self.skipped: list[nodes.Shape] = []
        self._known: dict[str, _Definition] = {}
        self._terminals: dict[str, nodes.Shape] = {}
        self._rules: dict[str, nodes.Shape] = {}
        self._pending: list[tuple[nodes.Name, str]] = []
        for body in self._define(tokens):
            self.skipped.append(nodes.Lexeme(_Parser(body, self, lexed=False).whole()))

    def _define(self, tokens: list[Token]) -> list[list[Token]]:
        """Take definitions apart, which begin at `name:` or `name[...]:`. Returns what is ignored between lexemes."""
        body: list[Token] = []
        ignored: list[list[Token]] = []
        depth = at = 0
        while at < len(tokens):
            kind, said, _ = tokens[at]
            named = kind == "name" and not depth
            colon = _closing(tokens, at + 1) + 1 if named and _said(tokens, at + 1) == "[" else at + 1
            if named and _said(tokens, colon) == ":":
                self._known[said] = _Definition(body := [], tokens[at + 1 : colon])
                at = colon
            elif said == "%ignore" and kind == "keyword":
                ignored.append(body := [])
            elif said == "%llguidance" and kind == "keyword":
                body = []  # its options
            else:
                depth += (said in _OPEN) - (said in _CLOSE)
                body.append(tokens[at])
            at += 1
        return ignored

    def start(self) -> nodes.Shape:
        first = self.rule("start")
        for named, name in self._pending:  # grows while it is walked
            named.target = self._without_left_recursion(named, _Parser(self._known[name].body, self).whole())
        if any(self._begins(named) for named, _ in self._pending):
            raise nodes.Unmodelled
        return nodes.resolve(self.made, first)

    def terminal(self, name: str) -> nodes.Shape:
        """The shape of a terminal; those that it is made of are read before it, for a chain of them may be long."""
        if name not in self._known:
            raise nodes.Unmodelled
        begun = set[str]()
        stack = [] if name in self._terminals else [(name, self._names(name))]
        while stack:
            here, names = stack[-1]
            begun.add(here)
            missing = next((one for one in names if one not in self._terminals), None)
            if missing in begun:
                raise nodes.Unmodelled
            if missing is not None:
                stack.append((missing, self._names(missing)))
            else:
                self._terminals[here] = _Parser(self._known[here].body, self, lexed=False).whole()
                stack.pop()
        return self._terminals[name]

    def _names(self, name: str) -> Iterator[str]:
        return (said for kind, said, _ in self._known[name].body if kind == "name" and said in self._known)

    def rule(self, name: str) -> nodes.Shape:
        if name not in self._rules:
            if name not in self._known:
                raise nodes.Unmodelled
            end = _lazy_end(self._known[name].attributes)
            if name.lstrip("_")[:1].isupper():
                self._rules[name] = self.lexeme(self.terminal(name))
            elif end is not None:
                self._rules[name] = self.lexeme(
                    nodes.chain([self.terminal(name), _Parser(end, None).whole()]), lazy=True
                )
            else:
                self._rules[name] = named = nodes.Name()
                self._pending.append((named, name))
        return self._rules[name]

    def _begins(self, named: nodes.Name) -> bool:
        """A rule begins with itself, others between: what is around the first of them has no end."""
        seen: dict[nodes.Shape, None] = {}
        todo: list[nodes.Shape] = [named.target]
        for shape in todo:  # grows while it is walked
            if shape is named:
                return True
            if shape in seen or isinstance(shape, nodes.Lexeme):
                continue
            seen[shape] = None
            if isinstance(shape, nodes.Name):
                todo.append(shape.target)
            else:
                todo += shape.items[:1] if isinstance(shape, nodes.Chain) else nodes.parts(shape)
        return False

    def keep(self, shape: nodes.Chain | nodes.Either | nodes.Times) -> nodes.Shape:
        self.made.append(shape)
        return shape

    def lexeme(self, shape: nodes.Shape, lazy: bool = False) -> nodes.Shape:
        """A lexeme, with what may be ignored behind it."""
        return self.behind(nodes.Lexeme(shape, lazy))

    def behind(self, shape: nodes.Shape) -> nodes.Shape:
        """A shape with what may be ignored behind it: the library allows that where a lexeme may follow, after the
        first."""
        return nodes.Chain([shape, nodes.Times(nodes.Either(self.skipped), 0, None)]) if self.skipped else shape

    def _without_left_recursion(self, named: nodes.Name, shape: nodes.Shape) -> nodes.Shape:
        """`a: a "x" | "b"` as `"b" "x"*`: a place before all of it would have no end of others around it."""
        options = shape.items if isinstance(shape, nodes.Either) else (shape,)
        again = [one.items[1:] for one in options if isinstance(one, nodes.Chain) and one.items[:1] == (named,)]
        others = [one for one in options if not (isinstance(one, nodes.Chain) and one.items[:1] == (named,))]
        first = self.keep(nodes.Either(others))
        if not again:
            return first
        more = self.keep(
            nodes.Times(self.keep(nodes.Either([self.keep(nodes.Chain(items)) for items in again])), 0, None)
        )
        return self.keep(nodes.Chain([first, more]))


class _Parser:
    """Reads one expression: of rules, where each text is a lexeme, or of a terminal."""

    def __init__(self, tokens: list[Token], scope: _Scope | None, lexed: bool = True, json: bool = False) -> None:
        self._tokens = tokens
        self._json = json
        self._scope = scope
        self._lexed = lexed and scope is not None
        self._at = 0

    def whole(self) -> nodes.Shape:
        shape = self._either()
        if self._at < len(self._tokens):
            raise nodes.Unmodelled
        return shape

    def _next(self, ahead: int = 0) -> str:
        return _said(self._tokens, self._at + ahead)

    def _take(self, *texts: str) -> bool:
        if all(self._next(ahead) == text for ahead, text in enumerate(texts)):
            self._at += len(texts)
            return True
        return False

    def _keep(self, shape: nodes.Chain | nodes.Either | nodes.Times) -> nodes.Shape:
        return self._scope.keep(shape) if self._lexed and self._scope is not None else shape

    def _either(self) -> nodes.Shape:
        options = [self._meet()]
        while self._take("|"):
            options.append(self._meet())
        return options[0] if len(options) == 1 else self._keep(nodes.Either(options))

    def _meet(self) -> nodes.Shape:
        """Sequences that a text matches all, and those behind `~`, which it must not match."""
        wanted: list[nodes.Shape] = []
        wrong: list[nodes.Shape] = []
        while True:
            without = self._take("~")
            (wrong if without else wanted).append(self._sequence())
            if not self._take("&"):
                break
        if not wrong and len(wanted) == 1:
            return wanted[0]
        if self._lexed:
            raise nodes.Unmodelled
        return Product(wanted or [_ANY], wrong)

    def _sequence(self) -> nodes.Shape:
        found: list[nodes.Shape] = []
        while self._next() not in _ENDS:
            if self._take("-", ">"):  # what it is called
                self._at += 1
                break
            found.append(self._counted(self._atom()))
        if self._lexed:
            return found[0] if len(found) == 1 else self._keep(nodes.Chain(found))
        return nodes.chain(found)

    def _counted(self, shape: nodes.Shape) -> nodes.Shape:
        while True:
            if (counts := _COUNTS.get(self._next())) is not None:
                self._at += 1
            elif self._next() == "{" or (self._next() == "~" and self._next(1).isdecimal()):
                counts = self._bounds()
            else:
                return shape
            shape = self._keep(nodes.Times(shape, *counts))

    def _bounds(self) -> tuple[int, int | None]:
        """The bounds in `{m}`, `{m,n}`, `{m,}`, `{,n}`, `~m` or `~m..n`."""
        brace = self._take("{")
        if not brace:
            self._at += 1
        least = self._number() or 0
        most: int | None = least
        if self._take(",") or self._take(".", "."):
            most = self._number()
        if brace and not self._take("}"):
            raise nodes.Unmodelled
        return least, most

    def _number(self) -> int | None:
        if not self._next().isdecimal():
            return None
        self._at += 1
        return int(self._next(-1)[:9])

    def _atom(self) -> nodes.Shape:
        kind, said, begin = self._tokens[self._at]
        self._at += 1
        match kind:
            case "string":
                return self._lexeme(self._text(said))
            case "regex":
                pattern, _, flags = said[1:].rpartition("/")
                return self._lexeme(regex_shape(pattern.replace("\\/", "/"), flags, self._json))
        if kind == "other" and said in ("(", "["):
            inner = self._either()
            if not self._take(")" if said == "(" else "]"):
                raise nodes.Unmodelled
            return inner if said == "(" else self._keep(nodes.Times(inner, 0, 1))
        scope = self._scope
        if scope is not None and kind == "name":
            return scope.rule(said) if self._lexed else scope.terminal(said)
        if scope is None or not self._lexed:
            raise nodes.Unmodelled
        if kind == "json":
            return scope.behind(scope.embedded[begin])
        if kind == "mark":
            return scope.behind(mark_shape(said, scope.vocabulary))
        if said == "%lark" and self._next() == "{":
            end = _closing(self._tokens, self._at)
            inside, self._at = self._tokens[self._at + 1 : end], end + 1
            return scope.behind(_Scope(inside, scope.embedded, scope.vocabulary).start())
        raise nodes.Unmodelled

    def _lexeme(self, shape: nodes.Shape) -> nodes.Shape:
        return (
            self._scope.lexeme(shape)
            if self._lexed and self._scope is not None and shape is not nodes.NOTHING
            else shape
        )

    def _text(self, said: str) -> nodes.Shape:
        text, any_case = _unquoted(said)
        if self._take(".", "."):
            last, _ = _unquoted(self._next())
            self._at += 1
            if len(text) != 1 or len(last) != 1:
                raise nodes.Unmodelled
            return nodes.letters([(ord(text), ord(last))])
        return regex_shape(re.escape(text), "i") if any_case else nodes.literal(text.encode("utf-8", "replace"))


def mark_shape(said: str, vocabulary: Vocabulary) -> nodes.Shape:
    """A special token by its name or number. Raises `Unmodelled`."""
    number = said[2:-2] if said[1] == "[" else ""
    names = {vocabulary.token_bytes[token]: token for token in vocabulary.marks}
    token = int(number[:9]) if number.isdecimal() else names.get(said.encode(), -1)
    if token not in vocabulary.marks:
        raise nodes.Unmodelled
    return nodes.Mark(token, vocabulary.symbols(token)[0])


def _said(tokens: list[Token], at: int) -> str:
    return tokens[at][1] if at < len(tokens) else ""


def _closing(tokens: list[Token], at: int) -> int:
    """The index of the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index][1] in _OPEN) - (tokens[index][1] in _CLOSE)
        if not depth:
            return index
    return len(tokens)


def _lazy_end(attributes: list[Token]) -> list[Token] | None:
    """The end of a lazy rule besides its own text; None for a rule that is not lazy."""
    said = [text for _, text, _ in attributes]
    for name in ("suffix", "stop"):
        if name in said:
            return attributes[said.index(name) + 2 : said.index(name) + 3]
    return [] if "lazy" in said else None


def _unquoted(said: str) -> tuple[str, bool]:
    """The text of a Lark string, and whether its case does not matter."""
    try:
        text = json.loads(said.removesuffix("i"))
    except ValueError:
        raise nodes.Unmodelled from None
    return str(text), said.endswith("i")

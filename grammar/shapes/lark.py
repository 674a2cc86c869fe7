"""Shapes of Lark text as llguidance reads it: rules are made of lexemes, and each terminal or literal is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from asyncengine.grammar.lark import tokenize
from asyncengine.grammar.shapes import nodes
from asyncengine.grammar.shapes.patterns import regex_shape
from asyncengine.grammar.shapes.products import Product
from asyncengine.grammar.vocabulary import Vocabulary

_OPEN, _CLOSE = ("(", "[", "{"), (")", "]", "}")
_ENDS = ("", "|", "&", *_CLOSE)
_COUNTS = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_PREFIX = re.compile(r"(?m)^([ \t]*)[?!](?=[A-Za-z_])")
_ANY = nodes.Repeat(nodes.CharSet(nodes.span(0, 255)), 0, None)
Token = tuple[str, str, int]
"""(kind, text, offset), see `lark.tokenize`."""


def expression_shape(text: str, json: bool = False) -> nodes.Shape:
    """The shape of a terminal's expression, which names no other. `json`: as for `regex_shape`. Raises `Unmodelled`."""
    return _Parser([*tokenize(text)], None, json=json).whole()


def lark_shape(text: str, embedded: list[nodes.Shape], vocabulary: Vocabulary) -> nodes.Shape:
    """The shape of a grammar. `embedded`: those of its `%json` schemas, in its order. Raises `Unmodelled`."""
    tokens = [*tokenize(_PREFIX.sub(r"\1 ", text))]
    offsets = (begin for kind, _, begin in tokens if kind == "json")
    return _Scope(tokens, dict(zip(offsets, embedded, strict=True)), vocabulary).start()


class _Definition(NamedTuple):
    body: list[Token]
    attributes: list[Token]


class _Scope:
    """The rules and terminals of one grammar, or of a `%lark` block in it, and their shapes."""

    def __init__(self, tokens: list[Token], embedded: Mapping[int, nodes.Shape], vocabulary: Vocabulary) -> None:
        self.embedded = embedded
        self.vocabulary = vocabulary
        self.made: list[nodes.Concat | nodes.Choice | nodes.Repeat | nodes.Unordered] = []
        self.skipped: list[nodes.Shape] = []
        self._known: dict[str, _Definition] = {}
        self._terminals: dict[str, nodes.Shape] = {}
        self._rules: dict[str, nodes.Shape] = {}
        self._pending: list[tuple[nodes.Rule, str]] = []
        for body in self._define(tokens):
            self.skipped.append(nodes.Lexeme(_Parser(body, self, lexed=False).whole()))

    def _define(self, tokens: list[Token]) -> list[list[Token]]:
        """Split the text into definitions, which begin with `name:` or `name[...]:`. Returns bodies of `%ignore`."""
        body: list[Token] = []
        ignored: list[list[Token]] = []
        depth = index = 0
        while index < len(tokens):
            kind, text, _ = tokens[index]
            named = kind == "name" and not depth
            colon = _closing_index(tokens, index + 1) + 1 if named and _text_at(tokens, index + 1) == "[" else index + 1
            if named and _text_at(tokens, colon) == ":":
                self._known[text] = _Definition(body := [], tokens[index + 1 : colon])
                index = colon
            elif text == "%ignore" and kind == "keyword":
                ignored.append(body := [])
            elif text == "%llguidance" and kind == "keyword":
                body = []  # its options
            else:
                depth += (text in _OPEN) - (text in _CLOSE)
                body.append(tokens[index])
            index += 1
        return ignored

    def start(self) -> nodes.Shape:
        first = self.rule("start")
        for rule, name in self._pending:  # grows while it is walked
            rule.target = self._without_left_recursion(rule, _Parser(self._known[name].body, self).whole())
        if any(self._begins(rule) for rule, _ in self._pending):
            raise nodes.Unmodelled
        return nodes.resolve(self.made, first)

    def terminal(self, name: str) -> nodes.Shape:
        """The shape of a terminal. Those that it names are read first, by a stack: a chain of them may be longer than
        Python's recursion limit. Raises `Unmodelled` for one that names itself."""
        if name not in self._known:
            raise nodes.Unmodelled
        begun = set[str]()
        stack = [] if name in self._terminals else [(name, self._names(name))]
        while stack:
            current, names = stack[-1]
            begun.add(current)
            missing = next((dependency for dependency in names if dependency not in self._terminals), None)
            if missing in begun:
                raise nodes.Unmodelled
            if missing is not None:
                stack.append((missing, self._names(missing)))
            else:
                self._terminals[current] = _Parser(self._known[current].body, self, lexed=False).whole()
                stack.pop()
        return self._terminals[name]

    def _names(self, name: str) -> Iterator[str]:
        return (text for kind, text, _ in self._known[name].body if kind == "name" and text in self._known)

    def rule(self, name: str) -> nodes.Shape:
        if name not in self._rules:
            if name not in self._known:
                raise nodes.Unmodelled
            end = _lazy_end(self._known[name].attributes)
            if name.lstrip("_")[:1].isupper():
                self._rules[name] = self.lexeme(self.terminal(name))
            elif end is not None:
                self._rules[name] = self.lexeme(
                    nodes.concat([self.terminal(name), _Parser(end, None).whole()]), lazy=True
                )
            else:
                self._rules[name] = rule = nodes.Rule()
                self._pending.append((rule, name))
        return self._rules[name]

    def _begins(self, rule: nodes.Rule) -> bool:
        """Whether a rule begins with itself through others (indirect left recursion): its frames would never end."""
        seen: dict[nodes.Shape, None] = {}
        pending: list[nodes.Shape] = [rule.target]
        for shape in pending:  # grows while it is walked
            if shape is rule:
                return True
            if shape in seen or isinstance(shape, nodes.Lexeme):
                continue
            seen[shape] = None
            if isinstance(shape, nodes.Rule):
                pending.append(shape.target)
            else:
                pending += shape.items[:1] if isinstance(shape, nodes.Concat) else nodes.children(shape)
        return False

    def keep(self, shape: nodes.Concat | nodes.Choice | nodes.Repeat) -> nodes.Shape:
        self.made.append(shape)
        return shape

    def lexeme(self, shape: nodes.Shape, lazy: bool = False) -> nodes.Shape:
        """A lexeme, with what may be ignored behind it."""
        return self.behind(nodes.Lexeme(shape, lazy))

    def behind(self, shape: nodes.Shape) -> nodes.Shape:
        """A shape, and behind it what `%ignore` names: the library lets that follow each lexeme but precede none."""
        return nodes.Concat([shape, nodes.Repeat(nodes.Choice(self.skipped), 0, None)]) if self.skipped else shape

    def _without_left_recursion(self, rule: nodes.Rule, shape: nodes.Shape) -> nodes.Shape:
        """`a: a "x" | "b"` as `"b" "x"*`: the parser descends, so frames of left recursion would nest endlessly."""
        options = shape.items if isinstance(shape, nodes.Choice) else (shape,)
        recursive = [one for one in options if isinstance(one, nodes.Concat) and one.items[:1] == (rule,)]
        base = self.keep(nodes.Choice([one for one in options if one not in recursive]))
        if not recursive:
            return base
        tails = self.keep(nodes.Choice([self.keep(nodes.Concat(one.items[1:])) for one in recursive]))
        return self.keep(nodes.Concat([base, self.keep(nodes.Repeat(tails, 0, None))]))


class _Parser:
    """Recursive descent over one expression: a rule's, in which each text is a lexeme, or a terminal's."""

    def __init__(self, tokens: list[Token], scope: _Scope | None, lexed: bool = True, json: bool = False) -> None:
        self._tokens = tokens
        self._json = json
        self._scope = scope
        self._lexing = scope if lexed else None
        """The scope in a rule's expression, where each text is a lexeme."""
        self._at = 0

    def whole(self) -> nodes.Shape:
        shape = self._either()
        if self._at < len(self._tokens):
            raise nodes.Unmodelled
        return shape

    def _next(self, ahead: int = 0) -> str:
        return _text_at(self._tokens, self._at + ahead)

    def _take(self, *texts: str) -> bool:
        if all(self._next(ahead) == text for ahead, text in enumerate(texts)):
            self._at += len(texts)
            return True
        return False

    def _keep(self, shape: nodes.Concat | nodes.Choice | nodes.Repeat) -> nodes.Shape:
        return self._lexing.keep(shape) if self._lexing else shape

    def _either(self) -> nodes.Shape:
        options = [self._meet()]
        while self._take("|"):
            options.append(self._meet())
        return options[0] if len(options) == 1 else self._keep(nodes.Choice(options))

    def _meet(self) -> nodes.Shape:
        """Sequences joined by `&`, all of which a text matches, but none of those behind `~`."""
        wanted: list[nodes.Shape] = []
        wrong: list[nodes.Shape] = []
        while True:
            without = self._take("~")
            (wrong if without else wanted).append(self._sequence())
            if not self._take("&"):
                break
        if not wrong and len(wanted) == 1:
            return wanted[0]
        if self._lexing:
            raise nodes.Unmodelled
        return Product(wanted or [_ANY], wrong)

    def _sequence(self) -> nodes.Shape:
        items: list[nodes.Shape] = []
        while self._next() not in _ENDS:
            if self._take("-", ">"):  # an alias, which names the alternative and changes nothing
                self._at += 1
                break
            items.append(self._counted(self._atom()))
        if self._lexing:
            return items[0] if len(items) == 1 else self._keep(nodes.Concat(items))
        return nodes.concat(items)

    def _counted(self, shape: nodes.Shape) -> nodes.Shape:
        while True:
            if (counts := _COUNTS.get(self._next())) is not None:
                self._at += 1
            elif self._next() == "{" or (self._next() == "~" and self._next(1).isdecimal()):
                counts = self._bounds()
            else:
                return shape
            shape = self._keep(nodes.Repeat(shape, *counts))

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
        kind, text, begin = self._tokens[self._at]
        self._at += 1
        match kind:
            case "string":
                return self._lexeme(self._text(text))
            case "regex":
                pattern, _, flags = text[1:].rpartition("/")
                return self._lexeme(regex_shape(pattern.replace("\\/", "/"), flags, self._json))
        if kind == "other" and text in ("(", "["):
            inner = self._either()
            if not self._take(")" if text == "(" else "]"):
                raise nodes.Unmodelled
            return inner if text == "(" else self._keep(nodes.Repeat(inner, 0, 1))
        if kind == "name" and self._scope and not self._lexing:
            return self._scope.terminal(text)
        if (scope := self._lexing) is None:
            raise nodes.Unmodelled
        if kind == "name":
            return scope.rule(text)
        if kind == "json":
            return scope.behind(scope.embedded[begin])
        if kind == "mark":
            return scope.behind(special_token_shape(text, scope.vocabulary))
        if text == "%lark" and self._next() == "{":
            end = _closing_index(self._tokens, self._at)
            inside, self._at = self._tokens[self._at + 1 : end], end + 1
            return scope.behind(_Scope(inside, scope.embedded, scope.vocabulary).start())
        raise nodes.Unmodelled

    def _lexeme(self, shape: nodes.Shape) -> nodes.Shape:
        return self._lexing.lexeme(shape) if self._lexing and shape is not nodes.NOTHING else shape

    def _text(self, token: str) -> nodes.Shape:
        text, any_case = _unquoted(token)
        if self._take(".", "."):
            last, _ = _unquoted(self._next())
            self._at += 1
            if len(text) != 1 or len(last) != 1:
                raise nodes.Unmodelled
            return nodes.letters([(ord(text), ord(last))])
        return regex_shape(re.escape(text), "i") if any_case else nodes.literal(text.encode("utf-8", "replace"))


def special_token_shape(text: str, vocabulary: Vocabulary) -> nodes.Shape:
    """A special token by its name or number. Raises `Unmodelled`."""
    number = text[2:-2] if text[1] == "[" else ""
    names = {vocabulary.token_bytes[token]: token for token in vocabulary.marks}
    token = int(number[:9]) if number.isdecimal() else names.get(text.encode(), -1)
    if token not in vocabulary.marks:
        raise nodes.Unmodelled
    return nodes.SpecialToken(token, vocabulary.symbols(token)[0])


def _text_at(tokens: list[Token], at: int) -> str:
    return tokens[at][1] if at < len(tokens) else ""


def _closing_index(tokens: list[Token], at: int) -> int:
    """The index of the bracket that closes the one at `at`."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index][1] in _OPEN) - (tokens[index][1] in _CLOSE)
        if not depth:
            return index
    return len(tokens)


def _lazy_end(attributes: list[Token]) -> list[Token] | None:
    """The text that ends a lazy rule, `suffix` or `stop`, [] if none is given; None for a rule that is not lazy."""
    texts = [text for _, text, _ in attributes]
    for name in ("suffix", "stop"):
        if name in texts:
            return attributes[texts.index(name) + 2 : texts.index(name) + 3]
    return [] if "lazy" in texts else None


def _unquoted(token: str) -> tuple[str, bool]:
    """(text of a Lark string, whether its case is ignored)."""
    try:
        text = json.loads(token.removesuffix("i"))
    except ValueError:
        raise nodes.Unmodelled from None
    return str(text), token.endswith("i")

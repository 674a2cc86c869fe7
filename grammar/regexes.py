"""From Python's regular expressions to the dialect both libraries read (that of Rust's `regex` crate).

Only what means the same is passed on. What no automaton has (look-behind, back-references) is refused by name, and what
the two dialects read differently is rewritten: `[[a&&b]`, `{,3}`, a literal `{`, `\\<`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.lark import regex
from asyncengine.grammar.spec import check_text

# Patterns with look-aheads as expressions that an automaton has: a text matches `(?!A)B` if it matches B, and not A.

Token = tuple[str, str]
"""(kind, text); kinds: atom, open, close, bar, quant, flags, start, end."""
AHEAD = ("(?=", "(?!")
MAX_APART = 64
"""Look-aheads of a pattern, and alternatives that are taken apart."""


class Alternative(NamedTuple):
    """One alternative: a pattern, and then perhaps a look-ahead and what follows it."""

    text: str
    start: bool
    """It begins where the text does; otherwise anywhere."""
    end: bool
    """It ends where the text does."""
    ahead: tuple[str, Pattern, Pattern] | None
    """(operator, pattern that is looked for, pattern behind it)."""


class Pattern(NamedTuple):
    """The alternatives of a pattern, and flags that hold in all of them."""

    flags: str
    parts: list[Alternative]

    @property
    def plain(self) -> str | None:
        """The pattern without anchors; None if it looks ahead."""
        return None if any(part.ahead for part in self.parts) else self.flags + "|".join(p.text for p in self.parts)

    def lark(self, opening: str, anything: str, closing: str) -> str:
        """A Lark expression, in parentheses if need be. `opening`, `anything` and `closing` are patterns of what stands
        before a text, in it and behind it."""
        plain = [
            f"{'' if start else anything}(?:{text}){'' if end else anything}"
            for text, start, end, ahead in self.parts
            if ahead is None
        ]
        alternatives = [regex(f"{self.flags}{opening}(?:{'|'.join(plain)}){closing}")] if plain else []
        for text, start, _, ahead in self.parts:
            if ahead is not None:
                prefix = f"{opening}{'' if start else anything}(?:{text})"
                sign, inner, rest = ahead[0], *(pattern.lark("", anything, closing) for pattern in ahead[1:])
                alternatives.append(f"({regex(self.flags + prefix)} ({rest} & {sign}{inner}))")
        return alternatives[0] if len(alternatives) == 1 else f"({' | '.join(alternatives)})"


def look_ahead(tokens: list[Token], *, whole: bool) -> Pattern:
    """The alternatives of a pattern that is matched from end to end if `whole`, or else found in a text. Raises
    `GrammarUnsupported` for an anchor in the middle and a look-ahead in a group that is repeated."""
    return _Reader().pattern(tokens, "", here=whole, first=True, whole=whole)


class _Reader:
    def __init__(self) -> None:
        self._left = MAX_APART

    def pattern(self, tokens: list[Token], flags: str, *, here: bool, first: bool, whole: bool) -> Pattern:
        """`here`: it is anchored where it stands; `first`: which may be the beginning of the text; `whole`: it is
        anchored at the end of the text."""
        while tokens and tokens[0][0] == "flags":
            flags, tokens = flags + tokens[0][1], tokens[1:]
        branches = [apart for branch in _branches(tokens) for apart in self._apart(branch, whole)]
        return Pattern(flags, [self._part(branch, flags, here, first, whole) for branch in branches])

    def _part(self, branch: list[Token], flags: str, here: bool, first: bool, whole: bool) -> Alternative:
        before, opening, looked_for, rest = _cut(branch)
        end = whole
        while first and before[:1] and before[0][0] == "start":
            before, here = before[1:], True
        while not opening and before[-1:] and before[-1][0] == "end":
            before, end = before[:-1], True
        if any(kind in ("start", "end") for kind, _ in before) or any(
            tokens[0][0] == "quant" for tokens in (before, rest) if tokens
        ):
            raise _unsupported(branch)
        text = "".join(text for _, text in before)
        if not opening:
            return Alternative(text, here, end, None)
        self._spend(1, branch)
        first = first and here and not before
        inner = self.pattern(looked_for, flags, here=True, first=first, whole=False)
        following = self.pattern(rest, flags, here=True, first=first, whole=whole)
        return Alternative(text, here, False, ("" if opening == "(?=" else "~", inner, following))

    def _apart(self, branch: list[Token], whole: bool) -> Iterator[list[Token]]:
        """Expand a branch whose first special group is no look-ahead into one branch for each alternative of it."""
        before, opening, inner, rest = _cut(branch)
        if not opening or opening in AHEAD:
            yield branch
            return
        quant = rest[0][1] if rest and rest[0][0] == "quant" else ""
        if quant and quant[0] != "?":
            options = [_tempered(inner, rest, whole)]
        elif opening.endswith(":") and opening != "(?:":  # its flags hold in it alone
            options = [[]]
        else:
            options = [[*option, *rest[bool(quant) :]] for option in [*_branches(inner), *([[]] if quant else [])]]
        if options == [[]]:
            raise _unsupported(branch)
        self._spend(len(options), branch)
        for tokens in options:
            yield from self._apart([*before, *tokens], whole)

    def _spend(self, amount: int, tokens: list[Token]) -> None:
        self._left -= amount
        if self._left < 0:
            raise _unsupported(tokens)


def _tempered(inner: list[Token], rest: list[Token], whole: bool) -> list[Token]:
    """`((?!A)X)*` at the end of a pattern, X being one atom, as `(?!X*(?=X)A)X*`; nothing for any other group."""
    tokens: list[Token] = []
    atom = inner[-1:]
    while inner[:1] == [("open", "(?!")]:
        _, _, forbidden, inner = _cut(inner)
        lookahead = [("open", "(?="), *atom, ("close", ")"), ("open", "(?:"), *forbidden, ("close", ")")]
        tokens += [("open", "(?!"), *atom, ("quant", "*"), *lookahead, ("close", ")")]
    at_end = all(kind == "end" for kind, _ in rest[1:]) and (whole or len(rest) > 1)
    return [*tokens, *atom, *rest] if at_end and tokens and len(inner) == 1 and inner[0][0] == "atom" else []


def _cut(tokens: list[Token]) -> tuple[list[Token], str, list[Token], list[Token]]:
    """(tokens before, opening, tokens inside, tokens behind) of the first look-ahead, or of the first group with one or
    an anchor in it. Without any: (tokens, "", [], [])."""
    depth = begin = 0
    special = False
    for index, (kind, text) in enumerate(tokens):
        if kind == "open" and not depth:
            begin, special = index, False
        depth += (kind == "open") - (kind == "close")
        special = special or kind in ("start", "end") or text in AHEAD
        if kind == "close" and not depth and special:
            return tokens[:begin], tokens[begin][1], tokens[begin + 1 : index], tokens[index + 1 :]
    return tokens, "", [], []


def _branches(tokens: list[Token]) -> list[list[Token]]:
    """The alternatives of a pattern."""
    branches: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token[0] == "open") - (token[0] == "close")
        if token[0] == "bar" and not depth:
            branches.append([])
        else:
            branches[-1].append(token)
    return branches


def _unsupported(tokens: list[Token]) -> GrammarError:
    """The error that names the first of `tokens` which cannot be written."""
    for kind, text in tokens:
        if text in AHEAD:
            return GrammarUnsupported("grammar", [("look-ahead", "")], "repeated, or beside too many others")
        if kind in ("start", "end"):
            return GrammarUnsupported("grammar", [(f"{text} in the middle", "")], "an anchor can only be at an end")
    return GrammarError("grammar", "a repetition in the pattern has nothing to repeat")


_CODE = r"[xu]\{[0-9A-Fa-f]{1,8}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[pP]\{[^{}]{1,64}\}|[0-9]+"
"""An escape of several characters, without its backslash."""
_TOKEN = re.compile(
    rf"""
      (?P<escape> \\(?: {_CODE} | . | \Z ) )
    | (?P<set>    \[ \^? \]? (?: \[:\^?[a-z]{{1,16}}:\] | \\. | [^\]\\] )* (?: \] | \\?\Z ) )
    | (?P<flags>  \(\? [A-Za-z-]{{1,8}} \) )
    | (?P<open>   \( (?: \? (?: P?<[A-Za-z_][A-Za-z0-9_]{{0,63}}> | [A-Za-z-]{{0,8}}: | P[=>] | <?[=!] | [>(\#] )? )? )
    | (?P<close>  \) )
    | (?P<bar>    \| )
    | (?P<quant>  (?: [*+?] | \{{ (?: [0-9]+ (?: ,[0-9]* )? | ,[0-9]* ) \}} ) [?+]? )
    | (?P<other>  . )
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_SET = re.compile(r"(ITEM)(?:-(ITEM))?".replace("ITEM", rf"\[:\^?[a-z]{{1,16}}:\]|\\(?:{_CODE}|.)|."), re.DOTALL)
"""A character or class of a set, and perhaps the end of a range that begins there."""
LOOK_AHEAD = "look-ahead"
_NAMES = {
    "(?=": LOOK_AHEAD, "(?!": LOOK_AHEAD, "(?<=": "look-behind", "(?<!": "look-behind", "(?>": "atomic group",
    "(?(": "conditional group", "(?#": "comment group", "(?P=": "back-reference", "(?P>": "subroutine call",
}  # fmt: skip
_ANCHORS = {"^": "start", "\\A": "start", "$": "end", "\\Z": "end", "\\z": "end"}

MAX_CONSTRUCT_PATTERN = 256 << 10
"""Longest pattern that is read at all (0.2 s); `check_limits` allows less."""


def portable(given: object) -> str:
    """A pattern (Python dialect, matched from end to end) in the libraries' dialect, without anchors. Look-aheads stay
    in it: `expression` says what they mean.

    Raises `GrammarUnsupported` naming a construct no automaton has, `GrammarError` for a malformed pattern.
    """
    pattern = check_text(given, "a pattern")
    if len(pattern) > MAX_CONSTRUCT_PATTERN:
        raise GrammarTooLarge("grammar", f"a pattern must not exceed {MAX_CONSTRUCT_PATTERN} characters", len(pattern))
    tokens = _tokens(pattern)
    parsed = look_ahead(tokens, whole=True)
    return "".join(text for _, text in tokens) if (text := parsed.plain) is None else text


def expression(pattern: str) -> str:
    """The Lark expression of a portable pattern: for a terminal, or without look-aheads for a rule, too."""
    return look_ahead(_tokens(pattern), whole=True).lark("", "(?s:.)*", "") if looks_ahead(pattern) else regex(pattern)


def quoted(pattern: str) -> str:
    """A Lark expression of JSON strings without escapes in which `pattern` is found. Raises as `portable`."""
    return look_ahead(_tokens(pattern), whole=False).lark('"', '[^"]*', '"')


def searched(pattern: str) -> str:
    """A Lark expression of texts in which `pattern` is found. Raises as `portable`."""
    return look_ahead(_tokens(pattern), whole=False).lark("", "(?s:.)*", "")


def looks_ahead(pattern: str) -> bool:
    """Whether there may be a look-ahead in a pattern."""
    return any(sign in pattern for sign in AHEAD)


def unsupported_feature(pattern: str) -> str | None:
    """The first construct in `pattern` that no automaton has, by name; None if there is none."""
    names = (_refused(kind, text) for kind, text in scan(pattern))
    return next((name for name in names if name not in (None, LOOK_AHEAD)), None)


def scan(pattern: str) -> Iterator[Token]:
    """The parts of any pattern, well-formed or not, as they are written; kinds: escape, set, flags, open, close, bar,
    quant, other."""
    return ((part.lastgroup or "", part.group()) for part in _TOKEN.finditer(pattern))


def escaped(text: str) -> str:
    """A pattern that matches exactly `text`, in either dialect, fit to stand between slashes."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda m: "\\" + m.group(), text).replace("\n", "\\n").replace("\r", "\\r")


def words(texts: Iterable[str]) -> str:
    """A Lark expression of some texts. Apart from a rule of literals, the library reads it a hundred times faster."""
    return regex(f"(?:{'|'.join(map(escaped, texts))})")


def _refused(kind: str, text: str) -> str | None:
    if kind == "open":
        return _NAMES.get(text)
    if kind == "escape" and text in ("\\b", "\\B", "\\G"):
        return "word boundary"
    if kind == "escape" and (text[1:2] in "123456789" or text[1:2] == "k") and len(text) > 1:
        return "back-reference"
    if kind == "quant" and len(text) > 1 and text[-1] == "+":
        return "possessive quantifier"
    if kind in ("flags", "open") and "x" in text.partition("<")[0]:
        return "verbose mode"
    return None


def _tokens(pattern: str) -> list[Token]:
    tokens: list[Token] = []
    depth = lowest = 0
    for match in _TOKEN.finditer(pattern):
        kind, text = match.lastgroup or "", match.group()
        name = _refused(kind, text)
        if name not in (None, LOOK_AHEAD):
            raise GrammarUnsupported("grammar", [(name, "")], f"at character {match.start()} of the pattern")
        if text in _ANCHORS and kind in ("other", "escape"):
            tokens.append((_ANCHORS[text], text))
        elif kind == "escape":
            tokens.append(("atom", _escape(text)))
        elif kind == "set":
            tokens.append(("atom", _set(text)))
        elif kind == "quant":
            tokens.append(("quant", "{0" + text[1:] if text.startswith("{,") else text))
        elif kind == "other":
            tokens.append(("atom", "\\" + text if text in "{}]" else text))
        else:
            tokens.append((kind, text))
            depth += (kind == "open") - (kind == "close")
            lowest = min(lowest, depth)
    if depth or lowest:
        raise GrammarError("grammar", "the pattern's parentheses are not balanced")
    return tokens


def _escape(text: str) -> str:
    """An escape outside or inside a set. `\\<` is a letter in Python, a word boundary in Rust."""
    if len(text) < 2:
        raise GrammarError("grammar", "the pattern ends in a lone backslash")
    if text[1] == "0":
        raise GrammarError("grammar", "octal escapes and NUL are not supported in a pattern", text)
    if len(text) == 2 and (text[1] in "<>" or not text[1].isascii()):
        return text[1]
    if text == "\\\n":
        return "\\n"
    return text


def _set(text: str) -> str:
    """A character set read as Python does: `[`, `&&`, `--` and `~~` inside it are plain letters."""
    if len(text) < 2 or not text.endswith("]") or text in ("[]", "[^]"):
        raise GrammarError("grammar", "a character set of the pattern is not closed")
    head = "[^" if text.startswith("[^") else "["
    items = _IN_SET.sub(lambda m: _set_item(m[1]) + (f"-{_set_item(m[2])}" if m[2] else ""), text[len(head) : -1])
    return f"{head}{items}]"


def _set_item(item: str) -> str:
    if item == "\\b":
        return "\\x08"
    if len(item) == 1:
        return "\\" + item if item in "[]&~-^" else item
    return item if item.startswith("[:") else _escape(item)

"""Patterns with look-aheads as expressions that an automaton has: a text matches `(?!A)B` if it matches B, and not A.

What stands before a look-ahead is matched first, and the rest of the text is an intersection, which llguidance writes
`&`, with `~` for what does not match. For that the alternatives of a group with a look-ahead or an anchor are taken
apart. A group that is repeated cannot be, but for one: `((?!A)X)*` at the end of a pattern is `X*` without an A.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.lark import regex

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
    """The operator, what is looked for, and the rest."""


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
        found = [regex(f"{self.flags}{opening}(?:{'|'.join(plain)}){closing}")] if plain else []
        for text, start, _, ahead in self.parts:
            if ahead is not None:
                before = f"{opening}{'' if start else anything}(?:{text})"
                sign, inner, rest = ahead[0], *(one.lark("", anything, closing) for one in ahead[1:])
                found.append(f"({regex(self.flags + before)} ({rest} & {sign}{inner}))")
        return found[0] if len(found) == 1 else f"({' | '.join(found)})"


def look_ahead(tokens: list[Token], *, whole: bool) -> Pattern:
    """The alternatives of a pattern that is matched from end to end if `whole`, or else found in a text. Raises
    `GrammarUnsupported` for an anchor in the middle and a look-ahead in a group that is repeated."""
    return _Reader().pattern(tokens, "", here=whole, first=True, whole=whole)


class _Reader:
    def __init__(self) -> None:
        self._left = MAX_APART

    def pattern(self, tokens: list[Token], flags: str, *, here: bool, first: bool, whole: bool) -> Pattern:
        """`here`: it begins where it stands; `first`: that may be the beginning of the text; `whole`: it ends where the
        text does."""
        while tokens and tokens[0][0] == "flags":
            flags, tokens = flags + tokens[0][1], tokens[1:]
        branches = [apart for branch in _branches(tokens) for apart in self._apart(branch, whole)]
        return Pattern(flags, [self._part(branch, flags, here, first, whole) for branch in branches])

    def _part(self, branch: list[Token], flags: str, here: bool, first: bool, whole: bool) -> Alternative:
        at = _special(branch)
        before, end = branch[:at], whole
        while first and before[:1] and before[0][0] == "start":
            before, here = before[1:], True
        while at is None and before[-1:] and before[-1][0] == "end":
            before, end = before[:-1], True
        if any(kind in ("start", "end") for kind, _ in before) or (before and before[0][0] == "quant"):
            raise _unsupported(branch)
        text = "".join(text for _, text in before)
        if at is None:
            return Alternative(text, here, end, None)
        close, first = _closing(branch, at), first and here and not before
        rest = branch[close + 1 :]
        if rest and rest[0][0] == "quant":
            raise _unsupported(branch)
        self._spend(1, branch)
        inner = self.pattern(branch[at + 1 : close], flags, here=True, first=first, whole=False)
        following = self.pattern(rest, flags, here=True, first=first, whole=whole)
        return Alternative(text, here, False, ("" if branch[at][1] == "(?=" else "~", inner, following))

    def _apart(self, branch: list[Token], whole: bool) -> Iterator[list[Token]]:
        """The alternatives of a group with a look-ahead or an anchor one by one, up to the first look-ahead."""
        at = _special(branch)
        if at is None or branch[at][1] in AHEAD:
            yield branch
            return
        close = _closing(branch, at)
        before, inner, rest = branch[:at], branch[at + 1 : close], branch[close + 1 :]
        quant = rest[0][1] if rest and rest[0][0] == "quant" else ""
        if quant and quant[0] != "?":
            found = [_tempered(inner, rest, whole)]
            if found == [[]]:
                raise _unsupported(branch)
        elif branch[at][1].endswith(":") and branch[at][1] != "(?:":  # its flags hold in it alone
            raise _unsupported(branch)
        else:
            found = [[*option, *rest[bool(quant) :]] for option in [*_branches(inner), *([[]] if quant else [])]]
        self._spend(len(found), branch)
        for tokens in found:
            yield from self._apart([*before, *tokens], whole)

    def _spend(self, amount: int, tokens: list[Token]) -> None:
        self._left -= amount
        if self._left < 0:
            raise _unsupported(tokens)


def _tempered(inner: list[Token], rest: list[Token], whole: bool) -> list[Token]:
    """`((?!A)X)*` at the end of a pattern, X being one atom, as `(?!X*(?=X)A)X*`; nothing for any other group."""
    found: list[Token] = []
    last = inner[-1:]
    while inner[:1] == [("open", "(?!")]:
        close = _closing(inner, 0)
        look = [("open", "(?="), *last, ("close", ")"), ("open", "(?:"), *inner[1:close], ("close", ")")]
        found += [("open", "(?!"), *last, ("quant", "*"), *look, ("close", ")")]
        inner = inner[close + 1 :]
    at_end = all(kind == "end" for kind, _ in rest[1:]) and (whole or len(rest) > 1)
    return [*found, *last, *rest] if at_end and found and len(inner) == 1 and inner[0][0] == "atom" else []


def _special(tokens: list[Token]) -> int | None:
    """The index of the first look-ahead, or of the first group in which there is one or an anchor."""
    at = 0
    while at < len(tokens):
        if tokens[at][0] == "open":
            close = _closing(tokens, at)
            if any(kind in ("start", "end") or text in AHEAD for kind, text in tokens[at:close]):
                return at
            at = close
        at += 1
    return None


def _closing(tokens: list[Token], at: int) -> int:
    """The index at which the group closes that opens at `at`."""
    depth = 0
    for index in range(at, len(tokens)):
        depth += (tokens[index][0] == "open") - (tokens[index][0] == "close")
        if not depth:
            return index
    raise AssertionError("the parentheses are balanced")


def _branches(tokens: list[Token]) -> list[list[Token]]:
    """The alternatives of a pattern."""
    found: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token[0] == "open") - (token[0] == "close")
        if token[0] == "bar" and not depth:
            found.append([])
        else:
            found[-1].append(token)
    return found


def _unsupported(tokens: list[Token]) -> GrammarUnsupported:
    """The error that names the first of `tokens` which cannot be written."""
    for kind, text in tokens:
        if text in AHEAD:
            return GrammarUnsupported("grammar", [("look-ahead", "")], "repeated, or beside too many others")
        if kind in ("start", "end"):
            return GrammarUnsupported("grammar", [(f"{text} in the middle", "")], "an anchor can only be at an end")
    raise AssertionError("nothing else is refused")

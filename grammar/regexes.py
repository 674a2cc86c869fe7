"""From Python's regular expressions to the dialect both libraries read (that of Rust's `regex` crate).

Only what means the same is passed on. What no automaton has (look-behind, back-references) is refused by name, and what
the two dialects read differently is rewritten: `[[a&&b]`, `{,3}`, a literal `{`, `\\<`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.lark import regex
from asyncengine.grammar.look_aheads import AHEAD, Token, look_ahead

_TOKEN = re.compile(
    r"""
      (?P<escape> \\(?: x\{[0-9A-Fa-f]{1,8}\} | x[0-9A-Fa-f]{2} | u\{[0-9A-Fa-f]{1,8}\} | u[0-9A-Fa-f]{4}
                      | U[0-9A-Fa-f]{8} | [pP]\{[^{}]{1,64}\} | [0-9]+ | . | \Z ) )
    | (?P<set>    \[ \^? \]? (?: \[:\^?[a-z]{1,16}:\] | \\. | [^\]\\] )* (?: \] | \\?\Z ) )
    | (?P<flags>  \(\? [A-Za-z-]{1,8} \) )
    | (?P<open>   \( (?: \? (?: P?<[A-Za-z_][A-Za-z0-9_]{0,63}> | [A-Za-z-]{0,8}: | P[=>] | <?[=!] | [>(\#] )? )? )
    | (?P<close>  \) )
    | (?P<bar>    \| )
    | (?P<quant>  (?: [*+?] | \{ (?: [0-9]+ (?: ,[0-9]* )? | ,[0-9]* ) \} ) [?+]? )
    | (?P<other>  . )
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_SET = re.compile(
    r"\[:\^?[a-z]{1,16}:\]|\\(?:[xu]\{[0-9A-Fa-f]{1,8}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}"
    r"|[pP]\{[^{}]{1,64}\}|[0-9]+|.)|.",
    re.DOTALL,
)
LOOK_AHEAD = "look-ahead"
_NAMES = {
    "(?=": LOOK_AHEAD, "(?!": LOOK_AHEAD, "(?<=": "look-behind", "(?<!": "look-behind", "(?>": "atomic group",
    "(?(": "conditional group", "(?#": "comment group", "(?P=": "back-reference", "(?P>": "subroutine call",
}  # fmt: skip
_ANCHORS = {"^": "start", "\\A": "start", "$": "end", "\\Z": "end", "\\z": "end"}

MAX_CONSTRUCT_PATTERN = 256 << 10
"""Longest pattern that is read at all (0.2 s); `check_limits` allows less."""


def portable(pattern: object) -> str:
    """`pattern` (Python dialect, matched from end to end) in the libraries' dialect, without anchors. Look-aheads stay
    in it: `expression` says what they mean.

    Raises `GrammarUnsupported` naming a construct no automaton has, `GrammarError` for a malformed pattern.
    """
    from asyncengine.grammar.spec import check_text

    if not isinstance(pattern, str):
        raise GrammarError("grammar", "a pattern must be a str", pattern)
    check_text(pattern)
    if len(pattern) > MAX_CONSTRUCT_PATTERN:
        raise GrammarTooLarge("grammar", f"a pattern must not exceed {MAX_CONSTRUCT_PATTERN} characters", len(pattern))
    tokens = _tokens(pattern)
    found = look_ahead(tokens, whole=True)
    return "".join(text for _, text in tokens) if (text := found.plain) is None else text


def expression(pattern: str) -> str:
    """The Lark expression of a portable pattern: for a terminal, or without look-aheads for a rule, too."""
    return look_ahead(_tokens(pattern), whole=True).lark("", "(?s:.)*", "") if looks_ahead(pattern) else regex(pattern)


def quoted(pattern: str) -> str:
    """A Lark expression of JSON strings without escapes in which `pattern` is found. Raises as `portable`."""
    return look_ahead(_tokens(pattern), whole=False).lark('"', '[^"]*', '"')


def looks_ahead(pattern: str) -> bool:
    """Whether there may be a look-ahead in a pattern."""
    return any(sign in pattern for sign in AHEAD)


def unsupported_feature(pattern: str) -> str | None:
    """The first construct in `pattern` that no automaton has, by name; None if there is none."""
    names = (_refused(part.lastgroup or "", part.group()) for part in _TOKEN.finditer(pattern))
    return next((name for name in names if name not in (None, LOOK_AHEAD)), None)


def escaped(text: str) -> str:
    """A pattern that matches exactly `text`, in either dialect."""
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
    _balanced(tokens)
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
    items = [match.group() for match in _IN_SET.finditer(text, len(head), len(text) - 1)]
    out = []
    index = 0
    while index < len(items):
        out.append(_letter(items[index]))
        if index + 2 < len(items) and items[index + 1] == "-":
            out.append("-" + _letter(items[index + 2]))
            index += 2
        index += 1
    return head + "".join(out) + "]"


def _letter(item: str) -> str:
    if item == "\\b":
        return "\\x08"
    if len(item) == 1:
        return "\\" + item if item in "[]&~-^" else item
    return item if item.startswith("[:") else _escape(item)


def _balanced(tokens: list[Token]) -> None:
    depth = 0
    for kind, _ in tokens:
        depth += (kind == "open") - (kind == "close")
        if depth < 0:
            break
    if depth != 0:
        raise GrammarError("grammar", "the pattern's parentheses are not balanced")

"""From Python's regular expressions to the dialect both libraries read (that of Rust's `regex` crate).

Only what means the same is passed on. What no automaton has (look-around, back-references) is refused by name, and
what the two dialects read differently is rewritten: `[[a&&b]`, `{,3}`, a literal `{`, `\\<`.
"""

from __future__ import annotations

import re

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported

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
_NAMES = {
    "(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind", "(?>": "atomic group",
    "(?(": "conditional group", "(?#": "comment group", "(?P=": "back-reference", "(?P>": "subroutine call",
}  # fmt: skip
_ANCHORS = {"^": "start", "\\A": "start", "$": "end", "\\Z": "end", "\\z": "end"}

MAX_CONSTRUCT_PATTERN = 256 << 10
"""Longest pattern that is read at all (0.2 s); `check_limits` allows less."""

Token = tuple[str, str]
"""(kind, text); kinds: atom, open, close, bar, quant, flags, start, end."""


def portable(pattern: object) -> str:
    """`pattern` (Python dialect, matched from end to end) in the libraries' dialect, without anchors.

    Raises `GrammarUnsupported` naming a construct no automaton has, `GrammarError` for a malformed pattern.
    """
    from asyncengine.grammar.spec import check_text

    if not isinstance(pattern, str):
        raise GrammarError("grammar", "a pattern must be a str", pattern)
    check_text(pattern)
    if len(pattern) > MAX_CONSTRUCT_PATTERN:
        raise GrammarTooLarge("grammar", f"a pattern must not exceed {MAX_CONSTRUCT_PATTERN} characters", len(pattern))
    tokens = _tokens(pattern)
    _balanced(tokens)
    tokens = _without_anchors(tokens, "start")
    tokens = _without_anchors(tokens[::-1], "end")[::-1]
    return "".join(text for _, text in tokens)


def searched(pattern: str, anything: str) -> str:
    """A pattern of whole texts in which `pattern` is found, `anything` being a pattern of any text. Each alternative
    may be anchored at its ends. Raises as `portable`."""
    tokens = _tokens(pattern)
    _balanced(tokens)
    branches: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        depth += (token[0] == "open") - (token[0] == "close")
        if token[0] == "bar" and not depth:
            branches.append([])
        else:
            branches[-1].append(token)
    found = []
    for branch in branches:
        start = bool(branch) and branch[0][0] == "start"
        end = len(branch) > start and branch[-1][0] == "end"
        core = branch[start : len(branch) - end]
        if any(kind in ("start", "end") for kind, _ in core):
            raise GrammarUnsupported("grammar", [("an anchor in the middle", "")])
        text = "".join(text for _, text in core)
        found.append(f"{'' if start else anything}(?:{text}){'' if end else anything}")
    return "|".join(found)


def unsupported_feature(pattern: str) -> str | None:
    """The first construct in `pattern` that no automaton has, by name; None if there is none."""
    return next(filter(None, (_refused(part.lastgroup or "", part.group()) for part in _TOKEN.finditer(pattern))), None)


def escaped(text: str) -> str:
    """A pattern that matches exactly `text`, in either dialect."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", lambda m: "\\" + m.group(), text).replace("\n", "\\n").replace("\r", "\\r")


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
        if name is not None:
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


def _without_anchors(tokens: list[Token], anchor: str) -> list[Token]:
    """Drop `anchor` where it is the edge of the whole text anyway; refuse it anywhere else.

    `tokens` are in reading order for "start", reversed for "end". At the edge: nothing but other groups' beginnings
    precedes it in its alternative, and none of those groups is repeated.
    """
    opening, closing = ("open", "close") if anchor == "start" else ("close", "open")
    repeated = _repeated(tokens, anchor)
    edges: list[bool] = [True]
    at_edge = True
    kept: list[Token] = []
    for index, (kind, text) in enumerate(tokens):
        if kind == anchor:
            quantified = (
                tokens[index + 1 : index + 2] if anchor == "start" else tokens[index - 1 : index] if index else []
            )
            if not at_edge or (quantified and quantified[0][0] == "quant"):
                raise GrammarUnsupported("grammar", [(f"{text} in the middle", "")], "an anchor can only be at an end")
            continue
        kept.append((kind, text))
        if kind == opening:
            at_edge = at_edge and index not in repeated
            edges.append(at_edge)
        elif kind == "bar":
            at_edge = edges[-1]
        elif kind == closing:
            edges.pop()
            at_edge = False
        elif kind == "atom" or (kind == "quant" and anchor == "start"):
            at_edge = False
    return kept


def _repeated(tokens: list[Token], anchor: str) -> dict[int, bool]:
    """Indices at which a group begins that a quantifier repeats (index of the token first met, in this order)."""
    found: dict[int, bool] = {}
    if anchor == "end":
        for index, (kind, _) in enumerate(tokens):
            if kind == "close" and index and tokens[index - 1][0] == "quant":
                found[index] = True
        return found
    stack: list[int] = []
    for index, (kind, _) in enumerate(tokens):
        if kind == "open":
            stack.append(index)
        elif kind == "close":
            begun = stack.pop()
            if index + 1 < len(tokens) and tokens[index + 1][0] == "quant":
                found[begun] = True
    return found

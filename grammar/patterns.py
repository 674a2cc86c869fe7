"""Patterns in the syntax of Rust's `regex`, as outlines_core takes them: escaping, choices, and what it gets wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from asyncengine.errors import GrammarError, GrammarUnsupported

PLANE_16 = "\U00100000"
"""From here on no token may go: the sentinel lies there."""
SPECIAL = frozenset(r"\.+*?()|[]{}^$#&-~")
ASSERTIONS = frozenset("bBAzZ<>")
"""Letters that after a backslash stand for a place, not for a character."""
_LEAD = re.compile(r"((?:\(\?[a-zA-Z-]+\))?)(?:\^|\\A)")
_TRAIL = re.compile(r"(?<!\\)((?:\\\\)*)(?:\$|\\z)\Z")
_LOOK_AROUND = re.compile(r"\?<?[=!]")
_FLAGS = re.compile(r"\?([a-zA-Z]*)(?:-[a-zA-Z]*)?[:)]")
_CLASS_HEAD = re.compile(r"\[\^?-*")


def literal(text: str) -> str:
    """A pattern that matches `text` and nothing else."""
    if any(char >= PLANE_16 for char in text):
        raise GrammarUnsupported(
            "grammar", [("characters from U+100000 on", "")], "outlines_core's sentinel lies there"
        )
    return "".join("\\" + char if char in SPECIAL else char for char in text)


def choice_pattern(options: Sequence[str]) -> str:
    return either(map(literal, options))


def either(patterns: Iterable[str]) -> str:
    return f"(?:{'|'.join(patterns)})"


def checked_pattern(pattern: str) -> str:
    """`pattern` without anchors at its ends, which say nothing where the whole output is matched.

    Raises `GrammarUnsupported` for what would silently mean something else inside `(?:...)` before the sentinel, or
    what the library refuses without saying why: assertions elsewhere (dead branches), verbose mode (a comment would
    swallow what follows), look-around, back-references, unbalanced groups.
    """
    if any(char >= PLANE_16 for char in pattern):
        raise GrammarUnsupported(
            "grammar", [("characters from U+100000 on", "")], "outlines_core's sentinel lies there"
        )
    pattern = _TRAIL.sub(r"\1", _LEAD.sub(r"\1", pattern, count=1) if _LEAD.match(pattern) else pattern)
    at = depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            _check_escape(pattern, at)
            at += 1
        elif char == "[":
            at = _class_end(pattern, at)
        elif char in "^$":
            raise _assertion(char, at)
        elif char == "(":
            depth += 1
            _check_group(pattern, at + 1)
        elif char == ")":
            depth -= 1
            if depth < 0:
                raise GrammarError("grammar", f"unbalanced parenthesis at character {at} of the pattern")
        at += 1
    return pattern


def hint(pattern: str) -> str:
    """The fault that Python's `re` finds, if any: outlines_core often does not say where the fault is."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError, Warning) as error:
        return f" ({error})"
    return ""


def _check_escape(pattern: str, at: int) -> None:
    letter = pattern[at + 1 : at + 2]
    if letter in ASSERTIONS and letter:
        raise _assertion("\\" + letter, at)
    if letter.isdigit() and letter != "0":
        raise GrammarUnsupported("grammar", [("back-reference", f"character {at}")])


def _check_group(pattern: str, at: int) -> None:
    if _LOOK_AROUND.match(pattern, at):
        raise GrammarUnsupported("grammar", [("look-around", f"character {at - 1}")])
    flags = _FLAGS.match(pattern, at)
    if flags and "x" in flags[1]:
        raise GrammarUnsupported("grammar", [("verbose mode", f"character {at - 1}")])


def _class_end(pattern: str, at: int) -> int:
    """Index of the bracket that closes the class begun at `at`; classes may be nested."""
    depth = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "[":
            depth += 1
            head = _CLASS_HEAD.match(pattern, at)
            assert head is not None
            plain = not head[0].endswith("-")
            at = head.end() - 1
            if plain and pattern.startswith("]", at + 1):  # the first one is a character
                at += 1
        elif char == "\\":
            at += 1
        elif char == "]":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise GrammarError("grammar", "unterminated character class in the pattern")


def _assertion(found: str, at: int) -> GrammarUnsupported:
    detail = "outlines_core matches the whole output and knows no other anchors"
    return GrammarUnsupported("grammar", [(found, f"character {at}")], detail)

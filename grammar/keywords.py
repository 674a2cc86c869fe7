"""Explanations of a grammar library's complaints: which keyword, where in the schema, and what the user can do."""

from __future__ import annotations

import re
from typing import Any

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.regexes import unsupported_feature
from asyncengine.grammar.schemas import schemas_of, subschemas
from asyncengine.grammar.spec import Grammar

_TOO_LARGE = (
    "too large", "too big", "too many", "too deeply nested", "fuel exhausted", "recursion limit exceeded",
    "maximum number of nested", "limit for this grammar", "grammar.symbols.len()", "exceeds limit", "too complex",
    "unable to determine if regex is empty", "(limit ", "; max is ",
)  # fmt: skip
_IMPOSSIBLE = ("unsatisfiable", "noextension", "regex is empty", "empty language", "no valid output")
_NO_AUTOMATON = ("look-around", "lookarounds not supported", "backreferences are not supported")
_ADVICE = {
    "too large": "simplify it, or split it into several requests",
    "impossible": "no output can match: look for contradictory bounds, types or required keys",
}
MAX_MESSAGE = 240
"""Most characters of a library's text that reach the user."""

Feature = tuple[str, str]
"""(keyword, JSON pointer to it)"""


def explain(grammar: Grammar, message: str) -> GrammarError:
    """The error to raise for `message`, which a library gave when it compiled or ran `grammar`.

    The text says which part and what to do, in a bounded number of characters, and never echoes the schema.
    """
    lower = message.lower()
    shown = summary(message)
    if grammar.kind == "json_schema":  # lines and columns of Lark that nobody but us has seen
        shown = re.sub(r"^at [0-9]+\([0-9]+\): ", "", shown)
    if any(sign in lower for sign in _TOO_LARGE):
        return GrammarTooLarge("grammar", f"too large for the library ({shown}); {_ADVICE['too large']}")
    if any(sign in lower for sign in _IMPOSSIBLE):
        return GrammarImpossible("grammar", f"{_ADVICE['impossible']} ({shown})")
    if any(sign in lower for sign in _NO_AUTOMATON):
        features = [feature for schema in schemas_of(grammar) for feature in _patterns(schema, message)]
        return GrammarUnsupported("grammar", features or [("look-around or back-reference", "")], shown)
    places = [place for schema in schemas_of(grammar) for place in _malformed(schema, message)]
    return GrammarError("grammar", f"cannot be compiled{f' at {places[0]}' if places else ''}: {shown}")


def summary(message: str) -> str:
    """The telling line of a library's message, bounded. Dumps, backtraces and quoted source are left out."""
    head = re.split(r"<state>|<backtrace>|<grammar>|\n\s*while processing", message, maxsplit=1)[0]
    reason = re.search(r"(?m)^error: (.+)$", head)
    line = reason.group(1) if reason else next((part for part in head.splitlines() if part.strip()), "no reason given")
    line = re.sub(r"Regex is empty: .*", "no text matches its patterns", line)
    line = re.sub(r'invalid regex ".*?" \(in regex\):? ?|,? ?in regex /.*/', "", line).strip()
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def _patterns(schema: Any, message: str) -> list[Feature]:
    """Patterns with a construct no automaton has, and any the message quotes (an anchor in mid-pattern)."""
    return [
        ("pattern", f"{place}/pattern")
        for place, node in subschemas(schema)
        if isinstance(pattern := node.get("pattern"), str) and _suspect(pattern, message)
    ]


def _malformed(schema: Any, message: str) -> list[str]:
    """Pointers to the patterns the message quotes."""
    return [f"{place}/pattern" for place, node in subschemas(schema) if f"    {node.get('pattern')}\n" in message]


def _suspect(pattern: str, message: str) -> bool:
    return unsupported_feature(pattern) is not None or (len(pattern) > 1 and f"/{pattern}/" in message)

"""Explains a grammar library's error messages: which keyword, where in the schema, and what the user can do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import resources

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.regexes import unsupported_feature
from asyncengine.grammar.schemas import schemas_of, subschemas
from asyncengine.grammar.spec import Grammar

SIGNS = json.loads((resources.files(__package__) / "complaints.json").read_text(encoding="utf-8"))
"""Texts by which the library's messages are classified, and the advice for each class. Read only."""
MAX_MESSAGE = 240
"""Most characters of a library's text that reach the user."""


def explain(grammar: Grammar, message: str) -> GrammarError:
    """The error to raise for `message`, a library's error when it compiled or ran `grammar`.

    Its text says which part is at fault and what to do, in a bounded number of characters, and never echoes the schema.
    """
    lower = message.lower()
    shown = summary(message)
    if grammar.kind == "json_schema":  # positions in Lark text that was generated here and that the user never saw
        shown = re.sub(r"^at [0-9]+\([0-9]+\): ", "", shown)
    if any(sign in lower for sign in SIGNS["too_large"]):
        return GrammarTooLarge("grammar", f"too large for the library ({shown}); {SIGNS['advice']['too_large']}")
    if any(sign in lower for sign in SIGNS["impossible"]):
        return GrammarImpossible("grammar", f"{SIGNS['advice']['impossible']} ({shown})")
    if any(sign in lower for sign in SIGNS["no_automaton"]):
        # a construct that no automaton has, or one that the message quotes (an anchor in mid-pattern)
        suspect = _patterns(
            grammar, lambda one: bool(unsupported_feature(one)) or (len(one) > 1 and f"/{one}/" in message)
        )
        features = [("pattern", pointer) for pointer in suspect]
        return GrammarUnsupported("grammar", features or [("look-around or back-reference", "")], shown)
    pointers = _patterns(grammar, lambda pattern: f"    {pattern}\n" in message)
    return GrammarError("grammar", f"cannot be compiled{f' at {pointers[0]}' if pointers else ''}: {shown}")


def summary(message: str) -> str:
    """The line of a library's message with the reason, bounded, without dumps, backtraces and quoted source."""
    head = re.split(r"<state>|<backtrace>|<grammar>|\n\s*while processing", message, maxsplit=1)[0]
    reason = re.search(r"(?m)^error: (.+)$", head)
    line = reason.group(1) if reason else next((text for text in head.splitlines() if text.strip()), "no reason given")
    line = re.sub(r"Regex is empty: .*", "no text matches its patterns", line)
    line = re.sub(r'invalid regex ".*?" \(in regex\):? ?|,? ?in regex /.*/', "", line).strip()
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def _patterns(grammar: Grammar, is_meant: Callable[[str], bool]) -> list[str]:
    """JSON pointers of the patterns in its schemas for which `is_meant` is true."""
    patterns = ((path, node.get("pattern")) for schema in schemas_of(grammar) for path, node in subschemas(schema))
    return [f"{path}/pattern" for path, pattern in patterns if isinstance(pattern, str) and is_meant(pattern)]

"""Explanations of a grammar library's complaints: which keyword, where in the schema, and what the user can do."""

from __future__ import annotations

import re
from typing import Any

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.regexes import unsupported_feature
from asyncengine.grammar.schemas import escape, resolve, schemas_of, subschemas
from asyncengine.grammar.spec import Grammar

UNIMPLEMENTED = (
    "not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames",
    "dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
"""Keywords llguidance refuses wherever they stand. It names those of one subschema; we name all."""

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
    features: list[Feature] = []
    for schema in schemas_of(grammar):
        features += find_unsupported(schema, message)
    if features:
        return GrammarUnsupported("grammar", features, _detail(message, shown))
    if any(sign in lower for sign in _NO_AUTOMATON):
        return GrammarUnsupported("grammar", [("look-around or back-reference", "")], shown)
    places = [place for schema in schemas_of(grammar) for place in _malformed(schema, message)]
    return GrammarError("grammar", f"cannot be compiled{f' at {places[0]}' if places else ''}: {shown}")


def find_unsupported(schema: Any, message: str) -> list[Feature]:
    """The keywords in `schema` that `message` (llguidance's) complains about, each with its JSON pointer.

    Where the library stops at the first keyword of a kind, all of that kind are listed. Empty where the message is
    about something else.
    """
    nodes = list(subschemas(schema))
    named = re.search(r'Unimplemented keys: \[((?:"[^"]{1,64}"(?:, )?){1,64})\]', message)
    if named:
        keys = [*UNIMPLEMENTED, *re.findall(r'"([^"]+)"', named.group(1))]
        return _with_keys(nodes, tuple(dict.fromkeys(keys)))
    if "min/maxProperties only supported" in message:
        return _with_keys(nodes, ("minProperties", "maxProperties"))
    if "are not disjoint" in message and "patternProperty" in message:
        return _with_keys(nodes, ("patternProperties",))
    if "Failed to generate regex for integer range" in message or "regex for float range" in message:
        return _with_keys(nodes, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    if "circular references with sibling keys" in message:
        return _circular(nodes, message)
    if "is not present in a registry" in message or "Default retriever" in message:
        return [(k, p) for k, p in _with_keys(nodes, ("$ref",)) if not _local(nodes, p)]
    if any(sign in message.lower() for sign in _NO_AUTOMATON):
        return _patterns(nodes, message)
    return []


def summary(message: str) -> str:
    """The telling line of a library's message, bounded. Dumps, backtraces and quoted source are left out."""
    head = re.split(r"<state>|<backtrace>|<grammar>|\n\s*while processing", message, maxsplit=1)[0]
    reason = re.search(r"(?m)^error: (.+)$", head)
    line = reason.group(1) if reason else next((part for part in head.splitlines() if part.strip()), "no reason given")
    line = re.sub(r"Regex is empty: .*", "no text matches its patterns", line)
    line = re.sub(r'invalid regex ".*?" \(in regex\):? ?|,? ?in regex /.*/', "", line).strip()
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def _detail(message: str, shown: str) -> str:
    """In words, where the library's are about itself; nothing where the keyword's name says it all."""
    if "Unimplemented keys" in message:
        return ""
    if "is not present in a registry" in message or "Default retriever" in message:
        return "only references inside the schema can be followed"
    return shown


def _with_keys(nodes: list[tuple[str, dict[str, Any]]], keys: tuple[str, ...]) -> list[Feature]:
    """Places in which one of `keys` stands. `uniqueItems: false` is no complaint: it is left out before compiling."""
    return [
        (key, f"{pointer}/{escape(key)}")
        for pointer, node in nodes
        for key in node
        if key in keys and not (key == "uniqueItems" and node[key] is False)
    ]


def _local(nodes: list[tuple[str, dict[str, Any]]], pointer: str) -> bool:
    target = dict(nodes)[pointer.removesuffix("/$ref")]["$ref"]
    return not isinstance(target, str) or target.startswith("#")


def _circular(nodes: list[tuple[str, dict[str, Any]]], message: str) -> list[Feature]:
    """References with neighbours; the one the message names where it can be found."""
    beside = [(key, place) for key, place in _with_keys(nodes, ("$ref",)) if len(dict(nodes)[place[:-5]]) > 1]
    named = re.search(r"json-schema:///#?(/\S*)", message)
    inside = [feature for feature in _with_keys(nodes, ("$ref",)) if named and feature[1].startswith(named.group(1))]
    return inside or beside


def _patterns(nodes: list[tuple[str, dict[str, Any]]], message: str) -> list[Feature]:
    """Patterns with a construct no automaton has, and any the message quotes (an anchor in mid-pattern)."""
    found: list[Feature] = []
    for place, node in nodes:
        pattern = node.get("pattern")
        if isinstance(pattern, str) and _suspect(pattern, message):
            found.append(("pattern", f"{place}/pattern"))
        names = node.get("patternProperties")
        for name in names if isinstance(names, dict) else ():
            if _suspect(name, message):
                found.append(("patternProperties", f"{place}/patternProperties/{escape(name)}"))
    return found


def _malformed(schema: Any, message: str) -> list[str]:
    """Pointers to the pattern or type the message quotes, or to references that lead nowhere."""
    found = []
    for place, node in subschemas(schema):
        names = node.get("patternProperties")
        for pattern in (node.get("pattern"), *(names if isinstance(names, dict) else ())):
            if isinstance(pattern, str) and f"    {pattern}\n" in message:
                found.append(place + ("/pattern" if pattern == node.get("pattern") else "/patternProperties"))
        if isinstance(node.get("type"), str) and message.startswith(f"Invalid type: {node['type']}"):
            found.append(f"{place}/type")
        if message.startswith("Pointer '") and resolve(schema, node) is None:
            found.append(f"{place}/$ref")
    return found


def _suspect(pattern: str, message: str) -> bool:
    return unsupported_feature(pattern) is not None or (len(pattern) > 1 and f"/{pattern}/" in message)

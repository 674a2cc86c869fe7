"""The formats of JSON Schema as patterns of our own, for the library lacks some and reads others differently."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.schemas import subschemas

_UCS = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd"  # RFC 3987, planes 0 to 2
_PARTS, _FORMATS = (
    dict(line.split(" = ", 1) for line in half.splitlines() if " = " in line and line[0] != "#")
    for half in (resources.files(__package__) / "formats.txt").read_text(encoding="utf-8").split("\n[formats]\n")
)
_KNOWN = {**_PARTS, **_FORMATS, "ucs": _UCS}
_NAME = re.compile(r"<([a-z0-9_-]+)>")


def _written_out(text: str) -> str:
    """`text` with each `<name>` replaced by the pattern of that name."""
    return _NAME.sub(lambda name: _written_out(_KNOWN[name[1]]), text)


DATE, CLOCK = _written_out("<date>"), _written_out("<clock>")
PATTERNS = {name: f"^{_written_out(text)}$" for name, text in _FORMATS.items()}
"""The patterns of the formats that are enforced. No pattern can tell an idn-email or idn-hostname. Read only."""
MAX_HOSTNAME = 253


def as_patterns(schema: Any, strict: bool) -> None:
    """Replace each enforced format by its pattern, in place, and delete the others. If `strict`, raises
    `GrammarUnsupported` naming the deleted formats of strings."""
    unknown = []
    for pointer, node in subschemas(schema):
        if not isinstance(name := node.get("format"), str):
            continue
        del node["format"]
        types, all_of = node.get("type", "string"), node.get("allOf", [])
        if name in PATTERNS:
            replacement = {"pattern": PATTERNS[name], **({"maxLength": MAX_HOSTNAME} if name == "hostname" else {})}
            if node.keys().isdisjoint(replacement):
                node.update(replacement)
            elif isinstance(all_of, list):
                node["allOf"] = [*all_of, replacement]
        elif "string" in (types if isinstance(types, list) else [types]):
            unknown.append(("format", f"{pointer}/format"))
    if unknown and strict:
        raise GrammarUnsupported("grammar", unknown, "no format that can be enforced")

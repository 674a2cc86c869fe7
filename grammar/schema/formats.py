"""Formats of strings: those of JSON Schema as patterns, where the library lacks them or means something else."""

from __future__ import annotations

from typing import Any

from asyncengine.errors import GrammarUnsupported
from asyncengine.grammar.schemas import subschemas

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_LONG, _SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_DAY = f"(?:{_LONG}|{_SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"
_LOCAL = rf"{CLOCK}(?:\.[0-9]{{1,6}})?"
_TIME = rf"{_LOCAL}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_PARTS, _LOOSE = (
    f"(?:N{{0}}{more}|N{{1}}(?:N{{2}})?|N{{2}})".replace("N", "[0-9]{{1,6}}")
    for more in ("(?:N{1}(?:N{2})?)?", "(?:N{1})?(?:N{2})?")
)


def _span(parts: str, seconds: str = "S") -> str:
    days, hours = parts.format(*"YMD"), parts.format("H", "M", seconds)
    return f"P(?:{days}(?:T{hours})?|T{hours}|[0-9]{{1,6}}W)"


DATES = {
    "date": f"^{DATE}$",
    "date-time": f"^{DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "duration": f"^{_span(_PARTS)}$",
    "date-time-local": f"^{DATE}T{_LOCAL}$",
    "time-local": f"^{_LOCAL}$",
    "timedelta": f"^-?{_span(_LOOSE, seconds='(?:[.][0-9]{1,6})?S')}$",
}
"""RFC 3339 as Python and pydantic read it: years 1 to 9999, no 60th second, capitals, and durations that a `timedelta`
holds; of OpenAPI's registry, what has no time zone; and durations as pydantic writes them. Read only."""
_UCS = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef\U00010000-\U0001fffd\U00020000-\U0002fffd"  # RFC 3987, planes 0 to 2
_PCT = "%[0-9A-Fa-f]{2}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _address(may_be_relative: bool, more: str = "") -> str:
    """The pattern of RFC 3986 and, with letters `more`, RFC 3987. Hosts in brackets are left out."""
    letters = f"{more}A-Za-z0-9._~!$&'()*+,;="
    plain, char = f"(?:[{letters}@-]|{_PCT})", f"(?:[{letters}:@-]|{_PCT})"
    host = f"//(?:(?:[{letters}:-]|{_PCT})*@)?(?:[{letters}-]|{_PCT})*(?::[0-9]*)?(?:/{char}*)*"
    absolute, relative = (f"(?:{host}|/(?:{char}+(?:/{char}*)*)?|{one}+(?:/{char}*)*)?" for one in (char, plain))
    other, tail = f"|{relative}" if may_be_relative else "", f"(?:{char}|[/?])*"
    return f"^(?:[A-Za-z][A-Za-z0-9+.-]*:{absolute}{other})(?:\\?{tail})?(?:#{tail})?$"


def _template() -> str:
    """The pattern of RFC 6570."""
    letter = f"(?:[A-Za-z0-9_]|{_PCT})"
    variable = rf"{letter}(?:\.?{letter})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"^(?:[!#$&(-;=?-\[\]_a-z~{_UCS}]|{_PCT}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*$"


PATTERNS = {
    **DATES,
    "uri-reference": _address(True),
    "iri": _address(False, _UCS),
    "iri-reference": _address(True, _UCS),
    "uri-template": _template(),
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""The formats that are enforced by a pattern. Read only."""
LIBRARY = ("email", "hostname", "ipv4", "ipv6", "uri", "uuid")
"""Formats that llguidance enforces itself. No pattern says which idn-email, idn-hostname or regex is one."""
MAX_HOSTNAME = 253


def keep_enforced(schema: Any, strict: bool) -> None:
    """Delete formats that are not enforced. If `strict`, raises `GrammarUnsupported` naming those of strings."""
    unknown = []
    for pointer, node in subschemas(schema):
        name, kind = node.get("format"), node.get("type", "string")
        if isinstance(name, str) and name not in PATTERNS and name not in LIBRARY:
            if "string" in kind:
                unknown.append(("format", f"{pointer}/format"))
            del node["format"]
    if unknown and strict:
        raise GrammarUnsupported("grammar", unknown, "no format that can be enforced")

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


_OCTET, _H16 = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])", "[0-9A-Fa-f]{1,4}"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_LAST = f"(?:{_H16}:{_H16}|{_IPV4})"
_HIDDEN = "|".join(  # groups before the two colons, and behind them
    f"(?:(?:{_H16}:){{0,{before - 1}}}{_H16})?::{behind}" if before else f"::{behind}"
    for before in range(8)
    for behind in ([f"(?:{_H16}:){{{5 - before}}}{_LAST}"] if before < 6 else [_H16, ""][before - 6 :][:1])
)
_IPV6 = f"(?:(?:{_H16}:){{6}}{_LAST}|{_HIDDEN})"
"""RFC 3986, section 3.2.2, as RFC 5954 corrects it."""
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"


def _address(may_be_relative: bool, more: str = "") -> str:
    """The pattern of RFC 3986 and, with letters `more`, RFC 3987."""
    letters = f"{more}A-Za-z0-9._~!$&'()*+,;="
    plain, char = f"(?:[{letters}@-]|{_PCT})", f"(?:[{letters}:@-]|{_PCT})"
    literal = rf"\[(?:{_IPV6}|[Vv][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\]"
    host = f"//(?:(?:[{letters}:-]|{_PCT})*@)?(?:{literal}|(?:[{letters}-]|{_PCT})*)(?::[0-9]*)?(?:/{char}*)*"
    absolute, relative = (f"(?:{host}|/(?:{char}+(?:/{char}*)*)?|{one}+(?:/{char}*)*)?" for one in (char, plain))
    other, tail = f"|{relative}" if may_be_relative else "", f"(?:{char}|[/?])*"
    return f"^(?:[A-Za-z][A-Za-z0-9+.-]*:{absolute}{other})(?:\\?{tail})?(?:#{tail})?$"


def _template() -> str:
    """The pattern of RFC 6570."""
    letter = f"(?:[A-Za-z0-9_]|{_PCT})"
    variable = rf"{letter}(?:\.?{letter})*(?::[1-9][0-9]{{0,3}}|\*)?"
    return rf"^(?:[!#$&(-;=?-\[\]_a-z~{_UCS}]|{_PCT}|\{{[+#./;?&=,!@|]?{variable}(?:,{variable})*\}})*$"


def _regex() -> str:
    """The pattern of regular expressions that ECMAScript and Python read alike: a part of them, whose groups nest twice
    and have no names."""
    escape = r"\\[dDwWsStnrfv.*+?()\[\]{}|^$/\\-]"
    atom = rf"(?:[^\x00\\()\[\]{{}}*+?|^$]|{escape}|\[\^?(?:a-z|A-Z|0-9|[^\x00\[\]\\^&~|-]|{escape})+-?\])"
    times = r"(?:(?:[*+?]|\{(?:[0-9]{1,3},?|[01],[1-9]|[0-9],[1-9][0-9]{1,2})\})\??)?"
    whole = item = atom
    for _ in range(3):
        one = rf"\^?(?:{item}{times})*\$?"
        whole = rf"{one}(?:\|{one})*"
        item = rf"(?:{atom}|\((?:\?[:=!])?{whole}\))"
    return f"^{whole}$"


PATTERNS = {
    **DATES,
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_HOST}|\[{_IPV4}\])$",
    "hostname": f"^{_HOST}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^{_IPV6}$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "uri": _address(False),
    "uri-reference": _address(True),
    "iri": _address(False, _UCS),
    "iri-reference": _address(True, _UCS),
    "uri-template": _template(),
    "json-pointer": f"^{_POINTER}$",
    "regex": _regex(),
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
"""The formats that are enforced, by a pattern each. No pattern says which idn-email or idn-hostname is one. Read
only."""
MAX_HOSTNAME = 253


def of_format(name: str) -> dict[str, Any]:
    """A schema without a format for the strings of one."""
    return {"pattern": PATTERNS[name], **({"maxLength": MAX_HOSTNAME} if name == "hostname" else {})}


def keep_enforced(schema: Any, strict: bool) -> None:
    """Delete formats that are not enforced. If `strict`, raises `GrammarUnsupported` naming those of strings."""
    unknown = []
    for pointer, node in subschemas(schema):
        name, kind = node.get("format"), node.get("type", "string")
        if isinstance(name, str) and name not in PATTERNS:
            if "string" in kind:
                unknown.append(("format", f"{pointer}/format"))
            del node["format"]
    if unknown and strict:
        raise GrammarUnsupported("grammar", unknown, "no format that can be enforced")

"""Is a text JSON, and does it satisfy a schema? Stricter than `json` and `jsonschema` where those look away.

Numbers are compared as decimals, as written: 0.3 is a multiple of 0.1. Every format a grammar can enforce is checked
here by hand, from its RFC, so that an engine that lets a bad one through is found. Patterns read `$` as the end of the
string and `\\d`, `\\w` as ASCII, which is what ECMA-262 says.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterator
from datetime import date
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any, NoReturn

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend

FULL_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
ATOM = r"[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+"
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
URI_CHARACTER = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?]|%[0-9A-Fa-f]{2})"
URI_HOST = r"(//([^/?#@\[\]]*@)?\[[0-9A-Fa-f:.v]+\](:\d*)?(?=[/?#]|$))?"
URI = rf"[A-Za-z][A-Za-z0-9+.\-]*:{URI_HOST}{URI_CHARACTER}*(#{URI_CHARACTER}*)?"
DURATION_TIME = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
DURATION_DATE = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
DURATION = rf"P({DURATION_DATE}({DURATION_TIME})?|{DURATION_TIME}|\d+W)"
TIMEDELTA = r"-?P(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.]\d{1,6})?S)?)?|-?P\d+W"
UUID = r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
ENFORCED_FORMATS = (
    "date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
    "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer", "relative-json-pointer",
)  # fmt: skip
MAY_BE_EMPTY = ("uri-reference", "iri-reference", "uri-template", "json-pointer")


def full(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text, re.ASCII) is not None


def is_date(text: str) -> bool:
    if not full(r"\d{4}-\d\d-\d\d", text):
        return False
    year, month, day = int(text[:4]), int(text[5:7]), int(text[8:])
    try:
        date(year or 4, month, day)  # Python has no year 0; it is a leap year, as 4 is
    except ValueError:
        return False
    return True


def is_date_time(text: str) -> bool:
    return is_date(text[:10]) and text[10:11] in ("T", "t") and full(FULL_TIME, text[11:])


def is_address(text: str, kind: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address]) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return "%" not in text


def is_email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    if not full(rf"{ATOM}(\.{ATOM})*", local):
        return False
    if domain.startswith("[") and domain.endswith("]"):
        return is_address(domain[1:-1].removeprefix("IPv6:"), ipaddress.IPv6Address) or is_format("ipv4", domain[1:-1])
    return full(rf"{LABEL}(\.{LABEL})*", domain)


def is_hostname(text: str) -> bool:
    return (
        full(rf"{LABEL}(\.{LABEL})*", text) and len(text) <= 253 and all(len(label) <= 63 for label in text.split("."))
    )


def is_reference(text: str, international: bool) -> bool:
    """RFC 3986, split as its appendix B does, and RFC 3987; the parts are looked at letter by letter."""
    parts = re.fullmatch(r"(?:([^:/?#]+):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", text, re.DOTALL)
    if parts is None:
        return False
    scheme, authority, path, query, fragment = parts.groups()
    if scheme is not None and not full(r"[A-Za-z][A-Za-z0-9+.\-]*", scheme):
        return False
    host = (authority or "").rpartition("@")[2]
    if not full(r"[^:]*(:\d*)?", host) or "@" in (authority or "").rpartition("@")[0]:
        return False
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~!$&'()*+,;=:@")
    for part, more in ((authority, ""), (path, "/"), (query, "/?"), (fragment, "/?")):
        bare = re.sub("%[0-9A-Fa-f]{2}", "", part or "")
        if any(c not in allowed and c not in more and not (international and c >= "\xa0") for c in bare):
            return False
    return True


def is_template(text: str) -> bool:
    """RFC 6570."""
    literals = re.split(r"\{[^{}]*\}", text)
    if any(re.search(r"[\x00-\x20\x7f\"'<>\\^`{|}]|%(?![0-9A-Fa-f]{2})", literal) for literal in literals):
        return False
    for expression in re.findall(r"\{([^{}]*)\}", text):
        for variable in re.sub(r"^[+#./;?&=,!@|]", "", expression).split(","):
            name, _limit = re.match(r"(.*?)(\*|:[1-9]\d{0,3})?$", variable, re.DOTALL).groups()  # type: ignore[union-attr]
            if not name or not full(r"([A-Za-z0-9_]|%[0-9A-Fa-f]{2})(\.?([A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*", name):
                return False
    return True


def is_pointer(text: str) -> bool:
    return not text or (text.startswith("/") and not re.search("~(?![01])", text))


def is_relative_pointer(text: str) -> bool:
    number = re.match("0|[1-9][0-9]*", text)
    rest = text[number.end() :] if number else "no"
    return rest == "#" or is_pointer(rest)


FORMATS: dict[str, Callable[[str], bool]] = {
    "date": is_date,
    "time": lambda text: full(FULL_TIME, text),
    "date-time": is_date_time,
    "duration": lambda text: full(DURATION, text),
    "date-time-local": lambda text: is_date_time(text + "Z"),
    "time-local": lambda text: full(FULL_TIME, text + "Z"),
    "timedelta": lambda text: full(TIMEDELTA, text),
    "email": is_email,
    "hostname": is_hostname,
    "ipv4": lambda text: is_address(text, ipaddress.IPv4Address),
    "ipv6": lambda text: is_address(text, ipaddress.IPv6Address),
    "uuid": lambda text: full(UUID, text),
    "uri": lambda text: full(URI, text),
    "uri-reference": lambda text: is_reference(text, False),
    "iri-reference": lambda text: is_reference(text, True),
    "iri": lambda text: full(r"[A-Za-z][A-Za-z0-9+.\-]*:.*", text) and is_reference(text, True),
    "uri-template": is_template,
    "json-pointer": is_pointer,
    "relative-json-pointer": is_relative_pointer,
}


def is_format(name: str, text: str) -> bool:
    """True if `text` has the format; one that no grammar enforces is not looked at."""
    return name not in FORMATS or FORMATS[name](text)


def is_multiple(value: int | Decimal, step: int | Decimal) -> bool:
    """Exact, and without writing out the zeros of 1e999999."""
    _, digits, exponent = Decimal(value).as_tuple()
    _, step_digits, step_exponent = Decimal(step).as_tuple()
    assert isinstance(exponent, int)
    assert isinstance(step_exponent, int)
    whole, step_whole = int("".join(map(str, digits))), int("".join(map(str, step_digits)))
    power = exponent - step_exponent
    if power >= 0:
        return whole * pow(10, power, step_whole) % step_whole == 0
    return whole == 0 or (-power < len(digits) + 1 and whole % (step_whole * 10**-power) == 0)


@cache
def ecma(pattern: str) -> re.Pattern[str]:
    """The pattern with `$` as the very end; Python's also matches before a last newline."""
    parts = re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
    return re.compile("".join(r"\Z" if part == "$" else part for part in parts), re.ASCII)


def _pattern(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    # to ECMA-262 \s is any Unicode blank, \d and \w are ASCII; no flag of Python's says so, so either reading may match
    if isinstance(value, str) and not (ecma(pattern).search(value) or ("\\s" in pattern and re.search(pattern, value))):
        yield ValidationError(f"{value!r} does not match {pattern!r}")


def _format(_validator: Any, name: str, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, str) and not is_format(name, value):
        yield ValidationError(f"{value!r} is not a {name!r}")


def _multiple_of(_validator: Any, step: Any, value: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(value, int | Decimal) and not isinstance(value, bool) and not is_multiple(value, step):
        yield ValidationError(f"{value} is not a multiple of {step}")


def _is_integer(_checker: Any, value: Any) -> bool:
    """1.0 is one, True is none."""
    return isinstance(value, int | Decimal) and not isinstance(value, bool) and is_multiple(value, 1)


Strict = extend(
    Draft202012Validator,
    validators={"pattern": _pattern, "format": _format, "multipleOf": _multiple_of},
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} comes twice")
        found[key] = value
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:  # JSON knows no largest exponent; a large one stands for all beyond it
        return Decimal(f"{'-' if text.startswith('-') else ''}1E{'-' if '-' in text[1:] else '+'}999999")


def strict_loads(text: str) -> Any:
    """`json.loads` that refuses NaN, Infinity, duplicate keys and lone surrogates; floats as `Decimal`. ValueError."""
    loaded = json.loads(
        text, parse_float=_decimal, parse_constant=_refuse_constant, object_pairs_hook=_unique, strict=True
    )
    if any("\ud800" <= character <= "\udfff" for character in json.dumps(loaded, ensure_ascii=False, default=str)):
        raise ValueError("a lone surrogate is not a character")
    return loaded


def exact(value: Any) -> Any:
    """A copy of plain data with every float as the decimal it is written as."""
    return json.loads(json.dumps(value), parse_float=Decimal)


class Checker:
    """A schema ready to judge. Raises `jsonschema.SchemaError` where the schema itself is wrong."""

    def __init__(self, schema: dict[str, Any] | bool) -> None:
        Strict.check_schema(schema)
        self._validator = Strict(exact(schema))

    def fault(self, instance: Any) -> str | None:
        """The reason why plain data does not satisfy the schema, or None."""
        return self._fault(exact(instance))

    def text_fault(self, text: str) -> str | None:
        """The reason why a text is not JSON that satisfies the schema, or None."""
        try:
            loaded = strict_loads(text)
        except ValueError as error:
            return f"not JSON: {error}"
        return self._fault(loaded)

    def _fault(self, loaded: Any) -> str | None:
        worst = best_match(self._validator.iter_errors(loaded))
        return None if worst is None else f"{worst.json_path}: {worst.message}"


def assert_valid(text: str, schema: dict[str, Any] | bool) -> None:
    """`text` is strict JSON and satisfies `schema`, formats included. AssertionError says where it does not."""
    fault = Checker(schema).text_fault(text)
    assert fault is None, f"{fault}\n{text}"

"""Checks of callers' arguments: each returns the value in a plain Python type, or refuses it by name.

Any number type is accepted (numpy's too) and converted to `int` or `float`: the checked value is the one that is kept.
Every number has a range, so that nothing later meets one that float32, int64 or a timer cannot hold.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from asyncengine.errors import InvalidParameter

MAX_COUNT = 2**31 - 1
"""Largest number of anything, and largest token id: what an int32 holds."""
MAX_SECONDS = 1e9
"""Longest time limit, some 30 years: timers of every platform hold it."""
MAX_BYTES = 2**63 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1


def check_unicode(name: str, text: str) -> None:
    """Refuse a text that UTF-8 cannot hold: one with lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(name, f"is not valid Unicode: {error.reason} at {error.start}") from error


def check_known(values: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, str] | None = None) -> None:
    """Refuse the first name in `values` that is not in `known`; see `InvalidParameter.unknown`."""
    for name in values:
        if not isinstance(name, str):
            raise InvalidParameter("parameters", "must have names that are str", name)
        if name not in known:
            raise InvalidParameter.unknown(name, known, elsewhere)


def as_integer(name: str, value: object, low: int, high: int = MAX_COUNT) -> int:
    """An integer of any kind between `low` and `high`. Raises `InvalidParameter`."""
    number: int | None = _plain(value, numbers.Integral, int)
    if number is None:
        raise InvalidParameter(name, "must be an integer", value)
    if not low <= number <= high:
        bound = f"an integer >= {low}" if number < low and high >= MAX_COUNT else f"between {low} and {high}"
        raise InvalidParameter(name, f"must be {bound}", value)
    return number


def as_number(name: str, value: object, low: float, high: float, *, exclusive_low: bool = False) -> float:
    """A number of any kind in [low, high], or in (low, high]. Raises `InvalidParameter`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidParameter(name, "must be a number", value)
    number: float | None = _plain(value, numbers.Real, float)
    if number is None or not math.isfinite(number):
        raise InvalidParameter(name, "must be finite", value)
    too_low = number <= low if exclusive_low else number < low
    if too_low or number > high:
        raise InvalidParameter(name, f"must be {'>' if exclusive_low else '>='} {low:g} and <= {high:g}", value)
    return number


def as_seconds(name: str, value: object) -> float:
    """A time limit in seconds, in (0, MAX_SECONDS]. Raises `InvalidParameter`."""
    number: float | None = _plain(value, numbers.Real, float)
    if number is None or not 0 < number <= MAX_SECONDS:
        raise InvalidParameter(name, f"must be a positive, finite number of seconds, at most {MAX_SECONDS:g}", value)
    return number


def check_patience(timeout: object) -> None:
    """Raise `InvalidParameter` unless `timeout` is None, or seconds in [0, MAX_SECONDS]."""
    if timeout is not None:
        as_number("timeout", timeout, 0.0, MAX_SECONDS)


def as_items(name: str, value: object) -> tuple[Any, ...]:
    """The items of a sequence; none of None. Raises `InvalidParameter`."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, Mapping):
        try:
            return tuple(value)
        except TypeError:  # an array of no dimension says it is iterable
            pass
    raise InvalidParameter(name, "must be a sequence", value)


def as_choice(name: str, value: object, choices: Collection[str]) -> str:
    """One of some names. Raises `InvalidParameter`."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidParameter(name, "must be one of " + ", ".join(map(repr, choices)), value)
    return value


def as_switch(name: str, value: object) -> bool:
    """A bool. Raises `InvalidParameter`."""
    if not isinstance(value, bool):
        raise InvalidParameter(name, "must be True or False", value)
    return value


def as_text(name: str, value: object) -> str:
    """A str. Raises `InvalidParameter`."""
    if not isinstance(value, str):
        raise InvalidParameter(name, "must be a str", value)
    return value


Check = Callable[[str, Any], Any]
"""A check of a field: takes its name and its value, returns what is kept of it. Raises `InvalidParameter`."""


def integer_in(low: int, high: int = MAX_COUNT) -> Check:
    """`as_integer` with these limits."""
    return functools.partial(as_integer, low=low, high=high)


def number_in(low: float, high: float, *, exclusive_low: bool = False) -> Check:
    """`as_number` with these limits."""
    return functools.partial(as_number, low=low, high=high, exclusive_low=exclusive_low)


def one_of(choices: Collection[str]) -> Check:
    """`as_choice` among these, which the command line lists."""
    return functools.partial(as_choice, choices=choices)


Count = Annotated[int, integer_in(0)]
Positive = Annotated[int, integer_in(1)]
Seconds = Annotated[float, as_seconds]


class _Signature:
    """The signature of a class by its `__init__`, which Python passes over for a `__new__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass(frozen=True, slots=True)
class Settings:
    """A base of dataclasses whose fields carry their limits in their types: `Annotated[int, integer_in(1, 8)] | None`.

    A bool, a str and a `Literal` need no more than that. A field of any other type without a check takes anything. An
    unknown keyword is refused as `check_known` does, not with a bare `TypeError`.
    """

    __signature__ = _Signature()

    def __new__(cls, *args: object, **keywords: Any) -> Self:
        check_known(keywords, cls.__dataclass_fields__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (check, optional) in self.checks().items():
            value = getattr(self, name)
            if (value is not None or not optional) and (kept := check(name, value)) is not value:
                object.__setattr__(self, name, kept)

    @classmethod
    @functools.cache
    def checks(cls) -> dict[str, tuple[Check, bool]]:
        """Name -> the check of that field, and whether None passes without. Fields that take anything are left out."""
        by_field = {}
        for name, hint in get_type_hints(cls, include_extras=True).items():
            members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
            value = next(member for member in members if member is not NoneType)
            plain, *marks = get_args(value) if get_origin(value) is Annotated else (value,)
            check: Check | None = {bool: as_switch, str: as_text}.get(plain)
            if get_origin(plain) is Literal:
                check = one_of(get_args(plain))
            if (check := next(filter(callable, marks), check)) is not None:
                by_field[name] = check, NoneType in members
        return by_field

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from loose keywords; an unknown name is refused with the nearest known one."""
        check_known(values, cls.__dataclass_fields__)
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked like a new one."""
        return replace(self, **changes)


def _plain(value: object, number_type: type, convert: Any) -> Any:
    """`value` converted by `convert`; None if it is not of `number_type`, or beyond the range of the result."""
    if isinstance(value, bool) or not isinstance(value, number_type):
        return None
    try:
        return convert(value)
    except (ArithmeticError, ValueError, TypeError):
        return None


_UNITS = {"B": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGTP", 1)
}
_BYTES = re.compile(r"([^a-z]*(?:e[+-]?\d+)?)([a-z]*)", re.IGNORECASE)


def parse_bytes(name: str, value: Any) -> int | None:
    """ "2GiB" -> 2147483648; integers and None pass through. Raises `InvalidParameter`."""
    if value is None:
        return None
    if isinstance(value, numbers.Integral):
        return as_integer(name, value, 1, MAX_BYTES)
    if isinstance(value, str):
        sizes = {unit.lower(): size for unit, size in _UNITS.items()}
        match = _BYTES.fullmatch(value.strip())
        try:
            number = float(match[1]) * sizes[match[2].lower() or "b"] if match else 0.0
        except (ValueError, KeyError):
            number = 0.0
        if 1 <= number <= MAX_BYTES:
            return int(number)
    units = ", ".join(_UNITS)
    limit = f'must be a positive number of bytes below 2**63, as an integer or like "2GiB" (units: {units})'
    raise InvalidParameter(name, limit, value)


def _cache_bytes(name: str, value: Any) -> int:
    if isinstance(value, numbers.Integral):  # as a copy of the settings is given it again
        return as_integer(name, value, 0, MAX_BYTES)
    return parse_bytes(name, value) or 0


Threads = Annotated[int, integer_in(1, 1024)]
Memory = Annotated[int | str, parse_bytes]
CacheMemory = Annotated[int | str, _cache_bytes]
"""None and 0 keep nothing."""

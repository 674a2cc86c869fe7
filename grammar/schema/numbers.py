"""Sets of decimal numbers (bounds, steps, lists), exact for any size, and the patterns that match their spellings.

Spelled are: no exponent, no plus sign, no leading zero, no "-0"; trailing zeros of a fraction are allowed. A number
that is no multiple of anything has at most `Numbers.places` digits after the point, and keeps its bounds as a double,
too: `{"exclusiveMinimum": 0.3}` is not met by 0.3000000000000000000001, which is 0.3 to nearly every reader.

Patterns are built digit by digit, with no arithmetic but on integers: a number with `places` digits after the point is
counted in units of the last one, 1.25 as 125 at two places. A spelling may leave out digits from the right that are
zeros; where none is left, the point goes too.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.regexes import escaped


def range_pattern(low: int, high: int, places: int) -> str:
    """Matches the spellings of the numbers from `low` to `high`, both included, and nothing else.

    >>> range_pattern(5, 12, 0)
    '(?:[5-9]|1[0-2])'
    """
    branches = ["-" + _positive(max(1, -high), -low, places)] if low < 0 else []
    return _either([*branches, *([_positive(max(low, 0), high, places)] if high >= 0 else [])])


def listed_pattern(numbers: Iterable[int], places: int) -> str:
    """Matches the spellings of `numbers`."""
    texts = []
    for number in numbers:
        whole, fraction = divmod(abs(number), 10**places)
        digits = str(fraction).zfill(places) if places else ""
        texts.append(f"{'-' if number < 0 else ''}{whole}{_fraction(digits, digits)}")
    return _either(texts)


def ending_pattern(unit: int, places: int, most: int) -> str | None:
    """Matches the spellings of the multiples of `unit`, with leading zeros too, and of no other number. None if that
    takes more than `most` endings: only divisors of a power of ten have few."""
    branches = []
    count = 0
    for decimals in range(places + 1):
        step = unit // math.gcd(unit, 10 ** (places - decimals))
        size = next((size for size in range(12) if 10**size % step == 0), None)
        if size is None or (count := count + 10**size // step) > most:
            return None
        fraction = f"\\.[0-9]{{{decimals}}}" if decimals else ""
        if size <= decimals:
            tails = [str(tail).zfill(size) for tail in range(0, 10**size, step)]
            fraction = f"\\.[0-9]{{{decimals - size}}}{_either(tails)}" if decimals else ""
            branches.append("[0-9]+" + (fraction if size else f"\\.[0-9]{{{decimals}}}" if decimals else ""))
            continue
        full, short = [], []
        for tail in range(0, 10**size, step):
            full.append(_with_point(str(tail).zfill(size), decimals))
            if len(str(tail).zfill(decimals + 1)) < size:
                short.append(_with_point(str(tail).zfill(decimals + 1), decimals))
        branches.append(_either(["[0-9]*" + _either(full), *short]))
    return f"-?{_either(branches)}"


def spelled(number: int, places: int) -> str:
    """`number` units of the last place in decimal notation, without zeros at the end of the fraction."""
    digits = str(abs(number)).zfill(places + 1)
    whole, fraction = (digits[:-places], digits[-places:].rstrip("0")) if places else (digits, "")
    return ("-" if number < 0 else "") + whole + ("." + fraction if fraction else "")


def _with_point(digits: str, decimals: int) -> str:
    return f"{digits[:-decimals]}\\.{digits[-decimals:]}" if decimals else digits


def _positive(low: int, high: int, places: int) -> str:
    """A pattern of the numbers from `low` to `high`, none of them negative."""
    scale = 10**places
    (first, low_fraction), (last, high_fraction) = divmod(low, scale), divmod(high, scale)
    if not places:
        return _integers(first, last)
    zeros, nines = "0" * places, "9" * places
    low_digits, high_digits = str(low_fraction).zfill(places), str(high_fraction).zfill(places)
    if first == last:
        return f"{first}{_fraction(low_digits, high_digits)}"
    branches = [f"{first}{_fraction(low_digits, nines)}"] if low_fraction else []
    begin, end = first + bool(low_fraction), last - (high_fraction + 1 < scale)
    if begin <= end:
        branches.append(f"{_integers(begin, end)}{_fraction(zeros, nines)}")
    return _either([*branches, *([f"{last}{_fraction(zeros, high_digits)}"] if end < last else [])])


def _fraction(low: str, high: str) -> str:
    """A pattern of a fraction: a point and digits from `low` to `high`, or nothing if `low` is all zeros."""
    if not low:
        return ""
    digits = f"\\.{_digits(low, high, short=True)}"
    return digits if low.strip("0") else f"(?:{digits})?"


def _integers(low: int, high: int) -> str:
    """A pattern of the whole numbers from `low` to `high`, without leading zeros."""
    branches = []
    max_size = len(str(high)) - 1
    while (size := len(str(low))) <= max_size:
        if low == 10 ** (size - 1) and size < max_size:  # all of several lengths
            branches.append(f"[1-9][0-9]{{{size - 1},{max_size - 1}}}")
            size = max_size
        else:
            branches.append(_digits(str(low), "9" * size))
        low = 10**size
    return _either([*branches, _digits(str(low), str(high))])


def _digits(low: str, high: str, short: bool = False) -> str:
    """A pattern of the digit strings from `low` to `high`, which have one length. `short`: zeros at the end may be left
    out, except the first digit."""
    size, least = len(low), 1 if short else len(low)
    if not high.strip("0"):
        return _times("0", least, size)
    if not low.strip("0") and not high.strip("9"):
        return _times("[0-9]", least, size)

    def with_rest(first: str, low: str, high: str) -> str:
        may_end = short and not low.strip("0")
        if may_end and not high.strip("9"):
            return first + _times("[0-9]", 0, len(low))
        more = _digits(low, high, short) if low else ""
        return f"{first}(?:{more})?" if may_end else first + more

    first, last = int(low[0]), int(high[0])
    if first == last:
        return with_rest(low[0], low[1:], high[1:])
    branches, last_branch = [], []
    if low[1:].strip("0"):
        branches.append(with_rest(low[0], low[1:], "9" * (size - 1)))
        first += 1
    if high[1:].strip("9"):
        last_branch.append(with_rest(high[0], "0" * (size - 1), high[1:]))
        last -= 1
    if first <= last:
        first_digit = str(first) if first == last else f"[{first}-{last}]"
        branches.append(with_rest(first_digit, "0" * (size - 1), "9" * (size - 1)))
    return _either(branches + last_branch)


def _times(one: str, least: int, most: int) -> str:
    if least == most:
        return one if most == 1 else f"{one}{{{most}}}" if most else ""
    return f"{one}{{{least},{most}}}"


def _either(branches: list[str]) -> str:
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_DIGITS = 400
"""Digits of a bound, before or after the point; a double has 324 at most."""
FRACTION_DIGITS = 15
"""Digits after the point of a number whose bounds are exclusive or negative, unless these have more. A double near 1
is exact to this many."""
MAX_LISTED = 1000
"""Multiples within bounds that are listed one by one."""
MAX_ENDINGS = 1000
"""Last digits that make a number a multiple."""
FRACTION = r"-?(?:0|[1-9][0-9]{0,7})\.[0-9]{0,6}[1-9]"
"""A pattern of numbers that are not whole, even when they are rounded to doubles."""
SAFE = 2**53
"""Largest integer that reaches the grammar library unchanged, which reads it as a double."""
LIBRARY_END = 10**18
"""Bound of multiples that the library counts where the schema sets none: exact as a double, and within its 64 bits."""
WRITTEN_DIGITS = 308
"""Most digits before and after the point where a schema sets no bound. A whole number of this many is a finite double;
Python reads 4,300, and a chat's history takes 1,233 (`MAX_INTEGER_BITS`)."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers (whole ones if `integer`) between the bounds that are multiples of `step` and in `listed`.

    `listed`: pairs of a value and its text in the schema.
    """

    low: Fraction | None = None
    high: Fraction | None = None
    low_open: bool = False
    high_open: bool = False
    integer: bool = False
    step: Fraction | None = None
    listed: tuple[tuple[Fraction, str], ...] | None = None

    @property
    def free(self) -> bool:
        """Only the type is restricted."""
        return self.low is None and self.high is None and self.step is None and self.listed is None

    def meet(self, other: Numbers) -> Numbers:
        """The numbers in both sets."""
        low, low_open = _tighter(self.low, self.low_open, other.low, other.low_open, 1)
        high, high_open = _tighter(self.high, self.high_open, other.high, other.high_open, -1)
        step = self.step if other.step is None else other.step if self.step is None else _lcm(self.step, other.step)
        listed = self.listed if other.listed is None else other.listed
        if self.listed is not None and other.listed is not None:
            values = frozenset(value for value, _ in other.listed)
            listed = tuple(item for item in self.listed if item[0] in values)
        return Numbers(low, high, low_open, high_open, self.integer or other.integer, step, listed)

    def holds(self, value: Fraction) -> bool:
        return self._within(value) and (self.listed is None or any(value == item for item, _ in self.listed))

    def _within(self, value: Fraction) -> bool:
        """Whether `value` satisfies everything but `listed`."""
        return (
            (self.low is None or value > self.low or (value == self.low and not self.low_open))
            and (self.high is None or value < self.high or (value == self.high and not self.high_open))
            and (not self.integer or value.denominator == 1)
            and (self.step is None or (value / self.step).denominator == 1)
        )

    @property
    def places(self) -> int:
        """Most digits after the point."""
        if self.step is not None:
            return places(_lcm(self.step, Fraction(1)) if self.integer else self.step)
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if self.integer or not bounds:
            return 0
        fraction, is_open = max(places(bound) for bound in bounds), self.low_open or self.high_open
        if fraction and is_open:
            fraction += 2
        is_plain = not is_open and self.low is not None and self.low >= 0
        return max(WRITTEN_DIGITS if is_plain else FRACTION_DIGITS, fraction)

    def ends(self) -> tuple[int | None, int | None]:
        """(first, last) number in units of the last place (`places`), multiples of `step`; None without a bound."""
        low = None if self.low is None else self._first(self.low, self.low_open)
        high = None if self.high is None else -self._first(-self.high, self.high_open)
        return low, high

    def _first(self, bound: Fraction, is_open: bool) -> int:
        """The first number above a lower bound, in the same units."""
        scale, unit = 10**self.places, self.unit
        bound, is_open = self._inside(bound, is_open)
        first = math.ceil(bound * scale / unit)
        return (first + (is_open and first * unit == bound * scale)) * unit

    def _ranges(self) -> list[Numbers]:
        """The whole numbers, and separately those with fractions, up to 2**53: a double beyond has no fraction, so that
        2**53 + 2.9 is read as 2**53 + 2 or 2**53 + 4. Itself alone where no bound is beyond."""
        bounds = [bound for bound in (self.low, self.high) if bound is not None and abs(bound) > SAFE]
        if self.integer or self.step is not None or not bounds:
            return [self]
        low = Fraction(-SAFE) if self.low is None else max(self.low, Fraction(-SAFE))
        high = Fraction(SAFE) if self.high is None else min(self.high, Fraction(SAFE))
        whole = replace(self, integer=True)
        return [whole, replace(self, low=low, high=high)] if low <= high else [whole]

    @property
    def unit(self) -> int:
        """`step` in units of the last place; 1 where there is none."""
        if self.step is None:
            return 1
        return int((_lcm(self.step, Fraction(1)) if self.integer else self.step) * 10**self.places)

    def _inside(self, bound: Fraction, is_open: bool) -> tuple[Fraction, bool]:
        """(bound, is_open) of a lower bound. An open one that more digits than a double has would tell apart from its
        neighbours becomes the next double, closed: readers round to doubles."""
        if not is_open or not self.places or abs(bound) > 10**300:
            return bound, is_open
        near = float(bound)
        if Fraction(math.ulp(near)) * 10**self.places <= 1:
            return bound, is_open
        return Fraction(repr(math.nextafter(near, math.inf))), False

    @property
    def empty(self) -> bool:
        if self.listed is not None:
            return not any(self._within(value) for value, _ in self.listed)
        if (ranges := self._ranges()) != [self]:
            return all(numbers.empty for numbers in ranges)
        low, high = self.ends()
        return low is not None and high is not None and low > high

    def spelling(self, pointer: str) -> tuple[str, ...] | dict[str, Any]:
        """Patterns whose intersection is the texts of a non-empty set, or a JSON schema for the library. Raises
        `GrammarUnsupported` for a step that cannot be combined with the bounds (`pointer`: its schema's)."""
        if self.free:
            return (_any_number(self.integer),)
        if self.listed is not None:
            texts = [text for value, text in self.listed if self._within(value)]
            return (f"(?:{'|'.join(map(escaped, texts))})",)
        if (ranges := self._ranges()) != [self]:
            patterns = [pattern for numbers in ranges if not numbers.empty for pattern in numbers.spelling(pointer)]
            return (f"(?:{'|'.join(patterns)})",)
        (low, high), unit, digits = self.ends(), self.unit, self.places
        bounds = range_pattern(*_ended(low, high, digits), digits)
        if unit == 1:
            return (bounds,)
        if low is not None and high is not None and (high - low) // unit < MAX_LISTED:
            return (listed_pattern(range(low, high + 1, unit), digits),)
        ending = ending_pattern(unit, digits, MAX_ENDINGS)
        if ending is not None:
            return (bounds, ending)
        return self._library(low, high, pointer)

    def _library(self, low: int | None, high: int | None, pointer: str) -> dict[str, Any]:
        """llguidance's own automaton for multiples, with bounds that survive its arithmetic."""
        if not self.places and all(end is None or abs(end) <= SAFE for end in (low, high)) and self.unit < 2**32:
            low, high = -LIBRARY_END if low is None else low, LIBRARY_END if high is None else high
            halves = [half for half in ((low, min(high, -self.unit)), (max(low, 0), high)) if half[0] <= half[1]]
            # negative numbers apart from the others, or the library would allow -0
            return {"anyOf": [_whole(first, last, self.unit) for first, last in halves]}
        if low is None and high is None and self.step is not None and _survives(self.step):
            ends = {"minimum": -LIBRARY_END, "maximum": LIBRARY_END}
            return {"type": "number", "multipleOf": float(self.step), **ends}
        detail = f"multiples of {text_of(self.step)} between such bounds have no pattern of bearable size"
        raise GrammarUnsupported("grammar", [("multipleOf", f"{pointer}/multipleOf")], detail)

    def __str__(self) -> str:
        facts = []
        for sign, bound, is_open in ((">", self.low, self.low_open), ("<", self.high, self.high_open)):
            if bound is not None:
                facts.append(f"{sign}{'' if is_open else '='} {text_of(bound)}")
        if self.step is not None:
            facts.append(f"a multiple of {text_of(self.step)}")
        if self.listed is not None:
            facts.append(f"one of {len(self.listed)} listed")
        if not self.integer and self.step is None and self.listed is None:
            facts.append(f"of at most {self.places} digits after the point")
        return f"{'whole number' if self.integer else 'number'} {', '.join(facts)}"


def of_schema(node: dict[str, Any], pointer: str, *, integer: bool = False) -> Numbers:
    """The numbers that the keywords of one schema (`KEYWORDS`) allow. Exclusive bounds may be numbers or, as in draft
    4, true. Raises `GrammarError` for values that are no numbers, `GrammarTooLarge` beyond `MAX_DIGITS`."""
    numbers = Numbers(integer=integer)
    bounds = {key: node[key] for key in KEYWORDS if key in node}
    for plain, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        is_open = bounds.get(exclusive)
        if isinstance(is_open, bool):
            del bounds[exclusive]
            if is_open and plain in bounds:
                bounds[exclusive] = bounds.pop(plain)
    for key, value in bounds.items():
        number = exact(value, f"{pointer}/{key}")
        if key == "multipleOf":
            if number <= 0:
                raise GrammarError("grammar", f"multipleOf at {pointer or '/'} must be above 0", value)
            numbers = numbers.meet(Numbers(step=number))
        elif key.endswith("inimum"):
            numbers = numbers.meet(Numbers(low=number, low_open=key.startswith("ex")))
        else:
            numbers = numbers.meet(Numbers(high=number, high_open=key.startswith("ex")))
    return numbers


def exact(value: Any, pointer: str = "") -> Fraction:
    """A number by its decimal text: 0.1 is a tenth, and not the nearest double."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise GrammarError("grammar", f"{pointer} must be a number", value)
    if abs(value) >= 10**MAX_DIGITS:
        raise GrammarTooLarge("grammar", f"{pointer} must not exceed {MAX_DIGITS} digits")
    return Fraction(repr(value) if isinstance(value, float) else value)


def number_text(value: int | float) -> str:
    """The text of a listed number; a whole one has no fraction."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    return json.dumps(value)


def places(value: Fraction) -> int:
    """Digits after the point of a decimal number."""
    return next(digits for digits in itertools.count() if 10**digits % value.denominator == 0)


def text_of(value: Fraction | None) -> str:
    """A number in decimal notation for messages, with the middle left out if it is long."""
    if value is None:
        return "any"
    digits = places(value)
    text = spelled(int(value * 10**digits), digits)
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def _any_number(integer: bool) -> str:
    """The pattern of any number with at most `WRITTEN_DIGITS` before and after the point. One with an exponent (299 at
    most) has nine before it, so that it is finite as a double."""
    whole, fraction = rf"-?(?:0|[1-9][0-9]{{0,{WRITTEN_DIGITS - 1}}})", rf"(?:\.[0-9]{{1,{WRITTEN_DIGITS}}})?"
    exponent = r"[eE](?:\+?[0-2]?[0-9]{1,2}|-[0-9]{1,3})"
    return whole if integer else f"(?:{whole}{fraction}|-?(?:0|[1-9][0-9]{{0,8}}){fraction}{exponent})"


def _ended(low: int | None, high: int | None, digits: int) -> tuple[int, int]:
    """(low, high). A missing one has `WRITTEN_DIGITS` before the point, or `MAX_DIGITS` if the other has too many."""
    end = max(abs(low or 0), abs(high or 0)) * 10
    end = 10 ** ((WRITTEN_DIGITS if end <= 10 ** (WRITTEN_DIGITS + digits) else MAX_DIGITS) + digits) - 1
    return -end if low is None else low, end if high is None else high


def _tighter(
    one: Fraction | None, one_open: bool, two: Fraction | None, two_open: bool, sign: int
) -> tuple[Fraction | None, bool]:
    if one is None or two is None:
        return (two, two_open) if one is None else (one, one_open)
    if one == two:
        return one, one_open or two_open
    return (one, one_open) if (one - two) * sign > 0 else (two, two_open)


def _lcm(one: Fraction, two: Fraction) -> Fraction:
    return Fraction(math.lcm(one.numerator, two.numerator), math.gcd(one.denominator, two.denominator))


def _whole(low: int, high: int, step: int) -> dict[str, Any]:
    return {"type": "integer", "multipleOf": step, "minimum": low, "maximum": high}


def _survives(step: Fraction) -> bool:
    """llguidance 1.9.1 multiplies a step by ten in doubles until nothing is left after the point."""
    value, moved = float(step), 0
    while not value.is_integer() and moved < 20:
        value, moved = value * 10.0, moved + 1
    return value < 2**32 and Fraction(int(value), 10**moved) == step

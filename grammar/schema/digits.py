"""Patterns over the decimal spellings of numbers, built digit by digit. No arithmetic but on integers.

A number with `places` digits after the point is counted in units of the last one: 1.25 is 125 at two places. A spelling
may leave out digits from the right that are zeros; where none is left, the point goes too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def range_pattern(low: int, high: int, places: int) -> str:
    """Matches the spellings of the numbers from `low` to `high`, both included, and nothing else.

    >>> range_pattern(5, 12, 0)
    '(?:[5-9]|1[0-2])'
    """
    parts = ["-" + _positive(max(1, -high), -low, places)] if low < 0 else []
    return _either([*parts, *([_positive(max(low, 0), high, places)] if high >= 0 else [])])


def listed_pattern(numbers: Iterable[int], places: int) -> str:
    """Matches the spellings of `numbers`."""
    texts = []
    for number in numbers:
        whole, rest = divmod(abs(number), 10**places)
        digits = str(rest).zfill(places) if places else ""
        texts.append(f"{'-' if number < 0 else ''}{whole}{_fraction(digits, digits)}")
    return _either(texts)


def ending_pattern(unit: int, places: int, most: int) -> str | None:
    """Matches every spelling of a multiple of `unit` and no spelling of anything else; it does not mind leading zeros.
    None if that takes more than `most` endings: only divisors of a power of ten have few."""
    parts = []
    count = 0
    for written in range(places + 1):
        step = unit // math.gcd(unit, 10 ** (places - written))
        size = next((size for size in range(12) if 10**size % step == 0), None)
        if size is None or (count := count + 10**size // step) > most:
            return None
        point = f"\\.[0-9]{{{written}}}" if written else ""
        if size <= written:
            tails = [str(tail).zfill(size) for tail in range(0, 10**size, step)]
            point = f"\\.[0-9]{{{written - size}}}{_either(tails)}" if written else ""
            parts.append("[0-9]+" + (point if size else f"\\.[0-9]{{{written}}}" if written else ""))
            continue
        full, short = [], []
        for tail in range(0, 10**size, step):
            full.append(_with_point(str(tail).zfill(size), written))
            if len(str(tail).zfill(written + 1)) < size:
                short.append(_with_point(str(tail).zfill(written + 1), written))
        parts.append(_either(["[0-9]*" + _either(full), *short]))
    return f"-?{_either(parts)}"


def spelled(number: int, places: int) -> str:
    """In full, without zeros at the end of the fraction."""
    digits = str(abs(number)).zfill(places + 1)
    whole, fraction = (digits[:-places], digits[-places:].rstrip("0")) if places else (digits, "")
    return ("-" if number < 0 else "") + whole + ("." + fraction if fraction else "")


def _with_point(digits: str, written: int) -> str:
    return f"{digits[:-written]}\\.{digits[-written:]}" if written else digits


def _positive(low: int, high: int, places: int) -> str:
    """Numbers that are not negative."""
    scale = 10**places
    (first, above), (last, below) = divmod(low, scale), divmod(high, scale)
    if not places:
        return _whole(first, last)
    zeros, nines = "0" * places, "9" * places
    above_text, below_text = str(above).zfill(places), str(below).zfill(places)
    if first == last:
        return f"{first}{_fraction(above_text, below_text)}"
    parts = [f"{first}{_fraction(above_text, nines)}"] if above else []
    begin, end = first + bool(above), last - (below + 1 < scale)
    if begin <= end:
        parts.append(f"{_whole(begin, end)}{_fraction(zeros, nines)}")
    return _either([*parts, *([f"{last}{_fraction(zeros, below_text)}"] if end < last else [])])


def _fraction(low: str, high: str) -> str:
    """The end of a number: a point and digits from `low` to `high`, or nothing if that is as good as `low`."""
    if not low:
        return ""
    digits = f"\\.{_digits(low, high, short=True)}"
    return digits if low.strip("0") else f"(?:{digits})?"


def _whole(low: int, high: int) -> str:
    """Whole numbers without leading zeros."""
    parts = []
    most = len(str(high)) - 1
    while (size := len(str(low))) <= most:
        if low == 10 ** (size - 1) and size < most:  # all of several lengths
            parts.append(f"[1-9][0-9]{{{size - 1},{most - 1}}}")
            size = most
        else:
            parts.append(_digits(str(low), "9" * size))
        low = 10**size
    return _either([*parts, _digits(str(low), str(high))])


def _digits(low: str, high: str, short: bool = False) -> str:
    """Digit strings from `low` to `high`, of one length. `short`: zeros at the end may be left out, but for the first
    digit."""
    size, least = len(low), 1 if short else len(low)
    if not high.strip("0"):
        return _times("0", least, size)
    if not low.strip("0") and not high.strip("9"):
        return _times("[0-9]", least, size)

    def behind(first: str, low: str, high: str) -> str:
        may_end = short and not low.strip("0")
        if may_end and not high.strip("9"):
            return first + _times("[0-9]", 0, len(low))
        more = _digits(low, high, short) if low else ""
        return f"{first}(?:{more})?" if may_end else first + more

    first, last = int(low[0]), int(high[0])
    if first == last:
        return behind(low[0], low[1:], high[1:])
    parts, end = [], []
    if low[1:].strip("0"):
        parts.append(behind(low[0], low[1:], "9" * (size - 1)))
        first += 1
    if high[1:].strip("9"):
        end.append(behind(high[0], "0" * (size - 1), high[1:]))
        last -= 1
    if first <= last:
        one = str(first) if first == last else f"[{first}-{last}]"
        parts.append(behind(one, "0" * (size - 1), "9" * (size - 1)))
    return _either(parts + end)


def _times(one: str, least: int, most: int) -> str:
    if least == most:
        return one if most == 1 else f"{one}{{{most}}}" if most else ""
    return f"{one}{{{least},{most}}}"


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

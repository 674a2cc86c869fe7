"""Patterns over the decimal spellings of numbers, built digit by digit. No arithmetic but on integers.

A number with `places` digits after the point is counted in units of the last one: 1.25 is 125 at two places. A spelling
may leave out digits from the right that are zeros; where none is left, the point goes too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


def range_pattern(low: int | None, high: int | None, places: int) -> str:
    """Matches the spellings of the numbers from `low` to `high`, both included (None: no end), and nothing else.

    >>> range_pattern(5, 12, 0)
    '(?:[5-9]|1[0-2])'
    """
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append("-" + _positive(least, None if low is None else -low, places))
    if high is None or high >= 0:
        parts.append(_positive(0 if low is None else max(low, 0), high, places))
    return _either(parts)


def listed_pattern(numbers: Iterable[int], places: int) -> str:
    """Matches the spellings of `numbers`."""
    texts = []
    for number in numbers:
        whole, digits = spelled(number, 0), ""
        if places:
            sign = "-" if number < 0 else ""
            whole = sign + str(abs(number) // 10**places)
            digits = str(abs(number) % 10**places).zfill(places)
        texts.append(whole + (_fraction(digits, digits) if digits else ""))
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


def escaped_text(text: str) -> str:
    """A number's text as a pattern."""
    return text.replace(".", "\\.").replace("+", "\\+")


def _with_point(digits: str, written: int) -> str:
    return f"{digits[:-written]}\\.{digits[-written:]}" if written else digits


def _positive(low: int, high: int | None, places: int) -> str:
    """Numbers that are not negative."""
    scale = 10**places
    first, above = divmod(low, scale)
    zeros, nines = "0" * places, "9" * places
    above_text = str(above).zfill(places) if places else ""
    if high is None:
        last = None
    else:
        last, below = divmod(high, scale)
        below_text = str(below).zfill(places) if places else ""
        if first == last:
            return f"{first}{_fraction(above_text, below_text)}"
    if not places:
        return _whole(first, last)
    parts = []
    begin, end = first, last
    if above:
        parts.append(f"{first}{_fraction(above_text, nines)}")
        begin += 1
    if last is not None and below + 1 < scale:
        parts.append(f"{last}{_fraction(zeros, below_text)}")
        end = last - 1
    if end is None or begin <= end:
        parts.insert(1 if above else 0, f"{_whole(begin, end)}{_fraction(zeros, nines)}")
    return _either(parts)


def _fraction(low: str, high: str) -> str:
    """The end of a number: a point and digits from `low` to `high`, or nothing if that is as good as `low`."""
    if not low:
        return ""
    digits = f"\\.{_digits(low, high)}"
    return digits if low.strip("0") else f"(?:{digits})?"


def _digits(low: str, high: str) -> str:
    """At least one digit; those left out at the right are zeros. `low` <= `high`, of one length."""
    if not low.strip("0") and not high.strip("9"):
        return f"[0-9]{{1,{len(low)}}}"
    if not high.strip("0"):
        return f"0{{1,{len(low)}}}"
    if low[0] == high[0]:
        return low[0] + _more(low[1:], high[1:])
    first, last = int(low[0]), int(high[0])
    rest = low[1:]
    parts = []
    if rest.strip("0"):
        parts.append(low[0] + _more(rest, "9" * len(rest)))
        first += 1
    end = []
    if high[1:].strip("9"):
        end.append(high[0] + _more("0" * len(rest), high[1:]))
        last -= 1
    if first <= last:
        parts.append(_one(first, last) + (f"[0-9]{{0,{len(rest)}}}" if rest else ""))
    return _either(parts + end)


def _more(low: str, high: str) -> str:
    """The digits after the first: none, if that is as good as `low`."""
    if not low:
        return ""
    return _digits(low, high) if low.strip("0") else f"(?:{_digits(low, high)})?"


def _whole(low: int, high: int | None) -> str:
    """Whole numbers without leading zeros."""
    parts = []
    while high is None or len(str(low)) < len(str(high)):
        size = len(str(low))
        if high is None and str(low).strip("0") in ("", "1") and str(low)[0] == "1" and low == 10 ** (size - 1):
            parts.append(f"[1-9][0-9]{{{size - 1},}}" if size > 1 else "[1-9][0-9]*")
            return _either(parts)
        if high is not None and low == 10 ** (size - 1) and size + 1 < len(str(high)):
            most = len(str(high)) - 1
            parts.append(f"[1-9][0-9]{{{size - 1},{most - 1}}}")
            low = 10**most
            continue
        parts.append(_same_length(str(low), "9" * size))
        low = 10**size
    parts.append(_same_length(str(low), str(high)))
    return _either(parts)


def _same_length(low: str, high: str) -> str:
    """Digit strings from `low` to `high`, of one length."""
    if not low:
        return ""
    rest = len(low) - 1
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    first, last = int(low[0]), int(high[0])
    parts, end = [], []
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:].strip("9"):
        end.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(_one(first, last) + (f"[0-9]{{{rest}}}" if rest else ""))
    return _either(parts + end)


def _one(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"

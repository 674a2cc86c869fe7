"""Sets of numbers and their patterns, against decimal arithmetic. More ranges: ASYNCENGINE_LONG=50."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Any

import pytest
from support.long import TIMES
from support.tables import table

from asyncengine.errors import GrammarError, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar.schema.numbers import Numbers, exact, of_schema

RANGES = 1000 * TIMES
CANONICAL = re.compile(r"(?:0|-?[1-9][0-9]*|-?(?:0|[1-9][0-9]*)\.[0-9]+)")
WIDE = Context(prec=2000)
HUGE = [2**53, 2**53 + 1, 10**18 + 1, 2**63 - 1, -(2**63), 10**30, 10**30 + 5, -(10**25)]
SMALL = [0, 1, -1, 5, 9, 10, 99, 100, 101, 255, -128, 0.5, 0.1, -0.1, 0.3, 1.5, 5.1, 99.95, 0.001, 2.75, 1e-7, 1e-30]


def random_bound(rng: random.Random, around: Any = None) -> Any:
    if around is not None and rng.random() < 0.5:  # a near neighbour, which is where mistakes are
        step = rng.choice([0, 1, -1, 10, 10 ** -rng.randrange(1, 5)])
        return around + step if isinstance(around, int) and isinstance(step, int) else float(around) + step
    match rng.randrange(5):
        case 0:
            return rng.choice(HUGE) + rng.randrange(-3, 4)
        case 1:
            return rng.choice(SMALL)
        case 2:
            return rng.randrange(-(10 ** rng.randrange(1, 20)), 10 ** rng.randrange(1, 20))
        case 3:
            return round(rng.uniform(-100, 100), rng.randrange(1, 5))
    return rng.uniform(-1, 1) * 10.0 ** rng.randrange(-12, 15)


def random_schema(rng: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    low = random_bound(rng)
    if rng.random() < 0.75:
        schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
    if rng.random() < 0.75:
        schema[rng.choice(["maximum", "exclusiveMaximum"])] = random_bound(rng, low)
    if rng.random() < 0.05:
        schema["minimum"] = random_bound(rng, low)
    if rng.random() < 0.25:
        schema["multipleOf"] = rng.choice([1, 2, 3, 5, 7, 10, 12, 25, 100, 0.1, 0.25, 0.01, 0.5, 0.07, 2.5])
    return schema


def decimal(value: Any) -> Decimal:
    return Decimal(repr(value))


def keeps(schema: dict[str, Any], integer: bool, value: Decimal) -> bool:
    """True if the value keeps the bounds, by decimal arithmetic, straight from the specification."""
    bounds: dict[str, Callable[[Decimal, Decimal], bool]] = {
        "minimum": lambda value, bound: value >= bound,
        "maximum": lambda value, bound: value <= bound,
        "exclusiveMinimum": lambda value, bound: value > bound,
        "exclusiveMaximum": lambda value, bound: value < bound,
        "multipleOf": lambda value, step: WIDE.remainder(value, step) == 0,
    }
    if integer and value != value.to_integral_value():
        return False
    return all(bounds[key](value, decimal(bound)) for key, bound in schema.items())


def probes(rng: random.Random, schema: dict[str, Any], places: int) -> list[str]:
    """Texts of numbers at the bounds and around them, and some that are no number of ours."""
    anchors = [decimal(bound) for bound in schema.values()] + [Decimal(0), decimal(random_bound(rng))]
    if {"maximum", "exclusiveMaximum"} & set(schema) and {"minimum", "exclusiveMinimum"} & set(schema):
        anchors.append(WIDE.divide(WIDE.add(anchors[0], anchors[1]), Decimal(2)))
    texts = []
    for anchor in anchors:
        for digits in {0, 1, places, max(0, places - 1), rng.randrange(places + 1)}:
            unit = Decimal(1).scaleb(-digits)
            base = anchor.quantize(unit, context=WIDE) if abs(anchor) < Decimal(10) ** 40 else anchor
            for steps in (0, 1, -1, rng.randrange(-99, 99)):
                texts.append(format(WIDE.add(base, WIDE.multiply(unit, Decimal(steps))), "f"))
    return [*texts, "-0", "00", "01", "1.", ".5", "-", "", "+1", "1e3", "-0.0"]


@pytest.mark.parametrize("part", range(4))
def test_random_ranges_against_decimal_arithmetic(part: int) -> None:
    """A text matches if and only if it is spelled as said, has no more digits than said, and keeps every bound; and
    what matches keeps them as a double as well."""
    rng = random.Random(part)
    matched = unmatched = empty = refused = 0
    for _ in range(RANGES // 4):
        schema, integer = random_schema(rng), rng.random() < 0.5
        numbers = of_schema(schema, "", integer=integer)
        texts = probes(rng, schema, numbers.places)
        inside = [text for text in texts if CANONICAL.fullmatch(text) and keeps(schema, integer, Decimal(text))]
        if numbers.free:
            continue
        if numbers.empty:
            empty += 1
            reachable = [text for text in inside if len(text.partition(".")[2]) <= numbers.places]
            assert all(differs_by_less_than_a_double(schema, text) for text in reachable), (schema, reachable)
            continue
        try:
            spelling = numbers.spelling("")
        except GrammarUnsupported:
            refused += 1
            continue
        if isinstance(spelling, dict):
            continue  # the library's own automaton of multiples: tested on the backend
        patterns = [re.compile(pattern) for pattern in spelling]
        for text in texts:
            taken = all(pattern.fullmatch(text) for pattern in patterns)
            wanted = (
                CANONICAL.fullmatch(text) is not None
                and not re.fullmatch(r"-[0.]*", text)
                and len(text.partition(".")[2]) <= numbers.places
                and not (integer and "." in text)
                and keeps(schema, integer, Decimal(text))
            )
            if wanted and not taken:
                assert differs_by_less_than_a_double(schema, text), (schema, integer, text)
                continue
            assert taken == wanted, (schema, integer, text, spelling)
            matched, unmatched = matched + taken, unmatched + (not taken)
            if taken and "." in text and not ("multipleOf" in schema and abs(Decimal(text)) > 2**53):
                assert keeps_as_double(schema, float(text)), (schema, text)
                assert keeps_as_double(schema, float(text), exactly=True), (schema, text)
    assert min(matched, unmatched) > RANGES
    assert refused < RANGES / 4 / 10
    assert empty > RANGES / 4 / 50


def differs_by_less_than_a_double(schema: dict[str, Any], text: str) -> bool:
    """True if no double lies between the number and an exclusive bound, or if it has a fraction where doubles have
    none: such texts are left out."""
    opened = [float(schema[key]) for key in ("exclusiveMinimum", "exclusiveMaximum") if key in schema]
    beyond = "." in text and abs(Decimal(text)) >= 2**53 - 2
    return beyond or any(abs(Decimal(text) - decimal(bound)) < 2 * Decimal(math.ulp(bound)) for bound in opened)


def test_no_number_between_whole_bounds_that_are_no_doubles() -> None:
    """Fractions lie between them, and each is read as one of the bounds or beyond."""
    numbers = of_schema({"exclusiveMinimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 2}, "")
    assert numbers.empty
    assert not of_schema({"minimum": 2**53 + 1, "exclusiveMaximum": 2**53 + 2}, "").empty


def keeps_as_double(schema: dict[str, Any], value: float, exactly: bool = False) -> bool:
    """True if the value keeps the bounds when schema and output are both read as doubles; `exactly`: as Python
    compares, for which a whole bound is none."""
    bounds = {key: bound if exactly else float(bound) for key, bound in schema.items()}
    return (
        value >= bounds.get("minimum", value)
        and value <= bounds.get("maximum", value)
        and ("exclusiveMinimum" not in bounds or value > bounds["exclusiveMinimum"])
        and ("exclusiveMaximum" not in bounds or value < bounds["exclusiveMaximum"])
    )


@pytest.mark.parametrize(("schema", "inside", "outside"), table(__file__, "decimals"))
def test_decimals(schema: dict[str, Any], inside: list[str], outside: list[str]) -> None:
    patterns = of_schema(schema, "").spelling("")
    assert [text for text in inside if not all(re.fullmatch(pattern, text) for pattern in patterns)] == []
    assert [text for text in outside if all(re.fullmatch(pattern, text) for pattern in patterns)] == []


def test_sets_meet() -> None:
    one = of_schema({"minimum": 3, "maximum": 100, "multipleOf": 4}, "")
    two = of_schema({"exclusiveMinimum": 3, "exclusiveMaximum": 100.5, "multipleOf": 0.6}, "", integer=True)
    both = one.meet(two)
    assert both == two.meet(one)
    held = [value for value in range(-5, 200) if both.holds(Fraction(value))]
    assert held == [12, 24, 36, 48, 60, 72, 84, 96]
    assert re.fullmatch(both.spelling("")[0], "96")
    listed = Numbers(listed=((Fraction(1, 2), "0.5"), (Fraction(12), "12"), (Fraction(24), "24.0")))
    assert listed.meet(both).spelling("") == (r"(?:12|24\.0)",)
    assert listed.meet(Numbers(low=Fraction(25))).empty


def test_what_cannot_be_said_is_refused_by_name() -> None:
    with pytest.raises(GrammarUnsupported, match=r"multiples of 0\.07") as refused:
        of_schema({"multipleOf": 0.07, "minimum": 0}, "/a").spelling("/a")
    assert refused.value.features == (("multipleOf", "/a/multipleOf"),)
    with pytest.raises(GrammarTooLarge, match="/minimum must not exceed 400 digits"):
        of_schema({"minimum": 10**400}, "")
    for wrong in ({"minimum": "5"}, {"multipleOf": 0}, {"multipleOf": -1}, {"maximum": None}):
        with pytest.raises(GrammarError):
            of_schema(wrong, "")


def test_multiples_with_few_last_digits_are_patterns_of_any_range() -> None:
    patterns = of_schema({"multipleOf": 0.25, "minimum": -(10**20)}, "").spelling("")
    assert len(patterns) == 2
    for quarter in range(-500, 500):
        text = format(Decimal(quarter) / 100, "f")
        assert all(re.fullmatch(pattern, text) for pattern in patterns) == (quarter % 25 == 0 and text != "-0"), text


def test_patterns_are_short() -> None:
    """They are compiled with everything else: an ordinary range must not cost anything."""
    ordinary = of_schema({"exclusiveMinimum": 0, "maximum": 100}, "").spelling("")[0]
    assert len(ordinary) < 600
    int64 = of_schema({"minimum": -(2**63), "maximum": 2**63 - 1}, "", integer=True).spelling("")[0]
    assert len(int64) < 1200
    longest = of_schema({"minimum": 10**399 + 7, "maximum": 8 * 10**399 - 3}, "", integer=True).spelling("")[0]
    assert len(longest) < 20_000


def test_a_number_is_what_is_written() -> None:
    assert exact(0.1) == Fraction(1, 10)
    assert exact(json.loads("1e-7")) == Fraction(1, 10**7)
    assert exact(10**30 + 1) == 10**30 + 1

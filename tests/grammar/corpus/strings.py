"""Lengths, patterns and formats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .case import Case, make

LENGTHS: list[tuple[dict[str, int], list[str], list[str]]] = [
    ({"minLength": 1}, ["a", "日本", "x" * 50], [""]),
    ({"maxLength": 3}, ["", "abc", "🙂🙂🙂"], ["abcd", "🙂🙂🙂🙂"]),
    ({"maxLength": 0}, [""], ["a"]),
    ({"minLength": 5, "maxLength": 5}, ["abcde", "éèêëē", '\n\t\\"/'], ["abcd", "abcdef"]),
    ({"minLength": 2, "maxLength": 4}, ["ab", "abcd"], ["a", "abcde"]),
    ({"minLength": 30}, ["x" * 30], ["x" * 29]),
    ({"maxLength": 100}, ["word " * 20], ["word " * 21]),
    ({"minLength": 10, "maxLength": 200}, ["0123456789", "z" * 200], ["012345678", "z" * 201]),
    ({"maxLength": 1000}, ["n" * 1000], ["n" * 1001]),
]

PATTERNS: list[tuple[str, list[str], list[str]]] = [
    ("^abc$", ["abc"], ["ab", "abcd", "xabc"]),
    ("abc", ["abc", "xxabcxx"], ["ab c", ""]),
    ("^abc", ["abc", "abc 123"], ["xabc"]),
    ("abc$", ["abc", "123 abc"], ["abcx"]),
    ("^[0-9]+$", ["0", "12345"], ["", "12a", "1.5"]),
    ("^[0-9]+(\\.[0-9]+)?$", ["1", "1.5", "10.25"], ["1.", ".5", "1.5.2"]),
    ("^[a-z]+( [a-z]+)*$", ["ab", "ab cd", "a b c d"], ["ab ", " ab", "ab  cd"]),
    ("^(a|ab)(c|bcd)$", ["ac", "abc", "abcd", "abbcd"], ["a", "ab"]),
    ("^\\d{3}-\\d{4}$", ["555-0199"], ["5555-199", "555-01999"]),
    ("^(\\([0-9]{3}\\))?[0-9]{3}-[0-9]{4}$", ["555-1212", "(888)555-1212"], ["(888)555-1212 ext. 532"]),
    ("^[A-Z]{2,3}$", ["EU", "USA"], ["E", "EURO", "eu"]),
    ("^[a-zA-Z_][a-zA-Z0-9_]*$", ["x", "_private", "camelCase9"], ["9x", "a-b", ""]),
    ("^#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$", ["#fff", "#00FF7f"], ["#ff", "fff", "#ggg"]),
    ("^v?(0|[1-9]\\d*)\\.(0|[1-9]\\d*)\\.(0|[1-9]\\d*)$", ["1.0.0", "v10.20.30"], ["01.0.0", "1.0"]),
    ("^[^@\\s]+@[^@\\s]+\\.[a-z]{2,}$", ["me@example.org"], ["me@example", "a b@c.de"]),
    ("^$", [""], ["a", " "]),
    (".*", ["", "anything"], []),
    ("^.{3}$", ["abc", "日本語", "🙂ab"], ["ab", "abcd"]),
    ("^\\w+$", ["abc_123"], ["", "a b", "a-b"]),
    ("^\\s*\\S+\\s*$", [" a ", "b"], ["a b", ""]),
    ("^(foo|bar|baz)+$", ["foo", "foobarbaz"], ["fo", "foob"]),
    ("^a*b*c*$", ["", "abc", "aabbcc"], ["ba", "cab"]),
    ("^(ab){2,4}$", ["abab", "abababab"], ["ab", "ababababab"]),
    ('^[^\\x00"\\\\]*$', ["no quote"], ['a "quote"', "back\\slash"]),
    ('^"[a-z]+"$', ['"quoted"'], ["quoted"]),
    ("^\\\\$", ["\\"], ["/", "\\\\"]),
    ("^a/b$", ["a/b"], ["ab"]),
    ("^\\/api\\/v[0-9]+\\/[a-z]+$", ["/api/v1/users"], ["/api/users"]),
    ("^[а-яё]+$", ["привет", "ёж"], ["hello"]),
    ("^[一-龥]{2,4}$", ["日本", "日本語"], ["日", "nihon"]),
    ("^🙂+$", ["🙂", "🙂🙂"], ["🙁"]),
    ("^(🙂|é|x)$", ["🙂", "é", "x"], ["e"]),
    ("^[\\w.+-]+$", ["a.b+c-d"], ["a b"]),
    ("^(?:[01]\\d|2[0-3]):[0-5]\\d$", ["00:00", "23:59"], ["24:00", "12:60"]),
    ("^(\\d{1,3}\\.){3}\\d{1,3}$", ["1.2.3.4", "255.255.255.255"], ["1.2.3", "1.2.3.4567"]),
    ("^[A-Z]{2}\\d{2}(?: ?[A-Z0-9]{4}){2,7}$", ["DE89 3704 0044 0532"], ["de89 3704 0044"]),
    ("^(?:\\+\\d{1,3} )?\\d{6,12}$", ["+44 2079460000", "123456"], ["+44 12345"]),
    ("^-?(?:0|[1-9]\\d*)(?:\\.\\d+)?(?:[eE][+-]?\\d+)?$", ["-1.5e+10", "0"], ["01", "1."]),
    ("^x{20,40}$", ["x" * 20, "x" * 40], ["x" * 19, "x" * 41]),
    ("^\\t\\n$", ["\t\n"], ["\n\t", "\t"]),
    ("^(a?){8}a{8}$", ["a" * 8, "a" * 16], ["a" * 7, "a" * 17]),
    ("^(the|a) (quick |lazy )?(fox|dog)$", ["the fox", "a lazy dog"], ["the quick", "fox"]),
]

FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "date": (["2024-02-29", "1999-12-31"], ["2024-13-01", "2024-04-31", "24-01-01", "2024-1-1", "2024-02-30"]),
    "time": (["12:30:00Z", "23:59:59.999+02:00"], ["24:00:00Z", "12:30", "12:30:00", "12:60:00Z"]),
    "date-time": (
        ["2026-11-21T10:00:00Z", "1985-04-12T23:20:50.52-08:00"],
        ["2026-11-21", "2026-11-21 10:00:00Z", "2026-02-30T10:00:00Z", "2026-11-21T10:00:00"],
    ),
    "duration": (["P1Y2M3D", "PT5M", "P4W", "P1DT12H"], ["1D", "P", "PT", "P1S", "P1D2H"]),
    "email": (["me@example.org", "a.b+c@d-e.co.uk", "x@[127.0.0.1]"], ["me", "me@", "@x.org", "a b@c.de", "a..b@c.de"]),
    "hostname": (["example.org", "a-b.c1", "x"], ["-a.org", "a-.org", "a_b.org", "a..b", ".a"]),
    "ipv4": (["127.0.0.1", "255.255.255.255", "0.0.0.0"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5"]),
    "ipv6": (
        ["::1", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8", "::"],
        ["1::2::3", "12345::", "1:2:3:4:5:6:7", "::g"],
    ),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456"]),
    "uri": (
        ["https://example.org/a/b?c=d&e=%20#f", "mailto:me@example.org", "urn:isbn:0451450523", "http://[::1]:80/"],
        ["example.org", "//example.org", "http://a b", "http://x/%zz", "1http://x"],
    ),
    "uri-reference": (
        [
            "https://a@example.org:80/a?b#c",
            "/a/b%20c",
            "a/b:c",
            "//host/x",
            "#f",
            "?q=/",
            "",
            "mailto:me@x.org",
            "./a:b",
        ],
        ["a b", "1a:b", "%zz", "a#b#c", "a|b", "\\\\host", "/é", "//h:80a/"],
    ),
    "iri": (
        ["https://exämple.org/日本?ü#é", "urn:x", "mailto:me@x.org"],
        ["日本", "//x", "http://a b", "http://x/%z", "é:x", "http://x/<a>"],
    ),
    "iri-reference": (["/日本", "https://x/é", "#ü", "", "a/b"], ["a b", "<a>", "ü:a", "%g0"]),
    "uri-template": (
        ["https://x/{id}/a{?q,r*}", "{+path:3}", "{/a.b,c}", "plain", "", "{%41b}", "日本{x}"],
        ["{", "}", "{}", "{a", "{a b}", "a b", "{a:0}", "{a**}", "{?}", "<a>", "{a..b}", "{a:10000}"],
    ),
    "json-pointer": (["", "/", "/a/0", "/a~1b/~0", '/é "/\\'], ["a", "#/a", "/~", "/~2", "a/"]),
    "relative-json-pointer": (["0", "1/a", "12#", "0/", "2/a~1b"], ["", "/a", "01", "-1", "1#/a", "1a", "1/~"]),
}


UNKNOWN_FORMATS = (
    "idn-email", "idn-hostname", "regex", "binary", "password", "path", "url", "byte", "phone", "uuid4", "semver",
)  # fmt: skip
"""Formats of JSON Schema that no pattern enforces, and some that people made up."""


def lengths() -> Iterator[Case]:
    for limits, valid, invalid in LENGTHS:
        name = "_".join(f"{keyword}_{limit}" for keyword, limit in limits.items())
        yield make("length", name, {"type": "string", **limits}, valid, invalid)
    yield make("length", "or_null", {"type": ["string", "null"], "minLength": 2}, ["ab", None], ["a"])
    yield make("length", "without_type", {"minLength": 2, "maxLength": 3}, ["ab", 1, [], {}, None], ["a", "abcd"])


def patterns() -> Iterator[Case]:
    for number, (pattern, valid, invalid) in enumerate(PATTERNS):
        wrong: list[Any] = [*invalid, 1]
        yield make("pattern", f"{number:02d}", {"type": "string", "pattern": pattern}, valid, wrong)
    both = {"type": "string", "pattern": "^[a-z]+$", "minLength": 3, "maxLength": 5}
    yield make("pattern", "with_length", both, ["abc", "abcde"], ["ab", "abcdef", "ABC"])
    unanchored = {"type": "string", "pattern": "[0-9]{2}", "maxLength": 6}
    yield make("pattern", "unanchored_with_length", unanchored, ["ab12cd", "12"], ["ab12cde", "a1b2"])
    # the library cannot tell whether any text is left
    domain = "^(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\\.)+[a-z0-9][a-z0-9-]{0,61}[a-z0-9]$"
    host = {"type": "string", "pattern": domain, "minLength": 1, "maxLength": 253}
    yield make("pattern", "domain_with_length", host, ["a.bc", "www.site.org"], ["site", "a.b.", 50 * "site." + "orgs"])


def formats() -> Iterator[Case]:
    for name, (valid, invalid) in FORMATS.items():
        yield make("format", name, {"type": "string", "format": name}, valid, invalid)
        listed = {"type": "array", "items": {"type": "string", "format": name}, "minItems": 1}
        yield make("format", f"list_of_{name}", listed, [valid, valid[:1]], [[], [invalid[0]], [valid[0], invalid[-1]]])
        optional = {"type": "object", "properties": {"v": {"type": ["string", "null"], "format": name}}}
        yield make("format", f"maybe_{name}", optional, [{"v": valid[-1]}, {"v": None}, {}], [{"v": invalid[0]}])
    year = {"type": "string", "format": "date", "pattern": "^2024-"}
    yield make("format", "date_with_pattern", year, ["2024-05-05"], ["2023-05-05", "2024-5-5"])
    short = {"type": "string", "format": "email", "maxLength": 12}
    yield make("format", "email_with_length", short, ["me@site.org"], ["someone@site.org", "me"])
    for name in UNKNOWN_FORMATS:
        yield make("format", f"annotation_{name}", {"type": "string", "format": name}, ["x", ""], [1])
    anything = {"properties": {"a": {"format": "int32"}}, "required": ["a"]}
    yield make("format", "annotation_without_type", anything, [{"a": 1}, {"a": "x"}], [{}])
    yield make("format", "ignored_on_integers", {"type": "integer", "format": "int32"}, [1], ["1"])


def strings() -> Iterator[Case]:
    yield from lengths()
    yield from patterns()
    yield from formats()

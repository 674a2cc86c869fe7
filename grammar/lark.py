"""Lark text as llguidance reads it: writing its literals, reading its tokens, converting llama.cpp's GBNF into it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from json.encoder import encode_basestring

from asyncengine.errors import GrammarError, GrammarTooLarge
from asyncengine.grammar.spec import check_text

MAX_EBNF = 256 << 10
"""Most characters of GBNF converted on the caller's thread (0.2 s)."""
MAX_EBNF_WORK = 8_000_000
"""Most rules times characters of GBNF: the converter passes over all of it up to once per rule."""
MAX_PARENTHESES = 64
"""Deepest group in GBNF. The converter recurses."""

_TOKEN = re.compile(
    r"""
      (?P<comment> //[^\n]* | \#[^\n]* )
    | (?P<string>  "(?: \\. | [^"\\\n] )*  (?: "i? | (?=\n) | \\?\Z ) )
    | (?P<regex>   /(?: \\. | [^/\\] )+    (?: /[imslux]* | \\?\Z ) )
    | (?P<json>    %json (?![A-Za-z_]) )
    | (?P<keyword> %[A-Za-z_]{1,32} )
    | (?P<name>    [A-Za-z_][A-Za-z0-9_-]* )
    | (?P<number>  [0-9]+ )
    | (?P<mark>    <[^<>\s]+> )
    | (?P<space>   \s+ )
    | (?P<other>   . )
    """,
    re.VERBOSE | re.DOTALL,
)
_GBNF = re.compile(
    r"""
      (?P<comment> \#[^\n]* )
    | (?P<literal> "(?: \\. | [^"\\] )* "? | \[(?: \\. | [^\]\\] )* \]? )
    | (?P<any>     \. )
    | (?P<open>    \( )
    | (?P<close>   \) )
    | (?P<other>   [^"\[.()\#]+ )
    """,
    re.VERBOSE | re.DOTALL,
)
_LARK = re.compile(r"(?m)^\s*(?:%llguidance\b|[?!]?start\s*:(?!:=))")
"""A line that GBNF does not have. In GBNF, too, a rule may be called `start`."""
_UNICODE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_DECODER = json.JSONDecoder()


def literal(text: str) -> str:
    """A Lark literal that matches exactly `text`, which is also the one spelling that listed JSON texts have."""
    return encode_basestring(text).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A Lark regex literal; `pattern` in the dialect of `portable`."""
    if not pattern:
        return "/(?:)/"
    spelled = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
    return "/" + re.sub(r"\\.|[/\n]", lambda match: spelled.get(match[0], match[0]), pattern, flags=re.DOTALL) + "/"


def replace_json(text: str, replacement: Callable[[str], str | None]) -> str:
    """`text` with each `%json {...}` replaced by what `replacement` makes of the value; None leaves it as it is."""
    out = []
    done = 0
    for kind, token, begin in tokenize(text):
        instead = replacement(token) if kind == "json" else None
        if instead is not None:
            out += [text[done : text.rindex("%json", done, begin)], instead]
            done = begin + len(token)
    return "".join(out) + text[done:]


def tokenize(text: str) -> Iterator[tuple[str, str, int]]:
    """(kind, text, where it begins) of a Lark text: string, regex, json (the value after `%json`), keyword, name,
    number, mark (a special token), other.

    The text after `%json` must be JSON: `GrammarError` if it is none, `GrammarTooLarge` if it nests beyond Python's
    recursion limit. Anything else malformed passes as `other`.
    """
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return
        position = match.end()
        kind = match.lastgroup or ""
        if kind == "json":
            start = position + len(text[position : position + 80]) - len(text[position : position + 80].lstrip())
            try:
                _, position = _DECODER.raw_decode(text, start)
            except RecursionError:
                raise GrammarTooLarge("grammar", "the JSON schema in the Lark text nests too deeply") from None
            except ValueError:
                raise GrammarError("grammar", "%json in a Lark grammar must be followed by a JSON schema") from None
            yield "json", text[start:position], start
        elif kind not in ("comment", "space"):
            yield kind, match.group(), match.start()


def checked_lark(given: object) -> str:
    """`given`, if it can be a Lark grammar here. The library judges the rest when it compiles it."""
    text = check_text(given, "a Lark grammar")
    if re.search(r"(?m)^[ \t]*[?!]?start\b", text) is None:
        raise GrammarError("grammar", "a Lark grammar needs a rule named start")
    if "max_tokens" in text and any(token[:2] == ("name", "max_tokens") for token in tokenize(text)):
        raise GrammarError("grammar", "max_tokens inside a Lark grammar is not supported: a step could not be undone")
    return text


def ebnf_to_lark(given: object) -> str:
    """Lark text from GBNF or Lark.

    llguidance's converter makes a terminal of each rule without recursion; a terminal takes the longest text it can.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    text = check_text(given, "an EBNF grammar")
    if _LARK.search(text):
        return checked_lark(text)
    if len(text) > MAX_EBNF:
        raise GrammarTooLarge("grammar", f"GBNF must not exceed {MAX_EBNF} characters", len(text))
    if text.count("::=") * len(text) > MAX_EBNF_WORK:
        raise GrammarTooLarge("grammar", f"GBNF must not exceed {MAX_EBNF_WORK} rules times characters")
    plain = _plain_gbnf(text)
    try:
        lark = gbnf_to_lark(plain)
    except RecursionError:
        raise GrammarTooLarge("grammar", "the GBNF grammar nests too deeply") from None
    except Exception as error:
        raise GrammarError("grammar", f"is neither GBNF nor Lark: {str(error)[:160]}") from None
    return checked_lark(str(lark))


def _plain_gbnf(text: str) -> str:
    """GBNF with `\\u` escapes written out (the converter drops their zeros) and `.` as any character, newline too."""
    out = []
    depth = 0
    for match in _GBNF.finditer(text):
        kind, piece = match.lastgroup, match.group()
        if kind == "literal":
            piece = _UNICODE.sub(_character, piece)
        elif kind == "any":
            piece = "[\\x00-\U0010ffff]"
        elif kind == "other":  # the converter calls the root so
            piece = re.sub(r"(?<![\w-])start(?![\w-])", "start-0", piece)
        depth += (kind == "open") - (kind == "close")
        if depth > MAX_PARENTHESES:
            raise GrammarTooLarge("grammar", f"GBNF must not nest deeper than {MAX_PARENTHESES} parentheses")
        out.append(piece)
    return "".join(out)


def _character(match: re.Match[str]) -> str:
    digits = match.group(1) or match.group(2)
    if digits is None:
        return match.group()
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF or code == 0:
        raise GrammarError("grammar", "an escape in the GBNF grammar is not a character", match.group())
    return f"\\x{code:02x}" if code < 0x80 else chr(code)

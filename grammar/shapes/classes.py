"""The characters of a class, asked of the library: its version of Unicode is not Python's."""

from __future__ import annotations

import functools

import llguidance

from asyncengine.grammar.shapes.nodes import Ranges, union
from asyncengine.grammar.vocabulary import Vocabulary


@functools.cache
def characters(name: str, in_json: bool) -> Ranges:
    r"""The characters of `\d`, `\s` or `\w`; `in_json`: in the pattern of a schema, whose digits and words are
    ASCII, as ECMAScript has them. 60 ms for the first `\w`. Not to be changed."""
    text = f'%json {{"type":"string","pattern":"^\\{name}$"}}' if in_json else f"/{name}/"
    matcher = llguidance.LLMatcher(
        Vocabulary([], [], [], 0).byte_tokenizer, llguidance.LLMatcher.grammar_from_lark(f"start: {text}"), log_level=0
    )
    found: Ranges = []
    if in_json:  # an escape of a control character begins with a backslash: these are the same in both
        matcher.consume_tokens(list(b'"'))
        found = [(low, min(high, 0x1F)) for low, high in characters(name, False) if low < 0x20]
    todo = [b""]
    for said in todo:  # grows while it is walked
        here = matcher.deep_copy()
        here.consume_tokens([*said])
        bits = int.from_bytes(here.compute_bitmask()[:32], "little")
        missing = _length(said[0]) - len(said) if said else 0
        for byte in (byte for byte in range(256) if bits >> byte & 1 and not (in_json and byte == 0x5C)):
            if missing == 1 or (not said and byte < 0x80):
                code = ord((said + bytes([byte])).decode())
                found.append((code, code))
            else:
                todo.append(said + bytes([byte]))
    return union(found)


def _length(first: int) -> int:
    """Bytes of the UTF-8 of a character that begins so."""
    return 1 + (first >= 0xC0) + (first >= 0xE0) + (first >= 0xF0)

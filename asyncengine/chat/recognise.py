"""Compares what a template rendered with what each known format would have written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from asyncengine.chat.formats import NUMBER, ToolFormat

TOKEN = re.compile(r"\{#\}|\s+|(?:(?!\{#\})\S)+")


def recognised(text: str, forms: Iterable[ToolFormat], names: Sequence[str], key: str, value: str) -> ToolFormat | None:
    """The first format in which `text` has calls of `names` (or of the first of them) with one argument, `key`, that
    is `value`; with the blanks that are in `text`."""
    for form in forms:
        for several in (True, False) if len(names) > 1 else (False,):
            found = re.search(_pattern(form, names if several else names[:1], key, value), text)
            if found is not None:
                return _with_blanks(form, found)
    return None


def by_sign(template: str, tokens: Collection[str], forms: Iterable[ToolFormat]) -> ToolFormat | None:
    """The format that a template which renders no calls hints at; the one with most signs. `tokens`: the names of the
    model's special tokens, which are signs too if they look like nothing else ("<tool_call>" is in many vocabularies).
    """
    signed = [
        form
        for form in forms
        if form.signs and all(s in template or (s.startswith("<|") and s in tokens) for s in form.signs)
    ]
    found = max(signed, key=lambda form: len(form.signs), default=None)
    return None if found is None else replace(found, rendered=False)


def _pattern(form: ToolFormat, names: Sequence[str], key: str, value: str) -> str:
    """Blanks between two texts belong to the second, but behind a name, a key or a value to what closes it."""
    out = [_group("trigger", _blanks(form.trigger)), _group("opening", _led(form.opening))]
    again = _blanks(form.trigger) + _led(form.opening) if form.each else ""
    for index, name in enumerate(names):
        if index:
            out += [_group("separator", _led(form.separator)), again]
        out.append(_call(form, name, key, value, named=index == 0))
    return "".join(out) + _group("closing", _led(form.closing))


def _call(form: ToolFormat, name: str, key: str, value: str, named: bool) -> str:
    def part(field: str, pattern: str) -> str:
        return _group(field, pattern) if named else pattern

    own = form.members
    if own is None:
        arguments = rf'\{{\s*"{key}":\s*"{value}"\s*\}}'
    else:
        close = own.string_key_close or own.key_close
        quote = "" if own.values == "raw" else re.escape(own.quote) or "[\"']"
        arguments = part("key_open", _led(own.key_open)) + key + part("key_close", _blanks(close) + r"\s*")
        arguments += quote + value + quote + part("value_close", _led(own.value_close) + r"\s*")
    head = part("name_open", _led(form.name_open)) + name + part("name_close", _blanks(form.name_close) + r"\s*")
    return head + arguments + part("call_close", _led(form.call_close))


@lru_cache(maxsize=512)
def _blanks(text: str) -> str:
    """A pattern for `text` with any blanks in place of its own, and numbers where they are marked."""
    patterns = {NUMBER: r"\d+"}
    return "".join(
        r"\s*" if token.isspace() else patterns.get(token, re.escape(token)) for token in TOKEN.findall(text)
    )


def _led(text: str) -> str:
    return r"\s*" + _blanks(text.lstrip())


def _group(name: str, pattern: str) -> str:
    return f"(?P<{name}>{pattern})"


def _with_blanks(form: ToolFormat, found: re.Match[str]) -> ToolFormat:
    """The format with the texts that were found; its own where they hold a number, or where none was rendered."""
    got = {name: text for name, text in found.groupdict().items() if text is not None}
    call: dict[str, Any] = {
        name: text for name, text in got.items() if hasattr(form, name) and NUMBER not in getattr(form, name)
    }
    if not form.trigger:
        call["opening"] = call["opening"].lstrip()  # what comes before belongs to the turn
    members = form.members
    if members is not None:
        own: dict[str, Any] = {name: got[name] for name in ("key_open", "key_close", "value_close")}
        if members.string_key_close:
            del own["key_close"]
        members = replace(members, **own)
    return replace(form, members=members, **call)

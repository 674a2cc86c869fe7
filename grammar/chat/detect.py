"""Detects how a model writes tool calls and reasoning, by rendering samples with its own template."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from asyncengine.errors import InvalidParameter
from asyncengine.grammar.chat.formats import REASONING_MARKERS, TABLES, TOOL_FORMATS, Reasoning, ToolFormat
from asyncengine.grammar.marks import NUMBER
from asyncengine.text.tokenizer import TextTokenizer

CALL_ID = r"(?:\[CALL_ID\]\w+)?"
TOKEN = re.compile(r"\{#\}|\s+|(?:(?!\{#\})\S)+")


def recognised(text: str, forms: Iterable[ToolFormat], names: Sequence[str], key: str, value: str) -> ToolFormat | None:
    """The first format in which `text` has calls of `names` (or of the first of them) with one argument, `key`, that
    is `value`; with the blanks that are in `text`."""
    for several in (True, False) if len(names) > 1 else (False,):
        for form in forms:
            match = re.search(_pattern(form, names if several else names[:1], key, value), text)
            if match is not None:
                return _with_blanks(form, match)
    return None


def _pattern(form: ToolFormat, names: Sequence[str], key: str, value: str) -> str:
    """Blanks between two texts belong to the second, but behind a name, a key or a value to what closes it. Groups of
    the first call have the names of the format's fields."""
    members = form.members
    if members is None:
        arguments = rf'\{{\s*"{key}":\s*"{value}"\s*\}}'
    else:
        quote = "" if members.values == "raw" else re.escape(members.quote) or "[\"']"
        close = members.string_key_close or members.key_close
        arguments = f"(?P<key_open>{_led(members.key_open)}){key}(?P<key_close>{_blanks(close)}\\s*)"
        arguments += f"{quote}{value}{quote}(?P<value_close>{_led(members.value_close)}\\s*)"
    arguments += r"(?:\s*,[^{}]*)?" if form.is_object else ""
    head, tail = f"(?P<name_open>{_led(form.name_open)})", f"{CALL_ID}(?P<name_close>{_blanks(form.name_close)}\\s*)"
    call_close = f"(?P<call_close>{_led(form.call_close)})"
    first, *others = (f"{head}{name}{tail}{arguments}{call_close}" for name in names)
    reopening = _blanks(form.trigger) + _led(form.opening) if form.each else ""
    further_calls = (
        f"(?P<separator>{_led(form.separator)}){reopening}{re.sub(r'[(][?]P<[a-z_]+>', '(?:', call)}" for call in others
    )
    begin = f"(?P<trigger>{_blanks(form.trigger)})(?P<opening>{_led(form.opening)})"
    return f"{begin}{first}{''.join(further_calls)}(?P<closing>{_led(form.closing)})"


@lru_cache(maxsize=512)
def _blanks(text: str) -> str:
    """A pattern for `text` with any blanks in place of its own, and numbers where they are marked."""
    patterns = {NUMBER: r"\d+"}
    return "".join(
        r"\s*" if token.isspace() else patterns.get(token, re.escape(token)) for token in TOKEN.findall(text)
    )


def _led(text: str) -> str:
    return r"\s*" + _blanks(text.lstrip())


def _with_blanks(form: ToolFormat, match: re.Match[str]) -> ToolFormat:
    """The format with the texts that were found; its own where they hold a number, or where none was rendered."""
    groups = {name: text for name, text in match.groupdict().items() if text is not None}
    call: dict[str, Any] = {
        name: text for name, text in groups.items() if hasattr(form, name) and NUMBER not in getattr(form, name)
    }
    if not form.trigger:
        call["opening"] = call["opening"].lstrip()  # what comes before belongs to the turn
    members = form.members
    if members is not None:
        member_texts: dict[str, Any] = {name: groups[name] for name in ("key_open", "key_close", "value_close")}
        if members.string_key_close:
            del member_texts["key_close"]
        members = replace(members, **member_texts)
    return replace(form, members=members, **call)


QUESTION = "Zquestion9"
ASKED, ANSWERED = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Zanswer9"}
NAMES = ("zprobe_one", "zprobe_two")
ARGUMENTS = '{"zkey": "zvalue"}'
TOOL = json.loads(TABLES["probe"])
HARMONY = ("<|channel|>analysis<|message|>", "functions.")
"""Texts of a template for channels."""
_ANY_JSON = ("hermes", "llama3", "mistral", "mistral-compact", "json", "jamba", "hunyuan_a13b", "xlam")
_SPECIFIC = [form for name, form in TOOL_FORMATS.items() if name not in _ANY_JSON]
"""Formats with a text of their own; the others are read off whatever stands around the JSON."""
PREAMBLE = re.compile(r"(?P<trigger><[^<>\s]+>|\[[A-Z_]+\]|)\s*\[?\s*")
IDS = ("zid00000{index}", "functions.{name}:{index}")
"""Ids of calls: nine letters and digits, which the Mistral templates insist on; Kimi's, which are all it writes."""


def find_tool_format(tokenizer: TextTokenizer) -> ToolFormat | None:
    """The format of calls with the exact texts of the model's template; if that renders none, the format whose signs
    its text or the vocabulary has. None if there are no calls, or in no known format.
    """
    template = template_text(tokenizer)
    if all(mark in template for mark in HARMONY):
        return TOOL_FORMATS["harmony"]
    rendered = False
    for count in (2, 1):
        if (texts := _rendered_call(tokenizer, count)) is None:
            continue
        rendered = True
        rendering, calls_text = texts
        form = recognised(rendering, _SPECIFIC, NAMES[:count], "zkey", "zvalue")
        form = form or _read_json(calls_text, count)
        if form is not None:
            return form
    if rendered or not template or not drops_calls(tokenizer):
        return None
    # names of special tokens are signs too if they look like nothing else ("<tool_call>" is in many vocabularies)
    tokens = tokenizer.get_vocab()
    signed = [
        form
        for form in TOOL_FORMATS.values()
        if form.signs and all(s in template or (s.startswith("<|") and s in tokens) for s in form.signs)
    ]
    best = max(signed, key=lambda form: len(form.signs), default=None)
    return None if best is None else replace(best, rendered=False)


def find_reasoning(tokenizer: TextTokenizer) -> Reasoning | None:
    """The markers of reasoning, and of an answer after it, that the template mentions, or a prompt of its.

    Having them as tokens says nothing: families share one vocabulary among models that reason and models that do not.
    """

    def mentioned(text: str) -> Reasoning | None:
        fitting = (pair for pair in REASONING_MARKERS if all(m in text for m in (pair.end, pair.answer_end, pair.sign)))
        return next(fitting, None)

    reasoning = mentioned(template := template_text(tokenizer))
    if reasoning is None and template:  # there are templates that put the markers together
        reasoning = mentioned(_render(tokenizer, [ASKED], None, prompt=True))
    return reasoning


def chosen_format(tokenizer: TextTokenizer, name: object) -> ToolFormat | None:
    """The format that the setting `tool_format` means for a model. Raises `InvalidParameter`."""
    if name == "none":
        return None
    if name != "auto" and (not isinstance(name, str) or name not in TOOL_FORMATS):
        known = ", ".join(repr(name) for name in ("auto", "none", *TOOL_FORMATS))
        raise InvalidParameter("tool_format", f"must be one of {known}", name)
    if not tokenizer.has_chat_template:
        return None if name == "auto" else TOOL_FORMATS[str(name)]
    detected, drops, generic = find_tool_format(tokenizer), drops_calls(tokenizer), not tokenizer.reads_tools
    if detected is not None and name in ("auto", detected.family):
        return detected  # the template knows the exact blanks
    if name == "auto" and not (generic and drops):
        return None
    return replace(TOOL_FORMATS["hermes" if name == "auto" else str(name)], rendered=not drops, generic=generic)


def chosen_reasoning(tokenizer: TextTokenizer, start: object) -> Reasoning | None:
    """The marks that the setting `reasoning` means for a model. Raises `InvalidParameter`."""
    if start == "none":
        return None
    detected = find_reasoning(tokenizer)
    if start == "auto":
        return detected
    # the template knows whether the answer has marks too
    for pair in (*([detected] if detected else []), *(pair for pair in REASONING_MARKERS if not pair.answer)):
        if start in (pair.start, pair.start.strip("<[>]")):
            return pair
    known = ", ".join(repr(pair.start) for pair in REASONING_MARKERS)
    raise InvalidParameter("reasoning", f"must be 'auto', 'none' or a start marker: {known}", start)


def template_text(tokenizer: TextTokenizer) -> str:
    """The text of the template used for chats with tools; empty without one."""
    with contextlib.suppress(ValueError, AttributeError):
        return tokenizer.template_text([TOOL]) if tokenizer.has_chat_template else ""
    return ""


# ---------------------------------------------------------------- rendering


def _rendered_call(tokenizer: TextTokenizer, count: int) -> tuple[str, str] | None:
    """The rendering of an answer with `count` calls, whole and from where it differs from one with plain text."""
    if not tokenizer.has_chat_template:
        return None
    for ids in IDS:
        calls = [_call(i, ids) for i in range(count)]
        answer = {"role": "assistant", "content": None, "tool_calls": calls}
        results = [
            {"role": "tool", "name": name, "tool_call_id": call["id"], "content": "zresult"}
            for name, call in zip(NAMES, calls, strict=False)
        ]
        for after, tools in itertools.product(([], results), ([TOOL], None)):
            text = _render(tokenizer, [ASKED, answer, *after], tools)
            if not all(name in text for name in NAMES[:count]):
                continue
            plain = _render(tokenizer, [ASKED, ANSWERED], tools)
            whole, other = (rendering[rendering.rfind(QUESTION) + len(QUESTION) :] for rendering in (text, plain))
            pairs = enumerate(zip(whole, other, strict=False))
            return whole, whole[next((i for i, (a, b) in pairs if a != b), min(len(whole), len(other))) :]
    return None


def drops_calls(tokenizer: TextTokenizer) -> bool:
    """Whether the template renders an answer with a call as if there was none, or not at all."""
    with_call = _render(tokenizer, [ASKED, {**ANSWERED, "tool_calls": [_call(0)]}], None)
    return with_call in ("", _render(tokenizer, [ASKED, ANSWERED], None))


def renders_system(tokenizer: TextTokenizer) -> bool:
    """Whether the template renders system messages."""
    return "Zsystem9" in _render(tokenizer, [{"role": "system", "content": "Zsystem9"}, ASKED], None)


def _call(index: int, ids: str = "zid00000{index}") -> dict[str, Any]:
    return {
        "id": ids.format(name=NAMES[index], index=index),
        "type": "function",
        "function": {"name": NAMES[index], "arguments": ARGUMENTS},
    }


def _render(tokenizer: TextTokenizer, messages: list[Any], tools: list[Any] | None, *, prompt: bool = False) -> str:
    try:
        return tokenizer.render_chat(messages, tools, add_generation_prompt=prompt)
    except InvalidParameter as error:
        if error.field == "chat_template":  # stopped: it would be with each of the other chats
            raise
        return ""  # the template does not take such a chat


# ---------------------------------------------------------------- reading


def _read_json(text: str, count: int) -> ToolFormat | None:
    """A JSON object per call, perhaps in a list, perhaps behind a marker; or all of them between two markers."""
    first = re.search(r'\{\s*"name":', text)
    # an answer with and one without calls can have the first character of a marker in common, or a blank
    preamble = PREAMBLE.fullmatch(text[: first.start()].lstrip()) if first is not None else None
    if preamble is None:
        return None
    trigger = preamble["trigger"]
    end = f" </{trigger[1:]}" if trigger.startswith("<") else ""
    for key in ("arguments", "parameters"):
        single = ToolFormat("json", trigger, " ", '{ "name": "', f'", "{key}": ', list_for_several=not trigger)
        repeated = replace(single, separator="\n", each=True)
        forms = [replace(single, opening="[ ", closing=f"]{mark}", list_for_several=False) for mark in (end, "")]
        forms += [replace(repeated, family="hermes", call_close=f"}}{end}")] if end else []
        forms += [repeated] if trigger else []
        forms += [replace(single, separator=between, closing=end) for between in (", ", "; ", "\n")]
        form = recognised(text, forms, NAMES[:count], "zkey", "zvalue")
        if form is None:
            continue
        form = replace(form, closing=form.closing if form.closing.strip() else "")
        form = form if form.each or form.separator else replace(form, separator=", ")
        if trigger == "[TOOL_CALLS]":
            return replace(form, family="mistral")
        if trigger in ("", "<|python_tag|>") and key == "parameters":
            llama = TOOL_FORMATS["llama3"]
            return replace(llama, name_open=form.name_open, name_close=form.name_close, call_close=form.call_close)
        return form
    return None

"""The grammar of one chat answer, in llguidance's variant of Lark. Pure text.

Rules of the library that shape it (1.9), each with a test:

* A lexeme takes the longest match, so free text would run through a trigger. Text up to a trigger is one lazy rule,
  which ends at the first trigger; and alternatives that begin alike must be made of the same lexemes.
* Special tokens never match text, and text never matches them: they are named by id, `<[7]>`.
* A JSON schema is embedded by `%json`, each with references of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from asyncengine.grammar import Grammar
from asyncengine.grammar.chat.formats import Reasoning, ReasoningState, ToolFormat
from asyncengine.grammar.chat.schemas import Tool
from asyncengine.grammar.lark import literal
from asyncengine.grammar.lower import call_schemas, fragment, inline_json
from asyncengine.grammar.marks import Markers, sequence
from asyncengine.grammar.regexes import escaped
from asyncengine.grammar.schema.arguments import Members
from asyncengine.grammar.schemas import moved

ANY = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts that may follow the reasoning. At least one of the three is there."""

    text: bool = False
    """Free text; calls may follow it where the format has them after text."""
    calls: Sequence[Tool] = ()
    final: Grammar | None = None
    """In place of calls."""
    several: bool = True
    """More than one call."""


class AnswerGrammar:
    """The grammar of the whole output. `form` is needed for calls; with text but no calls its trigger is forbidden."""

    def __init__(
        self, answer: Answer, form: ToolFormat | None, markers: Markers, reasoning: Reasoning | None = None,
        state: ReasoningState = "none",
    ) -> None:  # fmt: skip
        self._answer = answer
        self._form = form
        self._markers = markers
        self._reasoning = reasoning if state in ("open", "undecided") else None
        self._after = reasoning or Reasoning("", "")
        self._opens_itself = state == "undecided"
        self._markup: list[str] = []  # rules of the text around calls, written first
        self._lines: list[str] = []

    def write(self) -> str:
        """Its Lark text."""
        answer = self._answer
        options: list[str] = []
        form, final = self._form, answer.final
        objects = form is not None and form.only_whole and form.is_object and answer.calls
        if form is not None and objects and final is not None and final.kind == "json_schema":
            # both begin with a brace: as two lexemes, the lexer would take a call's literal head for either
            options.append("calls_or_final")
            self._lines.append(f"calls_or_final: {self._calls_or_final(form, final)}")
        else:
            if answer.calls:
                self._calls()
                options.append("calls")
            if final is not None:
                begin, end = (self._markers.lark(mark) for mark in (self._after.answer, self._after.answer_end))
                wrapped = sequence(begin and f"({begin})?", fragment(final), end and f"({end})?")
                self._lines.append(f"final: {wrapped}")
                options.append("final")
        if answer.text:
            options = self._text(options)
        start = " | ".join(options)
        if self._reasoning is not None:
            start = f"{self._think(self._reasoning, gap=not answer.text)} ({start})"
        return "\n".join([f"start: {start}", *self._markup, *self._lines]) + "\n"

    def _think(self, reasoning: Reasoning, gap: bool) -> str:
        """The reasoning, up to and with its end marker; `gap` allows newlines after it."""
        begin = self._markers.lark(reasoning.start) + " " if self._opens_itself else ""
        lazy = "[lazy]" if self._markers.is_text(reasoning.end) else ""
        self._markup.append(f"think_rest{lazy}: THOUGHT {self._markers.lark(reasoning.end)}")
        self._markup += [f"think: {begin}think_rest", f"THOUGHT: {ANY}"]
        if gap:
            self._markup.append(r"NEWLINES: /\n{1,3}/")
        whole = "think NEWLINES?" if gap else "think"
        return f"({whole})?" if self._opens_itself else whole

    def _text(self, others: list[str]) -> list[str]:
        """The answer's options with free text, and text before calls, added."""
        form = self._form
        if form is not None and form.generic:
            return [self._marked_text(form), *others]
        pattern = ANY
        if form is not None and form.only_whole and others:
            # what begins like a call must be one
            pattern = r"/[ \t\r\n]{0,8}[^ \t\r\n\[\{](?s:.*)/"
        if form is not None and not form.only_whole:
            pattern += "".join(f" & ~/(?s:.*){escaped(mark)}(?s:.*)/" for mark in form.triggers)
        elif form is not None and form.is_object and others:
            names = "|".join(escaped(tool.name) for tool in self._answer.calls)
            named = rf'"(?:name|function)"[ \t\r\n]*:[ \t\r\n]*"(?:{names})"'
            pattern += f" & ~/(?s:.*){named}(?s:.*)/"  # what would be read as a call
        if self._reasoning is not None and self._opens_itself and self._markers.is_text(self._reasoning.start):
            pattern += rf" & ~/[ \t\r\n]*{escaped(self._reasoning.start)}(?s:.*)/"
        self._markup.append(f"TEXT: {pattern}")
        text = ["TEXT"]
        if self._after.answer and not self._markers.is_text(self._after.answer):
            end = self._markers.lark(self._after.answer_end) or '""'
            text.append(sequence(self._markers.lark(self._after.answer), "TEXT", f"({end})?"))
        if form is None or not others:
            return [*text, *others]
        if form.only_whole:
            return [*text, '""', *others]
        before, special, rest = self._markers.split(form.trigger)
        if not special:
            self._markup.append(f"text_trigger[lazy]: TEXT {self._markers.lark(form.trigger)}")
            return [*text, "text_trigger calls_after_trigger"]
        if before:  # it belongs to the longest text before the special token
            self._markup.append(f"TEXT_HEAD: TEXT {literal(before)}")
            return [*text, sequence("TEXT_HEAD", special, rest, "calls_after_trigger")]
        return [*text, "TEXT calls"]

    def _marked_text(self, form: ToolFormat) -> str:
        """Text that begins with a mark, too: a model that was never trained to call anything hardly ever begins a call
        where it may begin a text, but it does choose well between two marks."""
        marks = [(self._after.answer, self._after.answer_end), self._after.others]
        ends = [end for _, end in marks if end]
        excluded = (f" & ~/(?s:.*){escaped(mark)}(?s:.*)/" for mark in (*ends, form.trigger) if mark)
        self._markup += [f"TEXT: {ANY}{''.join(excluded)}"]
        self._markup += [f"text_end_{i}[lazy]: TEXT {literal(end)}" for i, end in enumerate(ends)]
        return " | ".join(f"{literal(marks[i][0])} (TEXT | text_end_{i})" for i in range(len(ends)))

    def _calls_or_final(self, form: ToolFormat, final: Grammar) -> str:
        """One JSON schema for both, without the trigger. Several calls only where the format lists them."""
        calls = self._answer.calls
        key = re.findall(r'"(\w+)"', form.name_close)[-1]
        one_call, definitions = call_schemas(((tool.name, tool.schema) for tool in calls), key)
        definitions["final"] = moved(json.loads(final.text), "#/$defs/final")
        options = [{"$ref": "#/$defs/final"}, *one_call]
        if form.list_for_several and self._answer.several:
            options.append({"type": "array", "items": {"anyOf": one_call}, "minItems": 1})
        lenient = final.unsupported != "error" or not all(tool.strict for tool in calls)
        schema = {"anyOf": options, "$defs": definitions}
        strict = final.formats == "strict"
        return inline_json(schema, final.whitespace, lenient, strict, key_order=final.key_order)

    def _calls(self) -> None:
        """Rules `calls` and, where there is a trigger, `calls_after_trigger`."""
        form, lark = self._form, self._markers.lark
        assert form is not None
        trigger, opening, separator = lark(form.trigger), lark(form.opening), lark(form.separator)
        again = form.separator + (form.trigger + form.opening if form.each else "")
        more = f"({'again' if not form.is_object else sequence(lark(again), 'call')})*" if self._answer.several else ""
        # a model that writes a newline behind its last call must not have to begin another
        trailing = f"{separator}?" if more and form.each and form.separator.strip() != form.separator else ""
        body = sequence(opening, "call", more, trailing, lark(form.closing))
        if form.list_for_several and self._answer.several:
            body = f'call | "[" {body} "]"'
        if form.optional_trigger:
            trigger = "" if self._markers.is_text(form.trigger) else f"{trigger}?"
        self._lines += [f"calls_after_trigger: {body}", f"calls: {sequence(trigger, 'calls_after_trigger')}"]
        self._lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(self._answer.calls))))
        if more and not form.is_object:
            # one literal with the name: what ends the calls may begin like what separates them
            heads = [lark(f"{again}{form.name_open}{tool.name}{form.name_close}") for tool in self._answer.calls]
            bodies = (f"{head} body_{i}" for i, head in enumerate(heads))
            self._lines.append(f"again: {' | '.join(bodies)}")
        for i, tool in enumerate(self._answer.calls):
            head = lark(f"{form.name_open}{tool.name}{form.name_close}")
            self._lines.append(f"call_{i}: {head} body_{i}")
            self._lines.append(f"body_{i}: {sequence(f'arguments_{i}', lark(form.call_close))}")
            self._lines.append(f"arguments_{i}: {self._arguments(tool, form.members)}")

    def _arguments(self, tool: Tool, members: Members | None) -> str:
        options: dict[str, Any] = {"key_order": "any"}
        if members is not None:
            options = {"members": asdict(members), "marks": self._markers.among(asdict(members).values())}
            if members.values != "raw":
                options |= {"whitespace": "compact", "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
        return inline_json(tool.schema, lenient=not tool.strict, tool=tool.name, **options)

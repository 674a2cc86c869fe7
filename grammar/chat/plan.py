"""The plan of one chat request's output: a grammar to hold it to and a parser to take it apart."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncengine.checks import as_integer
from asyncengine.errors import GrammarError, InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.grammar.chat import detect
from asyncengine.grammar.chat.calls import Parser
from asyncengine.grammar.chat.formats import (
    REASONING_MARKERS,
    RESULT,
    TEXT,
    TOOL_FORMATS,
    Reasoning,
    ReasoningState,
    ToolFormat,
)
from asyncengine.grammar.chat.harmony import MARKS, NEXT, THOUGHTS, ChannelParser, channel_grammar
from asyncengine.grammar.chat.lark import Answer, AnswerGrammar
from asyncengine.grammar.chat.parser import OutputParser
from asyncengine.grammar.chat.schemas import TYPES, close_objects, plain_json, with_json_types
from asyncengine.grammar.chat.tools import Choice, Tool, check_choice, check_tools
from asyncengine.grammar.chat.write import with_calls_in_content, with_results_as_questions, with_tools_in_content
from asyncengine.grammar.marks import Markers
from asyncengine.grammar.schema.arguments import member_types
from asyncengine.grammar.schemas import with_local_references
from asyncengine.grammar.thinking import ThinkingBudget
from asyncengine.sampling_params import SamplingParams
from asyncengine.text.chat_template import Rewrite
from asyncengine.text.tokenizer import TextTokenizer

# From a request's `response_format` to a grammar.

FIELD = "response_format"


def response_grammar(response_format: object) -> Grammar | None:
    """The grammar that an answer must match; None for free text.

    OpenAI's {"type": "text" | "json_object" | "json_schema", ...}, a JSON schema as a dict, a `Grammar`, or a class or
    term that `Grammar.of` takes. Objects of a schema are closed unless its `strict` is False; then, too, what the
    grammar library cannot enforce is left out. Raises `InvalidParameter` naming the part.
    """
    if response_format is None:
        return None
    if isinstance(response_format, Grammar):
        return response_format
    if not isinstance(response_format, Mapping):
        try:
            return Grammar.of(response_format)
        except GrammarError as error:
            if type(error) is not GrammarError or error.field != "grammar":
                raise
            raise GrammarError(FIELD, error.limit, error.value) from None
        except (InvalidParameter, TypeError, ValueError) as error:
            raise InvalidParameter(FIELD, f"cannot be read as a grammar: {error}", response_format) from error
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and "schema" in response_format:  # as llama.cpp and Together write it
        return _schema_grammar(f"{FIELD}.schema", response_format["schema"], strict=True)
    if kind == "json_object":
        return Grammar.json_object()
    if kind == "json_schema":
        return _named_schema(response_format.get("json_schema"))
    if not response_format or (isinstance(kind, str) and kind.lower() not in TYPES):
        shape = "must say its type: 'text', 'json_object' or 'json_schema', or be a JSON schema"
        raise InvalidParameter(FIELD, shape, response_format)
    return _schema_grammar(FIELD, response_format, strict=True)


def _named_schema(given: object) -> Grammar:
    at = f"{FIELD}.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidParameter(at, "must be a dict with name and schema", given)
    if "schema" not in given:
        raise InvalidParameter(f"{at}.schema", "is missing: the JSON schema of the answer")
    strict = given.get("strict")
    if strict not in (None, True, False):
        raise InvalidParameter(f"{at}.strict", "must be a bool", strict)
    grammar = _schema_grammar(f"{at}.schema", given["schema"], strict is not False)
    if given.get("key_order") is None:
        return grammar
    try:
        return replace(grammar, key_order=given["key_order"])
    except GrammarError as error:
        raise InvalidParameter(f"{at}.key_order", error.limit, error.value) from None


def _schema_grammar(field: str, schema: Any, strict: bool) -> Grammar:
    if not isinstance(schema, Mapping):
        raise InvalidParameter(field, "must be a JSON schema, as a dict", schema)
    plain = with_json_types(field, plain_json(field, schema))
    plain = with_local_references(plain, json.dumps(plain))
    text = json.dumps(close_objects(plain) if strict else plain, ensure_ascii=False, separators=(",", ":"))
    return Grammar(kind="json_schema", text=text, unsupported="error" if strict else "ignore")


logger = logging.getLogger("asyncengine")


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """For one request."""

    grammar: Grammar | None
    """The grammar of the whole output, reasoning included. None: nothing to constrain."""
    make_parser: Callable[[], Parser] | None
    """One parser for each sample. None: the output is the content as it stands."""
    skip_special_tokens: bool
    """False where a marker is a special token, which the parser has to see."""
    final: Grammar | None = None
    """The grammar of the content alone, where the content is to match something."""
    thinking: ThinkingBudget | None = None
    """The budget of thoughts, around any grammar. None: there is none, or the prompt has ended the thoughts."""

    def applied(self, params: SamplingParams) -> SamplingParams:
        """`params` with the plan's grammar in place of their own."""
        visible = params.skip_special_tokens and self.skip_special_tokens
        return params.replace(grammar=self.grammar, skip_special_tokens=visible)


class ChatPlanner:
    """Plans chats for one model. Immutable once made; `plan` may be called from any thread.

    `tool_format` is "auto" (what the model's template writes), "none", or a name in `TOOL_FORMATS`; `reasoning` is
    "auto", "none", or a start marker such as "<think>". Making one renders samples: do it off the event loop.
    """

    def __init__(self, tokenizer: TextTokenizer, tool_format: str = "auto", reasoning: str = "auto") -> None:
        table = tokenizer.table
        self._markers = Markers({table.token_text(i): i for i in sorted(table.special_ids)})
        self.tool_format = self._fitted(_chosen_format(tokenizer, tool_format))
        """The format of tool calls; None: the model writes none."""
        self._has_system = detect.renders_system(tokenizer)
        self._reads_tools = tokenizer.has_chat_template and tokenizer.reads_tools
        self._warned = False
        self._in_channels = self.tool_format is not None and self.tool_format.family == "harmony"
        self.reasoning = THOUGHTS if self._in_channels else _chosen_reasoning(tokenizer, reasoning)
        """The markers around reasoning; None if the model does none."""

    @property
    def rewrite(self) -> Rewrite | None:
        """Makes, of checked messages and tools, the messages and tools that the template has to get. None: the same."""
        form = self.tool_format
        return None if form is None or (form.rendered and self._reads_tools) else self._rewritten

    def _rewritten(self, messages: list[Any], tools: list[Any] | None) -> tuple[list[Any], list[Any] | None]:
        form = self.tool_format
        assert form is not None
        if not form.rendered:
            messages = with_calls_in_content(messages, form)
        if self._reads_tools:
            return messages, tools
        if form.generic and not form.rendered:
            messages = with_results_as_questions(messages)
        if tools:
            self._warn_once(form)
            messages = with_tools_in_content(messages, tools, form, self._has_system)
        return messages, None

    def plan(
        self, prompt_tail: str, *, tools: object = None, tool_choice: object = "auto",
        parallel_tool_calls: bool | None = True, response_format: object = None, after_results: bool = False,
        max_thinking_tokens: object = None,
    ) -> ChatPlan:  # fmt: skip
        """The plan for a rendered prompt that ends in `prompt_tail` (its last thousand characters will do).

        Arguments are those of an OpenAI chat; all are checked here. Raises `InvalidParameter` (a `GrammarError` where
        it is a grammar's fault) naming the field.

        Where there are calls their arguments are valid against the tool's schema, whatever the model does. With
        `tool_choice` "none" the announcement of a call is forbidden where the format has one. With tools and a
        `response_format` the answer is calls or the format, with nothing before them. `after_results`: the last message
        has a call's result.
        """
        checked = check_tools(tools)
        choice = check_choice(tool_choice, checked)
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            raise InvalidParameter("parallel_tool_calls", "must be a bool", parallel_tool_calls)
        final = response_grammar(response_format)
        if checked and choice.mode != "none" and self.tool_format is None:
            known = ", ".join(repr(name) for name in TOOL_FORMATS)
            limit = "this model's chat template writes no tool calls known here: set chat_template= to one that does, "
            limit += f"or tool_format= to one of {known}"
            raise InvalidParameter("tools", limit)
        state = detect.reasoning_state(prompt_tail, self.reasoning, tuple(self._markers.special))
        callable_tools, marks = choice.among(checked), self.reasoning
        if checked and self.tool_format is not None and self.tool_format.generic:
            others = RESULT if after_results else ("", "")  # which small models go on with
            marks = replace(marks or Reasoning("", ""), answer=TEXT[0], answer_end=TEXT[1], others=others)
        grammar = self._grammar(checked, callable_tools, choice, parallel_tool_calls is not False, final, marks, state)
        thinking = self._thinking(max_thinking_tokens, state)
        return ChatPlan(grammar, *self._reading(callable_tools, final, marks, state), final, thinking)

    def _thinking(self, most: object, state: ReasoningState) -> ThinkingBudget | None:
        """The budget of the thoughts that an output may have. Raises `InvalidParameter`."""
        if most is None:
            return None
        budget, marks, channels = as_integer("max_thinking_tokens", most, 0), self.reasoning, self._in_channels
        if marks is None:
            limit = "cannot be kept: this model's chat template has no marks around thoughts that are known here"
            raise InvalidParameter("max_thinking_tokens", limit, most)
        closing = marks.end + NEXT * channels
        held = ThinkingBudget(budget, marks.start, marks.end, closing, state == "open", channels)
        return None if state == "closed" else held

    def _grammar(
        self, tools: Sequence[Tool], callable_tools: Sequence[Tool], choice: Choice, several: bool,
        final: Grammar | None, marks: Reasoning | None, state: ReasoningState,
    ) -> Grammar | None:  # fmt: skip
        form = self.tool_format if tools else None
        if choice.mode in ("required", "named"):
            final = None
        if self._in_channels and not tools and final is None:
            return None
        thinks = state in ("open", "undecided")
        if not callable_tools and not self._in_channels:
            if final is not None and not thinks:
                return final
            forbids = form is not None and form.trigger
            if final is None and not forbids:
                return None
        answer = Answer(
            text=final is None and choice.mode in ("none", "auto"), calls=callable_tools, final=final,
            several=several and choice.mode != "named" and not (form is not None and form.single),
        )  # fmt: skip
        if self._in_channels:
            return Grammar(kind="lark", text=channel_grammar(answer, self._markers))
        text = AnswerGrammar(answer, form, self._markers, marks, state).write()
        return Grammar(kind="lark", text=text)

    def _reading(
        self, callable_tools: Sequence[Tool], final: Grammar | None, reasoning: Reasoning | None, state: ReasoningState
    ) -> tuple[Callable[[], Parser] | None, bool]:
        """`make_parser` and `skip_special_tokens`."""
        names = tuple(tool.name for tool in callable_tools)
        if self._in_channels:
            return lambda: ChannelParser(names), all(self._markers.is_text(mark) for mark in MARKS)
        form = self.tool_format if callable_tools else None
        if reasoning is not None and state not in ("open", "undecided") and not reasoning.answer:
            reasoning = None
        if form is None and reasoning is None:
            return None, True
        types = {}
        if form is not None and form.members is not None:
            types = {tool.name: member_types(tool.schema) for tool in callable_tools}

        def make_parser() -> OutputParser:
            return OutputParser(
                form, names, calls_after_text=final is None, reasoning=reasoning, state=state, arguments=types
            )

        marks = (reasoning.start, reasoning.end, reasoning.answer, reasoning.answer_end) if reasoning else ()
        seen = [*(form.texts if form else ()), *marks]
        return make_parser, all(self._markers.is_text(marker) for marker in seen)

    def _warn_once(self, form: ToolFormat) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "this model's chat template reads no tools: they are described in the prompt, and calls are in the "
                "format %s, for which it was perhaps not trained; chat_template= and tool_format= set others",
                form.family,
            )

    def _fitted(self, form: ToolFormat | None) -> ToolFormat | None:
        """Without an optional trigger the tokenizer does not have."""
        if form is not None and form.optional_trigger and self._markers.is_text(form.trigger):
            return replace(form, trigger="", optional_trigger=False)
        return form


def _chosen_format(tokenizer: TextTokenizer, name: object) -> ToolFormat | None:
    if name == "none":
        return None
    if name != "auto" and (not isinstance(name, str) or name not in TOOL_FORMATS):
        known = ", ".join(repr(name) for name in ("auto", "none", *TOOL_FORMATS))
        raise InvalidParameter("tool_format", f"must be one of {known}", name)
    if not tokenizer.has_chat_template:
        return None if name == "auto" else TOOL_FORMATS[str(name)]
    found, drops, generic = detect.find_tool_format(tokenizer), detect.drops_calls(tokenizer), not tokenizer.reads_tools
    if found is not None and name in ("auto", found.family):
        return found  # the template knows the exact blanks
    if name == "auto" and not (generic and drops):
        return None
    return replace(TOOL_FORMATS["hermes" if name == "auto" else str(name)], rendered=not drops, generic=generic)


def _chosen_reasoning(tokenizer: TextTokenizer, start: object) -> Reasoning | None:
    if start == "none":
        return None
    found = detect.find_reasoning(tokenizer)
    if start == "auto":
        return found
    # the template knows whether the answer has marks too
    for pair in (*([found] if found else []), *(pair for pair in REASONING_MARKERS if not pair.answer)):
        if start in (pair.start, pair.start.strip("<[>]")):
            return pair
    known = ", ".join(repr(pair.start) for pair in REASONING_MARKERS)
    raise InvalidParameter("reasoning", f"must be 'auto', 'none' or a start marker: {known}", start)

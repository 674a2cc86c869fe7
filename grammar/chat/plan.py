"""The plan of one chat request's output: the grammar that constrains it and the parser that reads it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from asyncengine.checks import as_integer
from asyncengine.errors import InvalidParameter
from asyncengine.grammar import Grammar
from asyncengine.grammar.chat import detect, formats
from asyncengine.grammar.chat.calls import Parser
from asyncengine.grammar.chat.harmony import MARKS, NEXT, THOUGHTS, ChannelParser, channel_grammar
from asyncengine.grammar.chat.lark import Answer, AnswerGrammar
from asyncengine.grammar.chat.parser import OutputParser
from asyncengine.grammar.chat.schemas import Choice, Tool, check_choice, check_tools, response_grammar
from asyncengine.grammar.marks import Markers
from asyncengine.grammar.schema.arguments import member_types
from asyncengine.grammar.thinking import ThinkingBudget
from asyncengine.sampling_params import SamplingParams
from asyncengine.text.chat_template import Rewrite
from asyncengine.text.tokenizer import TextTokenizer

logger = logging.getLogger("asyncengine")


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The grammar and the parser of one request."""

    grammar: Grammar | None
    """The grammar of the whole output, reasoning included. None: nothing to constrain."""
    make_parser: Callable[[], Parser] | None
    """One parser for each sample. None: the output is the content as it stands."""
    skip_special_tokens: bool
    """False where a marker is a special token, which the parser has to see."""
    final: Grammar | None = None
    """The grammar of the content alone, if the request asks for one."""
    thinking: ThinkingBudget | None = None
    """The budget of thoughts, around any grammar. None: there is none, or the prompt has ended the thoughts."""

    def applied(self, params: SamplingParams) -> SamplingParams:
        """`params` with the plan's grammar in place of their own."""
        skips = params.skip_special_tokens and self.skip_special_tokens
        return params.replace(grammar=self.grammar, skip_special_tokens=skips)


class ChatPlanner:
    """Plans chats for one model. Immutable once made; `plan` may be called from any thread.

    `tool_format` is "auto" (what the model's template writes), "none", or a name in `TOOL_FORMATS`; `reasoning` is
    "auto", "none", or a start marker such as "<think>". Making one renders samples: do it off the event loop.
    """

    def __init__(self, tokenizer: TextTokenizer, tool_format: str = "auto", reasoning: str = "auto") -> None:
        table = tokenizer.table
        self._markers = Markers({table.token_text(i): i for i in sorted(table.special_ids)})
        form = detect.chosen_format(tokenizer, tool_format)
        if form is not None and form.optional_trigger and self._markers.is_text(form.trigger):
            form = replace(form, trigger="", optional_trigger=False)  # the tokenizer does not have it
        self.tool_format = form
        """The format of tool calls; None: the model writes none."""
        self._has_system = detect.renders_system(tokenizer)
        self._reads_tools = tokenizer.has_chat_template and tokenizer.reads_tools
        self._warned = False
        self._in_channels = self.tool_format is not None and self.tool_format.family == "harmony"
        self.reasoning = THOUGHTS if self._in_channels else detect.chosen_reasoning(tokenizer, reasoning)
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
            messages = formats.with_calls_in_content(messages, form)
        if self._reads_tools:
            return messages, tools
        if form.generic and not form.rendered:
            messages = formats.with_results_as_questions(messages)
        if tools and not self._warned:
            self._warned = True
            logger.warning(
                "this model's chat template reads no tools: they are described in the prompt, and calls are in the "
                "format %s, for which it was perhaps not trained; chat_template= and tool_format= set others",
                form.family,
            )
        if tools:
            messages = formats.with_tools_in_content(messages, tools, form, self._has_system)
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
            known = ", ".join(repr(name) for name in formats.TOOL_FORMATS)
            limit = "this model's chat template writes no tool calls known here: set chat_template= to one that does, "
            limit += f"or tool_format= to one of {known}"
            raise InvalidParameter("tools", limit)
        state = formats.reasoning_state(prompt_tail, self.reasoning, tuple(self._markers.special))
        callable_tools, marks = choice.among(checked), self.reasoning
        if checked and self.tool_format is not None and self.tool_format.generic:
            # small models go on with results behind some answers
            others = formats.RESULT if after_results else ("", "")
            begin, end = formats.TEXT
            marks = replace(marks or formats.Reasoning("", ""), answer=begin, answer_end=end, others=others)
        grammar = self._grammar(checked, callable_tools, choice, parallel_tool_calls is not False, final, marks, state)
        thinking = self._thinking(max_thinking_tokens, state)
        return ChatPlan(grammar, *self._reading(callable_tools, final, marks, state), final, thinking)

    def _thinking(self, most: object, state: formats.ReasoningState) -> ThinkingBudget | None:
        """The budget of the thoughts that an output may have. Raises `InvalidParameter`."""
        if most is None:
            return None
        budget, marks, channels = as_integer("max_thinking_tokens", most, 0), self.reasoning, self._in_channels
        if marks is None:
            limit = "cannot be kept: this model's chat template has no marks around thoughts that are known here"
            raise InvalidParameter("max_thinking_tokens", limit, most)
        closing = marks.end + NEXT * channels
        budget_of_thoughts = ThinkingBudget(budget, marks.start, marks.end, closing, state == "open", channels)
        return None if state == "closed" else budget_of_thoughts

    def _grammar(
        self, tools: Sequence[Tool], callable_tools: Sequence[Tool], choice: Choice, several: bool,
        final: Grammar | None, marks: formats.Reasoning | None, state: formats.ReasoningState,
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
        self, callable_tools: Sequence[Tool], final: Grammar | None, reasoning: formats.Reasoning | None,
        state: formats.ReasoningState,
    ) -> tuple[Callable[[], Parser] | None, bool]:  # fmt: skip
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

"""Parses a model's output while it is generated: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from asyncengine.grammar.chat import scan
from asyncengine.grammar.chat.calls import Parser
from asyncengine.grammar.chat.formats import Reasoning, ReasoningState, ToolFormat
from asyncengine.grammar.chat.readers import Types, reader


class OutputParser(Parser):
    """The parser of one output in a family's format of calls. A call cut off in its wrapper comes out as text.

    What `push` returns depends on the whole text only, not on how it was cut into pieces. Text is passed on at once
    but for an end that may become a marker, and blanks that may turn out to stand before a call. Dropped are blanks
    between content and calls, newlines around the reasoning, and everything that wraps a call.

    `tool_format` None: there are no calls. Only calls of the tools in `names` count; text that merely looks like one
    stays text. `calls_after_text` False: calls are looked for at the beginning of the answer only. `arguments` are the
    types of each tool's arguments, which formats need that write strings without quotes.

    Calls inside the reasoning are no calls. Forms that a grammar would not allow are read as well: other marks, members
    of JSON in another order, values in Python's notation.
    """

    def __init__(
        self, tool_format: ToolFormat | None = None, names: Sequence[str] = (), *,
        calls_after_text: bool = True, reasoning: Reasoning | None = None, state: ReasoningState = "none",
        arguments: Mapping[str, Types] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(self._begin_answer, tool_format is not None and tool_format.family == "mistral")
        call_format = tool_format if names else None
        self._form = call_format or ToolFormat("")
        self._names = frozenset(names)
        self._types = arguments or {}
        self._triggers = call_format.triggers if call_format is not None else {}
        is_bare = tool_format is not None and tool_format.only_whole and not tool_format.is_object
        self._whole = tool_format is not None and (is_bare or not calls_after_text)
        self._body = self._answer_start if self._whole and names else self._content
        self._reasoning = reasoning or Reasoning("", "")
        self._answer_end = self._reasoning.answer_end
        self._rest: scan.Balance | None = None  # of the object around a call's arguments
        self._in_list = False
        self._list_end = ""
        self._waits = 0  # arguments stand before the name, which is not in what has been looked at
        self._later = False  # the next call follows another one
        self._named = False  # the call being read has been announced
        self._holding = (
            self._maybe_reasoning, self._maybe_marked, self._answer_start, self._content, self._head,
        )  # fmt: skip
        if reasoning is not None and state == "undecided":
            self._step = self._maybe_reasoning
        elif reasoning is not None and state == "open":
            self._step = self._begin_reasoning

    @property
    def in_reasoning(self) -> bool:
        return self._step in (self._begin_reasoning, self._reason)

    def _end(self, rest: str) -> None:
        if self._step in self._holding and not self._named:
            self._out.text += rest

    # -- reasoning: each step returns whether to look again

    def _maybe_reasoning(self) -> bool:
        """The answer may begin with the start marker."""
        start = self._reasoning.start
        at = scan.skip_blanks(self._buffer, 0)
        if self._buffer.startswith(start, at):
            self._buffer = self._buffer[at + len(start) :]
            self._step = self._begin_reasoning
            return True
        if at == len(self._buffer) or scan.may_begin(self._buffer, at, start):
            return False
        self._step = self._begin_answer
        return True

    def _begin_reasoning(self) -> bool:
        return self._without_newlines(self._reason)

    def _reason(self) -> bool:
        end = self._reasoning.end
        end_at = self._buffer.find(end)
        keep = end_at if end_at >= 0 else len(self._buffer) - scan.partial_suffix(self._buffer, end)
        keep = len(self._buffer[:keep].rstrip("\r\n"))
        self._out.reasoning += self._buffer[:keep]
        self._buffer = self._buffer[keep:]
        if end_at < 0:
            return False
        self._buffer = self._buffer[end_at + len(end) - keep :]
        self._step = self._after_reasoning
        return True

    def _after_reasoning(self) -> bool:
        return self._without_newlines(self._begin_answer)

    def _without_newlines(self, step: Callable[[], bool]) -> bool:
        self._buffer = self._buffer.lstrip("\r\n")
        if self._buffer:
            self._step = step
        return bool(self._buffer)

    # -- content

    def _begin_answer(self) -> bool:
        self._step = self._maybe_marked if self._reasoning.answer else self._body
        return True

    def _maybe_marked(self) -> bool:
        """The answer's text may begin with a mark."""
        at = scan.skip_blanks(self._buffer, 0)
        marks = dict([(self._reasoning.answer, self._answer_end), self._reasoning.others])
        mark_found = next((mark for mark in marks if mark and self._buffer.startswith(mark, at)), None)
        if mark_found is not None:
            self._buffer, self._answer_end = self._buffer[at + len(mark_found) :], marks[mark_found]
        elif at == len(self._buffer) or any(scan.may_begin(self._buffer, at, mark) for mark in marks):
            return False
        self._step = self._body
        return True

    def _answer_start(self) -> bool:
        """Decide whether the answer is calls by its first character that is not blank."""
        at = scan.skip_blanks(self._buffer, 0)
        if at == len(self._buffer):
            return False
        if self._trigger_at(at) or (self._form.only_whole and self._buffer[at] == "["):
            self._step = self._head
        elif self._possible_triggers(at):
            return False
        else:
            self._go_on_with_text()
        return True

    def _go_on_with_text(self) -> None:
        """Go on with content, in which calls may begin unless they are looked for at the beginning only."""
        if self._whole:
            self._triggers = {}
        self._later = self._in_list = False
        self._step = self._content

    def _trigger_at(self, at: int) -> str:
        """The text that announces a call at `at`; empty: none."""
        return max((mark for mark in self._triggers if self._buffer.startswith(mark, at)), key=len, default="")

    def _content(self) -> bool:
        """Text in which calls may begin."""
        mark = self._answer_end
        call_at, end = scan.first_of(self._buffer, self._triggers), self._buffer.find(mark) if mark else -1
        is_end = end >= 0 and not 0 <= call_at < end
        partial = scan.partial_suffix(self._buffer, *self._triggers, mark)
        size = end if is_end else call_at if call_at >= 0 else len(self._buffer) - partial
        # blanks may turn out to stand before a call
        keep = len(self._buffer[:size].rstrip(scan.BLANKS)) if self._triggers else size
        self._out.text += self._buffer[:keep]
        blanks, rest = self._buffer[keep:size], self._buffer[size + len(mark) * is_end :]
        if is_end and self._form.generic:
            blanks = blanks.rstrip("\n")
        self._buffer = blanks + rest
        if call_at >= 0 and not is_end:
            self._step = self._head
        return call_at >= 0 or is_end

    # -- calls

    def _head(self) -> bool:
        """The buffer begins with blanks and a call's trigger, or what separates it from the call before."""
        form = self._form
        if self._waits and "}" not in self._buffer[self._waits :]:
            self._waits = len(self._buffer)
            return False
        head, triggered = self._read_head(form)
        self._waits = len(self._buffer) if head.early else 0
        is_tool = head.name in self._names
        if is_tool and not self._named and (triggered or head.status == "complete"):
            self._named = True
            self._begin_call(head.name, head.written)
        if head.status == "incomplete" and (is_tool or not head.name):
            return False
        if head.status != "complete" or not is_tool:
            # no call: its beginning is content, and the text behind it is parsed again
            self._named, self._waits = False, 0
            at = scan.skip_blanks(self._buffer, 0)
            at += len(self._trigger_at(at)) * (not self._whole)
            self._out.text += self._buffer[:at]
            self._buffer = self._buffer[at:]
            self._go_on_with_text()
            return True
        self._named, self._waits = False, 0
        self._buffer = head.early + self._buffer[head.end :]
        self._reader = reader(form, self._types.get(head.name))
        self._step = self._arguments
        return True

    def _read_head(self, form: ToolFormat) -> tuple[scan.Head, bool]:
        """The call at the beginning of the buffer, and whether a trigger says that it is one."""
        text, at = self._buffer, scan.skip_blanks(self._buffer, 0)
        trigger = self._trigger_at(at)
        triggered = len(trigger) > 1
        if any(longer != trigger and longer.startswith(trigger) for longer in self._possible_triggers(at)):
            return scan.Head("incomplete"), False
        if triggered and not form.name_open.startswith(trigger):
            at = scan.skip_blanks(text, at + len(trigger.removesuffix("[")))
        elif self._later and text[at : at + 1] in (",", ";"):
            at = scan.skip_blanks(text, at + 1)  # a separator
        first = form.each or not self._later
        listed = "]" if form.closing.strip().startswith("]") else ""
        if first and form.is_object:
            listed = "]" if text.startswith("[", at) and not form.each else ""
            at += len(listed)
        elif first:
            begin = scan.follow(text, at, form.opening)
            if begin is None or begin < 0:
                return scan.Head("incomplete" if begin is None else "wrong"), triggered
            at = begin
        if first:
            self._list_end = listed + self._triggers.get(trigger, "")
            self._in_list = bool(self._list_end)
        if form.is_object:
            return scan.json_head(text, at), triggered
        return scan.text_head(text, at, form, min(self._names) if len(self._names) == 1 else ""), triggered

    def _after_arguments(self, done: bool) -> None:
        if done:
            self._rest = None
            self._step = self._wrapper if self._form.is_object else self._end_marker
        else:
            self._go_on_with_text()

    def _wrapper(self) -> bool:
        """The rest of the object around the arguments: a brace, or further members, which are dropped."""
        at = scan.skip_blanks(self._buffer, 0)
        if at == len(self._buffer):
            return False
        if self._rest is None and self._buffer[at] in ",}":
            self._rest = scan.Balance(depth=1)
        end = at if self._rest is None else self._rest.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is not None:
            self._step = self._end_marker
        return end is not None

    def _end_marker(self) -> bool:
        at = scan.skip_blanks(self._buffer, 0)
        for token in scan.TOKEN.findall(self._form.end_marker):
            end = scan.follow(self._buffer, at, token)
            if end is None:
                return False
            at = max(at, end)
        self._buffer = self._buffer[at:]
        self._step = self._between
        return True

    def _between(self) -> bool:
        """After a call: the next one, the end of the list, or text."""
        form = self._form
        at = scan.skip_blanks(self._buffer, 0)
        text = self._buffer
        if at == len(text) or (form.each and not self._trigger_at(at) and self._possible_triggers(at)):
            return False
        ends = scan.follow(text, at, self._list_end) if self._in_list else -1
        if self._again(form, at):
            self._later = True
            self._step = self._head
        elif ends is None or (self._in_list and form.stem and scan.may_begin(text, at, form.stem)):
            return False
        elif ends >= 0:
            self._in_list = False
            at = ends
        else:
            self._go_on_with_text()
        self._buffer = text[at:]
        return True

    def _again(self, form: ToolFormat, at: int) -> bool:
        """Another call begins at `at`, or what separates it from the one before."""
        if form.each:
            return bool(self._trigger_at(at))
        if form.is_object or form.separator.strip():
            return self._buffer[at] in (",;{" if form.is_object else ",;")
        if form.stem or not self._in_list:
            return self._in_list and self._buffer.startswith(form.stem, at)
        return self._buffer[at].isalpha() or self._buffer[at] == "_"

    def _possible_triggers(self, at: int) -> list[str]:
        """The texts that announce a call and stand at `at`, as far as the text goes."""
        return [trigger for trigger in self._triggers if scan.may_begin(self._buffer, at, trigger)]

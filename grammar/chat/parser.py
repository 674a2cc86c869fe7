"""Takes a model's output apart while it is written: reasoning, content, tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncengine.grammar.chat.calls import Parser
from asyncengine.grammar.chat.formats import Reasoning, ReasoningState, ToolFormat
from asyncengine.grammar.chat.readers import JsonReader, Reader, Types, reader
from asyncengine.grammar.chat.scan import (
    BLANKS,
    WRONG,
    Balance,
    Head,
    follow,
    json_head,
    marked_head,
    may_begin,
    partial_suffix,
    skip_blanks,
    text_head,
)


class OutputParser(Parser):
    """The parser of one output in a family's format of calls. A call cut off in its wrapper comes out as text.

    What `push` returns depends on the whole text only, not on how it was cut into pieces. Text is passed on at once
    but for an end that may become a marker, and blanks that may turn out to stand before a call. Dropped are blanks
    between content and calls, newlines around the reasoning, and everything that wraps a call.

    `tool_format` None: there are no calls. Only calls of the tools in `names` count; text that merely looks like one
    stays text. `calls_after_text` False: calls are looked for at the beginning of the answer only. `arguments` are the
    types of each tool's arguments, which formats need that write strings without quotes.

    A call's head ends the reasoning too: models forget to close it, and a call must not be lost in it.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None = None,
        names: Sequence[str] = (),
        *,
        calls_after_text: bool = True,
        reasoning: Reasoning | None = None,
        state: ReasoningState = "none",
        arguments: Mapping[str, Types] | None = None,
    ) -> None:
        super().__init__(self._begin_answer, tool_format is not None and tool_format.family == "mistral")
        self._form = tool_format if names else None
        self._names = frozenset(names)
        self._types = arguments or {}
        self._whole = tool_format is not None and (tool_format.only_whole or not calls_after_text)
        self._reasoning = reasoning or Reasoning("", "")
        self._answer_end = self._reasoning.answer_end
        self._call_head = self._form.head if self._form is not None else ""
        self._reader: Reader = JsonReader()
        self._in_list = False
        self._later = False  # the next call follows another one
        self._named = False  # the call being read has been announced
        self._holding = (
            self._maybe_reasoning, self._maybe_marked, self._answer_start, self._content, self._plain, self._head,
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
        at = skip_blanks(self._buffer, 0)
        if self._buffer.startswith(start, at):
            self._buffer = self._buffer[at + len(start) :]
            self._step = self._begin_reasoning
            return True
        if at == len(self._buffer) or may_begin(self._buffer, at, start):
            return False
        self._step = self._begin_answer
        return True

    def _begin_reasoning(self) -> bool:
        self._buffer = self._buffer.lstrip("\r\n")
        if not self._buffer:
            return False
        self._step = self._reason
        return True

    def _reason(self) -> bool:
        end = self._reasoning.end
        found = self._buffer.find(end)
        call, known = self._call_in_thought(found)
        keep = min(at for at in (call, found, len(self._buffer) - partial_suffix(self._buffer, end)) if at >= 0)
        keep = len(self._buffer[:keep].rstrip("\r\n"))
        self._out.reasoning += self._buffer[:keep]
        self._buffer = self._buffer[keep:]
        if known:
            self._step = self._head
        elif found >= 0:
            self._buffer = self._buffer[found + len(end) - keep :]
            self._step = self._after_reasoning
        return known or found >= 0

    def _call_in_thought(self, end: int) -> tuple[int, bool]:
        """The place (-1: none) where a call begins, or may begin, before the reasoning's `end` (-1: not there yet), and
        whether it does."""
        trigger = self._form.trigger if self._call_head and self._form is not None else ""
        at = self._buffer.find(trigger) if trigger else -1
        while at >= 0 and not 0 <= end < at:
            size = follow(self._buffer, at, self._call_head)
            if size is None or size >= 0:
                return (-1, False) if size is None and end >= 0 else (at, size is not None)
            at = self._buffer.find(trigger, at + 1)
        partial = partial_suffix(self._buffer, trigger) if trigger and end < 0 else 0
        return (len(self._buffer) - partial, False) if partial else (-1, False)

    def _after_reasoning(self) -> bool:
        self._buffer = self._buffer.lstrip("\r\n")
        if not self._buffer:
            return False
        self._step = self._begin_answer
        return True

    # -- content

    def _begin_answer(self) -> bool:
        self._step = self._maybe_marked if self._reasoning.answer else self._unmarked
        return True

    def _maybe_marked(self) -> bool:
        """The answer's text may begin with a mark."""
        at = skip_blanks(self._buffer, 0)
        marks = dict([(self._reasoning.answer, self._answer_end), self._reasoning.others])
        found = next((mark for mark in marks if mark and self._buffer.startswith(mark, at)), None)
        if found is not None:
            self._buffer, self._answer_end = self._buffer[at + len(found) :], marks[found]
        elif at == len(self._buffer) or any(may_begin(self._buffer, at, mark) for mark in marks):
            return False
        self._step = self._unmarked
        return True

    def _unmarked(self) -> bool:
        if self._form is None:
            self._step = self._plain
        else:
            self._step = self._answer_start if self._whole else self._content
        return True

    def _plain(self) -> bool:
        mark = self._answer_end
        found = self._buffer.find(mark) if mark else -1
        keep = found if found >= 0 else len(self._buffer) - (partial_suffix(self._buffer, mark) if mark else 0)
        self._out.text += self._buffer[:keep]
        self._buffer = self._buffer[keep + (len(mark) if found >= 0 else 0) :]
        return found >= 0

    def _answer_start(self) -> bool:
        """The answer is calls or not, as its first character that is no blank tells."""
        assert self._form is not None
        at, trigger = skip_blanks(self._buffer, 0), self._form.trigger
        if at == len(self._buffer):
            return False
        bare = self._form.only_whole and self._buffer[at] in ("{[" if self._form.is_object else "[")
        if bare or (trigger and self._buffer.startswith(trigger, at)):
            self._step = self._head
        elif trigger and may_begin(self._buffer, at, trigger):
            return False
        else:
            self._step = self._plain
        return True

    def _content(self) -> bool:
        """Text in which calls may begin."""
        assert self._form is not None
        trigger, mark = self._form.trigger, self._answer_end
        found = self._buffer.find(trigger)
        ends = self._buffer.find(mark) if mark else -1
        if ends >= 0 and (found < 0 or ends < found):
            last = self._buffer[:ends].rstrip("\n") if self._form.generic else self._buffer[:ends]
            self._buffer = last + self._buffer[ends + len(mark) :]
            return True
        partial = max(partial_suffix(self._buffer, trigger), partial_suffix(self._buffer, mark) if mark else 0)
        keep = found if found >= 0 else len(self._buffer) - partial
        keep = len(self._buffer[:keep].rstrip(BLANKS))
        self._out.text += self._buffer[:keep]
        self._buffer = self._buffer[keep:]
        if found < 0:
            return False
        self._step = self._head
        return True

    # -- calls

    def _head(self) -> bool:
        """The buffer begins with blanks and a call's trigger, or what separates it from the call before."""
        form = self._form
        assert form is not None
        head, triggered = self._read_head(form)
        known = head.name in self._names
        if known and not self._named and (triggered or head.status == "complete"):
            self._named = True
            self._calls.begin(head.name, self._out, self._written_id(form, head))
        if head.status == "incomplete" and (known or not head.name):
            return False
        if head.status != "complete" or not known:
            self._demote(form)
            return True
        self._named = False
        self._buffer = self._buffer[head.end :]
        self._reader = reader(form, self._types.get(head.name))
        self._step = self._arguments
        return True

    def _read_head(self, form: ToolFormat) -> tuple[Head, bool]:
        """The call at the beginning of the buffer, and whether a trigger says that it is one."""
        text, at = self._buffer, skip_blanks(self._buffer, 0)
        triggered = bool(form.trigger) and text.startswith(form.trigger, at)
        if triggered:
            at = skip_blanks(text, at + len(form.trigger))
        elif self._later and text[at : at + 1] in (",", ";"):
            at = skip_blanks(text, at + 1)  # a separator
        if form.family == "mistral" and not form.name_open:
            return marked_head(text, at, form.name_close), triggered
        if not form.is_object:
            return self._read_text_head(form, at), triggered
        if not form.each and not self._later:
            listed = text.startswith("[", at)
            self._in_list = listed or (triggered and form.closing.strip()[:1] not in ("", "]"))
            at += listed
        return json_head(text, at), triggered

    def _written_id(self, form: ToolFormat, head: Head) -> str:
        """The id that the model gave the call, where its format has such: the template wants to have it back."""
        if not head.number:
            return ""
        prefix = form.name_open.rpartition(">")[2]
        return f"{prefix}{head.name}:{head.number}"

    def _read_text_head(self, form: ToolFormat, at: int) -> Head:
        """The head of a call that is no JSON object."""
        text = self._buffer
        if form.each or not self._later:
            begin = follow(text, at, form.opening)
            if begin is None or begin < 0:
                return Head("incomplete") if begin is None else WRONG
            at, self._in_list = begin, bool(form.closing.strip())
        return text_head(text, at, form.name_open, form.name_close, braced=form.members is None)

    def _demote(self, form: ToolFormat) -> None:
        """It was no call: its beginning is text, and what follows is looked at again."""
        self._named = self._later = self._in_list = False
        at = skip_blanks(self._buffer, 0)
        if form.trigger and not self._whole and self._buffer.startswith(form.trigger, at):
            at += len(form.trigger)
        self._out.text += self._buffer[:at]
        self._buffer = self._buffer[at:]
        self._step = self._plain if self._whole else self._content

    def _arguments(self) -> bool:
        if not self._buffer:
            return False
        read = self._reader.feed(self._buffer)
        if read.piece:
            self._calls.extend(read.piece, self._out)
        self._buffer = self._buffer[read.size :]
        if read.state == "open":
            return False
        if read.state == "broken":  # it stays unfinished
            self._later = self._in_list = False
            self._step = self._plain if self._whole else self._content
            return True
        self._calls.close()
        self._balance = Balance(depth=1)
        self._step = self._wrapper if self._form is not None and self._form.is_object else self._end_marker
        return True

    def _wrapper(self) -> bool:
        """The rest of the object around the arguments: a brace, or more members that nobody asks for."""
        self._buffer = self._buffer[skip_blanks(self._buffer, 0) :]
        if not self._buffer:
            return False
        self._step = self._members if self._buffer[0] in ",}" else self._end_marker
        return True

    def _members(self) -> bool:
        end = self._balance.feed(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._step = self._end_marker
        return True

    def _end_marker(self) -> bool:
        assert self._form is not None
        at = skip_blanks(self._buffer, 0)
        end = follow(self._buffer, at, self._form.end_marker)
        if end is None or at == len(self._buffer):
            return False
        self._buffer = self._buffer[max(at, end) :]
        self._step = self._between
        return True

    def _between(self) -> bool:
        """After a call: the next one, the end of the list, or text."""
        form = self._form
        assert form is not None
        at = skip_blanks(self._buffer, 0)
        if at == len(self._buffer) or (form.each and self._is_partial(form.trigger, at)):
            return False
        ends = follow(self._buffer, at, form.list_end) if self._in_list else -1
        if self._again(form, at):
            self._later = True
            self._step = self._head
        elif ends is None or (self._in_list and form.name_open and self._is_partial(form.name_open.split()[0], at)):
            return False
        elif ends >= 0:
            self._in_list = False
            at = ends
        else:
            self._later = False
            self._step = self._plain if self._whole else self._content
        self._buffer = self._buffer[at:]
        return True

    def _again(self, form: ToolFormat, at: int) -> bool:
        """Another call begins at `at`, or what separates it from the one before."""
        if form.each:
            return self._buffer.startswith(form.trigger, at)
        if form.is_object and self._in_list and not form.separator.strip():
            return self._buffer[at] in ",;{"
        if form.is_object or form.separator.strip():
            return self._buffer[at] in ",;"
        if not self._in_list:
            return False
        if form.name_open:
            return self._buffer.startswith(form.name_open.split()[0], at)
        return self._buffer[at].isalpha() or self._buffer[at] == "_"

    def _is_partial(self, trigger: str, at: int) -> bool:
        return may_begin(self._buffer, at, trigger) and not self._buffer.startswith(trigger, at)

"""How families of models write tool calls and reasoning: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Family = Literal["hermes", "llama3", "mistral", "json"]
ReasoningState = Literal["none", "open", "closed", "undecided"]
"""What the model begins with: no such part, inside it, after it, or it may begin one."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The exact text of calls. One call is `name_open` + name + `name_close` + arguments + `call_close`.

    With `each` every call is written `trigger` + `opening` + call, joined by `separator`; else the calls, joined by
    `separator`, stand between one `trigger` + `opening` and one `closing`. Only JSON separates the name from the
    arguments, except where `name_open` is empty: there `name_close` is a marker.
    """

    family: Family
    trigger: str = ""
    """Announces calls; text before it is content. Empty where calls are the whole message."""
    opening: str = ""
    name_open: str = '{"name": "'
    name_close: str = '", "arguments": '
    call_close: str = "}"
    separator: str = ", "
    closing: str = ""
    each: bool = False
    optional_trigger: bool = False
    """Calls are the whole message, with or without the trigger before them."""
    list_for_several: bool = False
    """One call is written bare, several as a JSON list."""

    @property
    def only_whole(self) -> bool:
        """Calls cannot follow text."""
        return not self.trigger or self.optional_trigger

    @property
    def end_marker(self) -> str:
        """What closes a call after its JSON, without whitespace; may be empty."""
        return self.call_close.strip().removeprefix("}").strip()

    @property
    def list_end(self) -> str:
        """What closes a list of calls, without whitespace around it."""
        return self.closing.strip() or "]"

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as special tokens."""
        head = () if self.name_open else (self.name_close,)
        closing = self.closing.strip().removeprefix("]").strip()
        return tuple(marker for marker in (self.trigger, *head, self.end_marker, closing) if marker)


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat("hermes", "<tool_call>", "\n", call_close="}\n</tool_call>", separator="\n", each=True),
        "llama3": ToolFormat(
            "llama3", "<|python_tag|>", name_close='", "parameters": ', separator="; ", optional_trigger=True
        ),
        "mistral": ToolFormat("mistral", "[TOOL_CALLS]", " [", closing="]"),
        "mistral-compact": ToolFormat("mistral", "[TOOL_CALLS]", "[", closing="]"),
        "mistral-args": ToolFormat(
            "mistral", "[TOOL_CALLS]", name_open="", name_close="[ARGS]", call_close="", separator="", each=True
        ),
        "json": ToolFormat("json", list_for_several=True),
    }
)
"""The usual text of each family. What a model's own template writes goes before it: `detect.find_tool_format`."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The markers around what a model thinks before its answer."""

    start: str
    end: str


REASONING_MARKERS = (
    Reasoning("<think>", "</think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<thinking>", "</thinking>"),
    Reasoning("<reasoning>", "</reasoning>"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
    Reasoning("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""Those in use, commonest first."""

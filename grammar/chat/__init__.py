"""Chats around the engine: what the output of one chat request must match, and how it is read back.

A `ChatPlanner` is made once per model; its `plan` is asked once per request.
"""

from asyncengine.grammar.chat.calls import ChatReader, Parsed
from asyncengine.grammar.chat.detect import find_reasoning, find_tool_format
from asyncengine.grammar.chat.formats import TOOL_FORMATS, Reasoning, ToolFormat, reasoning_state
from asyncengine.grammar.chat.parser import OutputParser
from asyncengine.grammar.chat.plan import ChatPlan, ChatPlanner

__all__ = [
    "TOOL_FORMATS",
    "ChatPlan",
    "ChatPlanner",
    "ChatReader",
    "OutputParser",
    "Parsed",
    "Reasoning",
    "ToolFormat",
    "find_reasoning",
    "find_tool_format",
    "reasoning_state",
]

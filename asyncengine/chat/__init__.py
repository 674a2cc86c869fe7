"""Chats around the engine: what the output of one chat request must match, and how it is read back.

A `ChatPlanner` is made once per model; its `plan` is asked once per request.
"""

from asyncengine.chat.calls import ChatReader, Parsed
from asyncengine.chat.detect import find_reasoning, find_tool_format, reasoning_state
from asyncengine.chat.families import TOOL_FORMATS
from asyncengine.chat.formats import Reasoning, ToolFormat
from asyncengine.chat.parser import OutputParser
from asyncengine.chat.plan import ChatPlan, ChatPlanner

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

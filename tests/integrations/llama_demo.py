"""The bundled model behind LlamaIndex, with tools of the kind it was trained to call."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.tools import FunctionTool

from asyncengine.integrations.llama_index import AsyncEngineLLM

SUM = "What is 12 plus 30?"
BOTH = "What is 12 plus 30? And also: What is 7 times 8?"


def demo_llm(**fields: Any) -> AsyncEngineLLM:
    return AsyncEngineLLM(**{"model": "demo", "temperature": 0, "max_tokens": 128, **fields})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return {"Oslo": "4 degrees and rainy", "Lisbon": "27 degrees and sunny"}.get(city, "unknown")


ADD, MULTIPLY, WEATHER = (FunctionTool.from_defaults(function) for function in (add, multiply, get_weather))
TOOLS = [ADD, MULTIPLY, WEATHER]


def called(response: ChatResponse) -> list[tuple[str, Any]]:
    """(name, arguments) of every call, from the blocks."""
    blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
    return [(block.tool_name, block.tool_kwargs) for block in blocks]

"""Tools of the kind the bundled model was trained to call: a LangChain tool, a function and a pydantic class."""

from __future__ import annotations

from langchain_core.tools import tool
from pydantic import BaseModel

from asyncengine.integrations.langchain.tools import openai_tools


@tool
def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return f"rain in {city}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class multiply(BaseModel):  # noqa: N801  # the class's name is the tool's
    """Multiply two numbers."""

    a: int
    b: int


TOOLS = openai_tools([get_weather, add, multiply])

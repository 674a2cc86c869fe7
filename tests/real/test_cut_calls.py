"""An agent on SmolLM2, whose budget ends in the midst of a call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool

from asyncengine.integrations.langchain import ChatAsyncEngine


def cities_asked_for(model: Path, max_tokens: int) -> set[str]:
    """The arguments that an agent ran its tool with, whose model writes so many tokens a message."""
    ran: set[str] = set()

    @tool
    def get_weather(city: str) -> str:
        """Get the current weather for a city."""
        ran.add(city)
        return "-3 degrees and snowing"

    agent: Any = create_agent(ChatAsyncEngine(model=str(model), temperature=0, max_tokens=max_tokens), [get_weather])
    agent.invoke({"messages": [("user", "How is the weather in Llanfairpwllgwyngyll today?")]}, {"recursion_limit": 12})
    return ran


def test_no_budget_runs_a_tool_with_half_an_argument(smollm2: Path) -> None:
    """The tool runs with the city that the model writes where nothing ends its output, or not at all."""
    whole = cities_asked_for(smollm2, 120)
    assert whole
    found = {budget: cities_asked_for(smollm2, budget) for budget in range(4, 40, 4)}
    assert all(cities <= whole for cities in found.values()), (whole, found)

"""A LangChain agent that calls two tools on an in-process model, and an answer that is an object.

python examples/langchain_agent.py        (needs: pip install langchain)
"""

import asyncio
from typing import Any

from langchain.agents import create_agent
from langchain_asyncengine import ChatAsyncEngine
from langchain_core.messages import AIMessage, ToolMessage
from pydantic import BaseModel

WEATHER = {"Oslo": "-3 degrees and snowy", "Lyon": "21 degrees and sunny"}
QUESTIONS = [
    "First: What is the weather in Oslo? Then: What is 12 times 7?",  # one call, its result, then the next
    "What is the weather in Lyon, and what is 6 times 9?",  # both calls in one answer
]
TEXT = "Marta is a baker. Marta is 41 years old. She lives in Lyon."


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return WEATHER.get(city, "Error: no such city")


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Person(BaseModel):
    """Information about a person."""

    name: str
    age: int
    city: str


async def main(model: str = "demo") -> tuple[list[str], Person]:
    chat = ChatAsyncEngine(model=model, temperature=0, max_tokens=80)
    agent: Any = create_agent(chat, [get_weather, multiply])

    # All runs share one engine, and all their calls one batch.
    runs = await agent.abatch([{"messages": [("user", question)]} for question in QUESTIONS])
    for run in runs:
        for message in run["messages"]:
            if isinstance(message, AIMessage) and message.tool_calls:
                print("calls  ", [(call["name"], call["args"]) for call in message.tool_calls])
            elif isinstance(message, ToolMessage):
                print("result ", message.content)
            else:
                print(f"{message.type:7}", message.text)

    # With a response_format the run ends in an object. The grammar makes it one; say in the prompt what you want.
    extractor: Any = create_agent(chat, response_format=Person)
    request = f"Extract name, age and city as JSON.\n\nText: {TEXT}"
    person: Person = (await extractor.ainvoke({"messages": [("user", request)]}))["structured_response"]
    print(repr(person))
    return [run["messages"][-1].text for run in runs], person


if __name__ == "__main__":
    asyncio.run(main())

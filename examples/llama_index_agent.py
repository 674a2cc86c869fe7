"""A LlamaIndex agent with two tools on an in-process model, several runs at once, and one answer as an object.

python examples/llama_index_agent.py
"""

import asyncio

from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.asyncengine import AsyncEngineLLM
from pydantic import BaseModel

WEATHER = {"Oslo": "4 degrees and rainy", "Lisbon": "27 degrees and sunny"}
QUESTIONS = [
    "What is the weather in Oslo, and what is 17 plus 25?",  # two calls in one answer
    "First: What is the weather in Lisbon. Then: Add 31 and 11.",  # one call, its result, then the next
]


def get_weather(city: str) -> str:
    """Get the current weather for a city."""
    return WEATHER.get(city, "Error: unknown city")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Person(BaseModel):
    name: str
    age: int
    city: str


async def ask(agent: FunctionAgent, question: str) -> tuple[str, list[str]]:
    """The answer, and each call with its result."""
    handler = agent.run(user_msg=question)
    calls = [
        f"{event.tool_name}({event.tool_kwargs}) gave {event.tool_output.content!r}"
        async for event in handler.stream_events()
        if isinstance(event, ToolCallResult)
    ]
    return str(await handler), calls


async def main(model: str = "demo") -> tuple[list[str], list[Person]]:
    llm = AsyncEngineLLM(model=model, temperature=0, max_tokens=128)

    # The runs' calls of the model go into one batch, and the tools' description is computed once.
    agent = FunctionAgent(tools=[get_weather, add], llm=llm)
    runs = await asyncio.gather(*(ask(agent, question) for question in QUESTIONS))
    for question, (answer, calls) in zip(QUESTIONS, runs, strict=True):
        print(question, *calls, answer, sep="\n    ")

    # Constrained output: the parts are objects too, with None for what is not written yet.
    prompt = PromptTemplate("Extract the data.\n\n{text}")
    text = "Ada Brandt is 34 years old. She lives in Fenwick."
    parts = [part async for part in await llm.astream_structured_predict(Person, prompt, text=text)]
    for part in parts:
        print(repr(part))
    return [answer for answer, _ in runs], parts


if __name__ == "__main__":
    asyncio.run(main())

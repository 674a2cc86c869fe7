"""A LangGraph graph whose two nodes share one in-process model, run for many inputs at once.

python examples/langgraph_node.py
"""

import asyncio
from typing import TypedDict

from langchain_asyncengine import ChatAsyncEngine
from langgraph.graph import END, START, StateGraph


class State(TypedDict, total=False):
    animal: str
    story: str
    joke: str


async def main(model: str = "demo") -> list[State]:
    chat = ChatAsyncEngine(model=model, temperature=0, max_tokens=120)

    async def tell_story(state: State) -> State:
        answer = await chat.ainvoke(f"Tell me a story about a {state['animal']} named Tim.")
        return {"story": answer.text}

    async def tell_joke(state: State) -> State:
        answer = await chat.ainvoke(f"Tell me a joke about a {state['animal']}.")
        return {"joke": answer.text}

    builder = StateGraph(State)
    builder.add_node("tell_story", tell_story)
    builder.add_node("tell_joke", tell_joke)
    builder.add_edge(START, "tell_story")  # both nodes start at once and run in the same batch
    builder.add_edge(START, "tell_joke")
    builder.add_edge("tell_story", END)
    builder.add_edge("tell_joke", END)
    graph = builder.compile()

    results: list[State] = await graph.abatch([{"animal": animal} for animal in ("cat", "dog", "cow")])
    for result in results:
        print(f"{result['animal']}:\n  {result['story']}\n  {result['joke']}")

    # Tokens of both nodes as they come, each with the node it is from.
    async for part, info in graph.astream({"animal": "fish"}, stream_mode="messages"):
        print(f"{info['langgraph_node']}:{part.text}", end=" ", flush=True)
    print()
    return results


if __name__ == "__main__":
    asyncio.run(main())

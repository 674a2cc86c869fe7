"""A LangGraph conversation that goes on after a restart of its process, without being computed again.

python examples/langgraph_restart.py state   # again and again: each run asks the next question
"""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from langchain_asyncengine import ChatAsyncEngine
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver, PersistentDict
from langgraph.graph import START, MessagesState, StateGraph

from asyncengine import AsyncEngine

RULES = SystemMessage("You are a helpful assistant. " + "Answer in few words. Say nothing that you do not know. " * 12)
QUESTIONS = ("Hello!", "Count to five.", "Tell me a joke about a cow.")


def checkpoints(folder: Path) -> InMemorySaver:
    """LangGraph's saver, whose dictionaries are files once it is closed. (Any saver does: SQLite's, Postgres's.)"""
    names = iter(("storage", "writes", "blobs"))

    def in_a_file(*default: Any) -> Any:
        kept = PersistentDict(*default, filename=str(folder / next(names)))
        with suppress(FileNotFoundError):
            kept.load()
        return kept

    return InMemorySaver(factory=in_a_file)  # type: ignore[arg-type]


async def main(folder: Path) -> tuple[str, int, int]:
    """One turn. Returns the answer, the tokens of the conversation, and those of them that the disk had."""
    async with await AsyncEngine.from_pretrained("demo", kv_cache_dir=folder / "prefixes") as engine:
        chat = ChatAsyncEngine(engine=engine, temperature=0, max_tokens=40)

        async def answer(state: MessagesState) -> dict[str, Any]:
            return {"messages": [await chat.ainvoke([RULES, *state["messages"]])]}

        builder = StateGraph(MessagesState)
        builder.add_node("answer", answer)
        builder.add_edge(START, "answer")
        with checkpoints(folder) as checkpointer:
            graph = builder.compile(checkpointer=checkpointer)
            thread: Any = {"configurable": {"thread_id": "mine"}}
            turns = len((await graph.aget_state(thread)).values.get("messages", ())) // 2
            question = HumanMessage(QUESTIONS[turns % len(QUESTIONS)])
            said = (await graph.ainvoke({"messages": [question]}, thread))["messages"][-1]
        tokens, restored = said.usage_metadata["input_tokens"], engine.stats().restored_tokens
        print(f"{question.content} {said.text}\n  {tokens} tokens of the conversation, {restored} read from the disk")
        return said.text, tokens, restored


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1] if len(sys.argv) > 1 else "state")))  # kv_cache_dir makes the folder

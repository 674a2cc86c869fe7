"""A LangChain chain on an in-process model: many inputs in one batch, and tokens as they come.

python examples/langchain_chain.py
"""

import asyncio

from langchain_asyncengine import ChatAsyncEngine
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

PASSAGE = (
    "The lighthouse of Marrow was built in 1874. Its keeper is Ada Brandt. It is painted green. "
    "The ferry to Tolm leaves at 9:30. A ticket costs 12 crowns."
)
QUESTIONS = [
    "When was the lighthouse of Marrow built?",
    "Who is the keeper of the lighthouse?",
    "What color is the lighthouse?",
    "When does the ferry leave?",
]


async def main(model: str = "demo") -> list[str]:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer from this text:\n\n{passage}"), ("human", "{question}")]
    )
    chain = prompt | ChatAsyncEngine(model=model, temperature=0, max_tokens=40) | StrOutputParser()

    # abatch submits everything at once: the questions share one batch, and the passage is computed once.
    answers = await chain.abatch([{"passage": PASSAGE, "question": question} for question in QUESTIONS])
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}  {answer}")

    async for piece in chain.astream({"passage": PASSAGE, "question": QUESTIONS[0]}):
        print(piece, end="|", flush=True)
    print()
    return answers


if __name__ == "__main__":
    asyncio.run(main())

"""A LangChain chain on an in-process model: many inputs in one batch, and tokens as they come.

python examples/langchain_chain.py
"""

import asyncio

from langchain_asyncengine import ChatAsyncEngine
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate

PASSAGE = (
    "Velmora is a town in Norway. It is led by mayor Ida Lund. Velmora has 8412 inhabitants, lies on the river Asken "
    "and was founded in 1687."
)
QUESTIONS = [
    "When was Velmora founded?",
    "Who is the mayor of Velmora?",
    "How many people live in Velmora?",
    "On which river does Velmora lie?",
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

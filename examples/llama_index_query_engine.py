"""Retrieval with LlamaIndex, all local: documents, an index by the bundled embedder, and several queries at once.

python examples/llama_index_query_engine.py
"""

import asyncio

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.asyncengine import AsyncEngineLLM

from asyncengine.integrations.llama_index import AsyncEngineEmbedding

FACTS = [
    "Velmora is a town in Norway. It is led by mayor Ida Lund. Velmora has 8412 inhabitants.",
    "Lumira Works is run by Tomas Brandt and has its headquarters in Velmora. The company makes lanterns.",
    "The book Nightfall was written by Jonas Dahl. It has 372 pages and came out in 1994.",
    "Mira Olsen is 47 years old and works as a teacher. She plays the cello.",
    "Server polaris listens on port 8443 and runs version 4.17. It is managed by Nadia Frost.",
]
QUESTIONS = [
    "Who is the mayor of Velmora?",
    "Who wrote the book Nightfall?",
    "Which instrument does Mira Olsen play?",
    "On which port does server polaris listen?",
]


async def main(model: str = "demo") -> list[str]:
    index = VectorStoreIndex.from_documents(
        [Document(text=fact) for fact in FACTS],
        embed_model=AsyncEngineEmbedding(model="demo-embed"),
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)],
    )
    llm = AsyncEngineLLM(model=model, temperature=0, max_tokens=40)
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=1)

    # The queries run in one batch and share the computed prefix of the question-answering prompt.
    answers = await asyncio.gather(*(query_engine.aquery(question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}  {answer}   (from: {answer.source_nodes[0].node.get_content()!r})")

    streaming = index.as_query_engine(llm=llm, similarity_top_k=1, streaming=True)
    response = await streaming.aquery(QUESTIONS[0])
    async for token in response.async_response_gen():
        print(token, end="|", flush=True)
    print()
    return [str(answer) for answer in answers]


if __name__ == "__main__":
    asyncio.run(main())

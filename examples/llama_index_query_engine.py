"""Retrieval with LlamaIndex, all local: documents, an index, and several queries at once on an in-process model.

    python examples/llama_index_query_engine.py

The embedding is a bag of hashed words, enough to find a sentence by its words without a download; put a real
embedding model in its place for real documents.
"""

import asyncio
import hashlib
import math
import re

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.node_parser import SentenceSplitter
from llama_index.llms.asyncengine import AsyncEngineLLM

FACTS = [
    "The lighthouse of Marrow was built in 1874. Its keeper is Ada Brandt.",
    "The bridge of Tolm is 312 meters long. It was opened in 1931.",
    "The river Ilse is 88 kilometers long. It flows into the lake of Orvin.",
    "The museum of Fenwick has 40 rooms. Its director is Jonas Pell.",
    "The tower of Quill is 56 meters high. It was built in 1702.",
]
QUESTIONS = [
    "When was the lighthouse of Marrow built?",
    "How long is the bridge of Tolm?",
    "Who is the director of the museum of Fenwick?",
    "How high is the tower of Quill?",
]


class HashedWords(BaseEmbedding):
    """Each word adds one to one of `size` places; the vector is scaled to length one."""

    size: int = 256

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * self.size
        for word in re.findall(r"\w+", text.lower()):
            vector[int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big") % self.size] += 1.0
        length = math.sqrt(sum(value * value for value in vector)) or 1.0
        return [value / length for value in vector]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


async def main(model: str = "demo") -> list[str]:
    index = VectorStoreIndex.from_documents(
        [Document(text=fact) for fact in FACTS],
        embed_model=HashedWords(),
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)],
    )
    llm = AsyncEngineLLM(model=model, temperature=0, max_tokens=40)
    query_engine = index.as_query_engine(llm=llm, similarity_top_k=2)

    # The queries run in one batch and share the computed prefix of the question-answering prompt.
    answers = await asyncio.gather(*(query_engine.aquery(question) for question in QUESTIONS))
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question}  {answer}   (from: {answer.source_nodes[0].node.get_content()!r})")

    streaming = index.as_query_engine(llm=llm, similarity_top_k=2, streaming=True)
    response = await streaming.aquery(QUESTIONS[0])
    async for token in response.async_response_gen():
        print(token, end="|", flush=True)
    print()
    return [str(answer) for answer in answers]


if __name__ == "__main__":
    asyncio.run(main())

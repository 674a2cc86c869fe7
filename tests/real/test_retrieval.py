"""Retrieval over this repository's pages, through LangChain: MiniLM finds, SmolLM2 answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore

from asyncengine.integrations.langchain import AsyncEngineEmbeddings, ChatAsyncEngine

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto"
BEGINNING = 500
"""Characters of a section that are looked up."""
RIGHT_PAGES = {
    "How do I stop an answer in the middle of a stream?": "streaming_and_cancellation.md",
    "Can I run a GGUF file that I have downloaded?": "use_the_models_you_have.md",
    "How do several LoRA adapters run in one batch?": "adapters.md",
    "How do I turn texts into embedding vectors?": "embeddings.md",
    "How do I make the weights smaller, in 8 or 4 bits?": "quantization.md",
    "How do I make the output match a JSON schema?": "structured_output.md",
    "What happens to requests when the queue is full?": "deadlines_and_backpressure.md",
}
FACTS = {
    "Who leads the town of Velmora?": "Ida Lund",
    "How much does the brass lantern cost?": "145",
    "On which port does the server polaris listen?": "8443",
}
PASSAGES = (
    "Velmora is a town in Norway. It is led by mayor Ida Lund.",
    "The brass lantern is made by Lumira Works and costs 145 dollars.",
    "Server polaris listens on port 8443 and is managed by Nadia Frost.",
)


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> AsyncEngineEmbeddings:
    return AsyncEngineEmbeddings(model=str(minilm))


def sections() -> list[Document]:
    """The beginning of every section of every how-to, under the page's title."""
    found = []
    for page in sorted(HOWTO.glob("*.md")):
        title, *parts = page.read_text(encoding="utf-8").split("\n## ")
        heading = title.partition("\n")[0].removeprefix("# ")
        found += [Document(f"{heading}\n{part[:BEGINNING]}", metadata={"page": page.name}) for part in (title, *parts)]
    return found


def test_the_right_page_is_found(embedder: AsyncEngineEmbeddings) -> None:
    """It comes first or second, of some fifty, for each question."""
    store = InMemoryVectorStore.from_documents(sections(), embedder)
    wrong = {}
    for question, right in RIGHT_PAGES.items():
        pages = list(dict.fromkeys(found.metadata["page"] for found in store.similarity_search(question, k=20)))
        if right not in pages[:2]:
            wrong[question] = pages
    assert not wrong


def test_answers_come_from_the_passage_that_was_found(embedder: AsyncEngineEmbeddings, smollm2: Path) -> None:
    """The whole chain at once, for all questions in one batch."""
    store = InMemoryVectorStore.from_texts(list(PASSAGES), embedder)
    prompt = ChatPromptTemplate.from_template("{context}\n\nAnswer in one short sentence: {question}")
    chain = prompt | ChatAsyncEngine(model=str(smollm2), temperature=0, max_tokens=40) | StrOutputParser()
    found = [store.similarity_search(question, k=1)[0].page_content for question in FACTS]
    asked = [{"context": context, "question": question} for context, question in zip(found, FACTS, strict=True)]
    answers = chain.batch(asked)
    assert found == list(PASSAGES)
    assert all(fact in answer for fact, answer in zip(FACTS.values(), answers, strict=True)), answers

"""How a query and a document are put before a text generator that judges them by "yes" or "no"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """What stands around a pair. What is between `frame`'s two halves is cut if it is too long, they are not."""

    frame: tuple[tuple[int, ...], tuple[int, ...]]
    """Token ids before and behind."""

    def pair(self, query: str, document: str, instruction: str | None) -> str:
        """The text between."""
        told = _INSTRUCTION if instruction is None else instruction
        return f"<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}"


def qwen_template(encode: Callable[[str], list[int]]) -> PairTemplate:
    """That of Qwen3-Reranker (Zhang et al. 2025). `encode`: without special tokens of the tokenizer's own."""
    return PairTemplate((tuple(encode(_JUDGE)), tuple(encode(_ANSWER))))

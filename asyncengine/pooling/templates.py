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
    texts: tuple[str, str, str]
    """Before the query, between the two, behind the document."""
    instruction: str | None = None
    """What a pair is judged by where nobody says; it stands before the query. None: none is read."""

    def pair(self, query: str, document: str, instruction: str | None) -> str:
        """What is between `frame`'s two halves."""
        before, between, behind = self.texts
        if self.instruction is not None:
            told = self.instruction if instruction is None else instruction
            before = f"<Instruct>: {told}\n{before}"
        return f"{before}{query}{between}{document}{behind}"


def qwen_template(encode: Callable[[str], list[int]]) -> PairTemplate:
    """That of Qwen3-Reranker (Zhang et al. 2025). `encode`: without special tokens of the tokenizer's own."""
    frame = tuple(encode(_JUDGE)), tuple(encode(_ANSWER))
    return PairTemplate(frame, ("<Query>: ", "\n<Document>: ", ""), _INSTRUCTION)

"""The text around a query and a document, for rerankers that are text generators.

It comes from the model's chat template where that reads messages of the roles "query" and "document", which is what
sentence-transformers and vLLM ask of a reranker's template; else it is the text that Qwen3-Reranker was trained with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.pooling_spec import PoolingSpec
from asyncengine.text.tokenizer import TextTokenizer

_QUERY, _DOCUMENT = _BOTH = ("Zquery9", "Zdocument9")
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The text around a pair. The text between the two halves of `frame` is cut if it is too long, the frame is not."""

    frame: tuple[tuple[int, ...], tuple[int, ...]]
    """Token ids before and behind."""
    texts: tuple[str, str, str]
    """Text before the query, between the two, and behind the document."""
    instruction: str | None = None
    """The default criterion for a pair, which stands before the query. None: the model reads none."""

    def pair(self, query: str, document: str, instruction: str | None) -> str:
        """The text between the two halves of `frame`."""
        before, between, behind = self.texts
        if self.instruction is not None:
            before = f"<Instruct>: {self.instruction if instruction is None else instruction}\n{before}"
        return f"{before}{query}{between}{document}{behind}"


def pair_template(name: str, family: str, spec: PoolingSpec, tokenizer: TextTokenizer | None) -> PairTemplate | None:
    """The template that a model of this name and `model_type` was trained with. None: pairs are put together by its
    tokenizer, since it has no chat template, or a head that was trained on that.

    Raises `UnsupportedModel` for a chat template that is for other things: scores of another text than the model was
    trained with would mean nothing.
    """
    if tokenizer is None or spec.task != "rerank":
        return None
    chat_template = tokenizer.template_text(None) if tokenizer.has_chat_template else ""
    if all(re.search(rf"""["']{role}["']""", chat_template) for role in ("query", "document")):
        return _from_chat_template(tokenizer, name, spec.prompts.get(spec.default_prompt or ""))
    if not spec.scores_tokens:
        return None
    if family.startswith("qwen3"):  # Qwen3-Reranker (Zhang et al. 2025)
        frame = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (_JUDGE, _ANSWER)]
        return PairTemplate((frame[0], frame[1]), ("<Query>: ", "\n<Document>: ", ""), _INSTRUCTION)
    if tokenizer.has_chat_template:
        raise UnsupportedModel(
            f"{name} is no reranker whose prompt is known: its chat template has no roles 'query' and 'document'"
        )
    return None


def _from_chat_template(tokenizer: TextTokenizer, name: str, prompt: str | None) -> PairTemplate:
    """The template that the chat template makes of a pair. `prompt`: a system message before each pair. Raises
    `UnsupportedModel` for a chat template that does anything else to a pair than to put text around it."""
    chat = [{"role": role, "content": text} for role, text in (("query", _QUERY), ("document", _DOCUMENT))]
    if prompt is not None:
        chat.insert(0, {"role": "system", "content": prompt})
    try:
        shown = tokenizer.render_chat(chat, add_generation_prompt=True)
    except InvalidParameter as error:
        raise UnsupportedModel(f"{name}: its chat template takes no query and document: {error}") from None
    before, has_query, rest = shown.partition(_QUERY)
    between, has_document, behind = rest.partition(_DOCUMENT)
    if not has_query or not has_document or any(text in piece for text in _BOTH for piece in (before, between, behind)):
        raise UnsupportedModel(f"{name}: its chat template does not have a query and then a document, once each")
    # Text that may be encoded together with the pair stays beside it: only special tokens always stand alone.
    marks = [mark for token in sorted(tokenizer.table.special_ids) if (mark := tokenizer.table.token_text(token))]
    ends = max((before.rindex(mark) + len(mark) for mark in marks if mark in before), default=0)
    begins = min((behind.index(mark) for mark in marks if mark in behind), default=0)
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (before[:ends], behind[begins:]))
    return PairTemplate((tuple(first), tuple(last)), (before[ends:], between, behind[:begins]))

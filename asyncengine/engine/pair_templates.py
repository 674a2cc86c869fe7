"""Which text is put around a pair, for rerankers that are text generators.

As the model's chat template has it, where that reads messages of the roles "query" and "document": what
sentence-transformers and vLLM ask of a reranker's template. Else as Qwen3-Reranker was trained.
"""

from __future__ import annotations

import re

from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.pooling.spec import PoolingSpec
from asyncengine.pooling.templates import PairTemplate, qwen_template
from asyncengine.text import TextTokenizer

_QUERY, _DOCUMENT = _BOTH = ("Zquery9", "Zdocument9")


def pair_template(name: str, family: str, spec: PoolingSpec, tokenizer: TextTokenizer | None) -> PairTemplate | None:
    """How a model of this name and `model_type` was made to read pairs; None: as its tokenizer puts them, since it has
    no chat template, or a head that was trained on that. Raises `UnsupportedModel` for a template that is for other
    things: scores of another text than the model knows would mean nothing."""
    if tokenizer is None or spec.task != "rerank":
        return None
    if _reads_pairs(tokenizer):
        prompt = None if spec.default_prompt is None else spec.prompts[spec.default_prompt]
        return _own_template(tokenizer, name, prompt)
    if not spec.scores_tokens:
        return None
    if family.startswith("qwen3"):
        return qwen_template(lambda text: tokenizer.encode(text, add_special_tokens=False))
    if tokenizer.has_chat_template:
        raise UnsupportedModel(
            f"{name} is no reranker whose prompt is known: its chat template has no roles 'query' and 'document'"
        )
    return None


def _reads_pairs(tokenizer: TextTokenizer) -> bool:
    """Whether the chat template reads messages of the two roles."""
    text = tokenizer.template_text(None) if tokenizer.has_chat_template else ""
    return all(re.search(rf"""["']{role}["']""", text) for role in ("query", "document"))


def _own_template(tokenizer: TextTokenizer, name: str, prompt: str | None) -> PairTemplate:
    """That of the model's chat template. `prompt`: a system message before each pair. Raises `UnsupportedModel` for one
    that does anything else to a pair than to put text around it."""
    chat = [{"role": role, "content": text} for role, text in (("query", _QUERY), ("document", _DOCUMENT))]
    if prompt is not None:
        chat.insert(0, {"role": "system", "content": prompt})
    try:
        shown = tokenizer.render_chat(chat, add_generation_prompt=True)
    except InvalidParameter as error:
        raise UnsupportedModel(f"{name}: its chat template takes no query and document: {error}") from None
    before, found, rest = shown.partition(_QUERY)
    between, also, behind = rest.partition(_DOCUMENT)
    if not found or not also or any(text in part for text in _BOTH for part in (before, between, behind)):
        raise UnsupportedModel(f"{name}: its chat template does not have a query and then a document, once each")
    # what a text may be encoded together with stays beside it: only special tokens always stand alone
    marks = [mark for each in sorted(tokenizer.table.special_ids) if (mark := tokenizer.table.token_text(each))]
    ends = max((before.rindex(mark) + len(mark) for mark in marks if mark in before), default=0)
    begins = min((behind.index(mark) for mark in marks if mark in behind), default=0)
    first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (before[:ends], behind[begins:]))
    return PairTemplate((tuple(first), tuple(last)), (before[ends:], between, behind[:begins]))

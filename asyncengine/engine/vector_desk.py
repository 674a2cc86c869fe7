"""`embed`, `rerank` and `classify` of one engine: what callers ask for, checked, and what they get of the vectors."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncengine.checks import as_integer, check_unicode
from asyncengine.engine.vector_progress import progress_bar
from asyncengine.engine.vectors import Item, TokenIds, VectorCall, VectorWork
from asyncengine.errors import InvalidParameter
from asyncengine.options import RequestOptions
from asyncengine.outputs import Classification, Classifications, Embeddings, Ranked, Ranking, Usage
from asyncengine.pooling.spec import PoolingSpec
from asyncengine.pooling.templates import PairTemplate
from asyncengine.request_spec import Pooled
from asyncengine.text.batches import BatchTokenizer

if TYPE_CHECKING:
    from asyncengine.engine.frontend import Frontend


@dataclass(frozen=True, slots=True, eq=False)
class VectorModel:
    """What is known of a model that gives vectors or scores."""

    spec: PoolingSpec
    width: int
    """Numbers that the runner gives of a text."""
    template: PairTemplate | None = None
    """How a pair is put before a text generator."""


class VectorDesk:
    """Takes calls for vectors apart, and puts their answers together. From any thread."""

    def __init__(self, core: Frontend, model: VectorModel) -> None:
        self.model = model
        self.spec = spec = model.spec
        self._core = core
        self._width = model.width
        self._template = model.template
        batches = None
        if core.tokenizer is not None:
            frame = None if model.template is None else model.template.frame
            batches = BatchTokenizer(core.tokenizer, core.info.max_model_len, spec.lower_case, frame)
        self.work = VectorWork(core, Pooled(whole=spec.whole, every=spec.every), batches)

    # ---------------------------------------------------------------- embed

    def embedding(
        self, texts: Any, prompt_name: str | None, prompt: str | None, dimensions: int | None,
        normalize: bool | None, truncate: bool, show_progress: bool | None, options: RequestOptions,
    ) -> VectorCall:  # fmt: skip
        """A call for vectors. Raises `InvalidParameter`."""
        self._check_task("embed", ("embed",))
        if dimensions is not None:
            as_integer("dimensions", dimensions, 1, self._width)
        _check_switch("truncate", truncate)
        if normalize is not None:
            _check_switch("normalize", normalize)
        items = self._embeddable(texts)
        asked = prompt_name is not None or prompt is not None
        prefix = self._prompt(prompt_name, prompt)
        if asked and prefix and any(isinstance(item, TokenIds) for item in items):
            index = next(index for index, item in enumerate(items) if isinstance(item, TokenIds))
            raise InvalidParameter(f"texts[{index}]", "is token ids, before which no prompt can be put")
        if prefix:
            items = [prefix + item if isinstance(item, str) else item for item in items]
        call = self.work.new_call(items, "texts", options, self._width)
        if prefix and not self.spec.include_prompt:
            call.skip = self.work.batches.prompt_length(prefix)
        call.truncate = truncate
        wanted = self._core.config.show_progress if show_progress is None else show_progress
        call.progress = progress_bar(len(items)) if wanted and len(items) > 1 else None
        return call

    def embeddings(self, call: VectorCall, dimensions: int | None, normalize: bool | None) -> Embeddings:
        """What has come of it."""
        from asyncengine.pooling.activations import shortened  # numpy: `import asyncengine` stays light

        vectors = shortened(call.vectors, dimensions, self.spec.normalize if normalize is None else normalize)
        return Embeddings(vectors, _usage(call), tuple(call.truncated))

    def _embeddable(self, texts: Any) -> list[Item]:
        if isinstance(texts, str):
            return [texts]
        items: list[Item] = []
        for index, text in enumerate(_listed("texts", texts)):
            items.append(text if isinstance(text, str) else _token_ids(index, text))
        return items

    def _prompt(self, name: str | None, prompt: str | None) -> str:
        if prompt is not None:
            if not isinstance(prompt, str):
                raise InvalidParameter("prompt", "must be a str or None", prompt)
            check_unicode("prompt", prompt)
            if name is not None:
                raise InvalidParameter("prompt", "cannot go with a prompt_name")
            return prompt
        known = self.spec.prompts
        if name is None:
            return known[self.spec.default_prompt] if self.spec.default_prompt is not None else ""
        if not isinstance(name, str) or name not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise InvalidParameter("prompt_name", f"is none of the prompts of {self._core.info.name}: {names}", name)
        return known[name]

    # ---------------------------------------------------------------- rerank

    def ranking(
        self, query: Any, documents: Any, top_n: int | None, instruction: str | None, truncate: bool,
        options: RequestOptions,
    ) -> tuple[VectorCall, list[str]]:  # fmt: skip
        """A call for the scores of documents, and these in a list. Raises `InvalidParameter`."""
        self._check_task("rerank", ("rerank",))
        if not isinstance(query, str):
            raise InvalidParameter("query", "must be a str", query)
        check_unicode("query", query)
        if top_n is not None:
            as_integer("top_n", top_n, 1)
        if instruction is not None and not isinstance(instruction, str):
            raise InvalidParameter("instruction", "must be a str or None", instruction)
        check_unicode("instruction", instruction or "")
        _check_switch("truncate", truncate)
        documents = _texts("documents", documents)
        items: list[Item]
        if instruction is not None and (self._template is None or self._template.instruction is None):
            raise InvalidParameter("instruction", f"is nothing that {self._core.info.name} reads", instruction)
        if self._template is not None:
            items = [self._template.pair(query, document, instruction) for document in documents]
        else:
            query = self._prompt(None, None) + query
            items = [(query, document) for document in documents]
        call = self.work.new_call(items, "documents", options, self._width)
        call.truncate = truncate
        return call, documents

    def ranked(self, call: VectorCall, documents: list[str], top_n: int | None) -> Ranking:
        """What has come of it."""
        from asyncengine.pooling.activations import activate

        scores = activate(self.spec.activation, call.vectors)[:, 0].tolist() if len(call.items) else []
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        results = [Ranked(index, scores[index], documents[index]) for index in order]
        return Ranking(results, _usage(call), tuple(call.truncated))

    # ---------------------------------------------------------------- classify

    def classification(self, texts: Any, truncate: bool, options: RequestOptions) -> VectorCall:
        """A call for labels. Raises `InvalidParameter`."""
        self._check_task("classify", ("classify", "rerank"))
        _check_switch("truncate", truncate)
        items: list[Item] = []
        for index, text in enumerate([texts] if isinstance(texts, str) else _listed("texts", texts)):
            pair = isinstance(text, (tuple, list)) and len(text) == 2 and all(isinstance(part, str) for part in text)
            if not isinstance(text, str) and not pair:
                raise InvalidParameter(f"texts[{index}]", "must be a str or a pair of them", text)
            if self._template is None:
                items.append(text if isinstance(text, str) else (text[0], text[1]))
            elif pair:
                items.append(self._template.pair(text[0], text[1], None))
            else:
                raise InvalidParameter(f"texts[{index}]", "must be a pair of str: a query and a document", text)
        call = self.work.new_call(items, "texts", options, self._width)
        call.truncate = truncate
        return call

    def classified(self, call: VectorCall) -> Classifications:
        """What has come of it."""
        from asyncengine.pooling.activations import activate

        labels, results = self.spec.labels, []
        for row in activate(self.spec.activation, call.vectors).tolist() if len(call.items) else ():
            best = max(range(len(row)), key=lambda index: row[index])
            results.append(Classification(labels[best], row[best], dict(zip(labels, row, strict=True))))
        return Classifications(results, _usage(call), tuple(call.truncated))

    def _check_task(self, asked: str, tasks: tuple[str, ...]) -> None:
        task = self._core.info.task
        if task not in tasks:
            raise wrong_task(self._core.info.name, task, asked)


_SERVES = {
    "generate": "a text generator: it serves generate() and chat()",
    "embed": "an embedding model: it serves embed()",
    "rerank": "a reranker: it serves rerank()",
    "classify": "a classifier: it serves classify()",
}


def wrong_task(name: str, task: str, asked: str) -> InvalidParameter:
    """What to say to a call that this model does not serve."""
    limit = f"is not served: {name} is {_SERVES[task]}"
    if task == "generate" and asked == "embed":
        limit += '. Its files say nothing of pooling; load it with pooling="last" or pooling="mean" to embed with it'
    elif task == "generate":
        limit += f'. Load it with task="{asked}" if it was trained for that'
    return InvalidParameter(asked, limit)


def _usage(call: VectorCall) -> Usage:
    return Usage(call.prompt_tokens, 0, call.cached_tokens)


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter(name, "must be True or False", value)


def _listed(name: str, texts: Any) -> list[Any]:
    if isinstance(texts, (bytes, Mapping)) or not isinstance(texts, Iterable):
        raise InvalidParameter(name, "must be a str or a list of texts", texts)
    return list(texts)


def _texts(name: str, texts: Any) -> list[str]:
    if isinstance(texts, str):
        raise InvalidParameter(name, "must be a list of str, not one str", texts)
    listed = _listed(name, texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise InvalidParameter(f"{name}[{index}]", "must be a str", text)
    return listed


def _token_ids(index: int, ids: Any) -> TokenIds:
    """A text that is given as numbers; whether the model has them is checked later."""
    try:
        if isinstance(ids, (bytes, Mapping)):
            raise TypeError
        return TokenIds(operator.index(each) for each in ids)
    except TypeError:
        raise InvalidParameter(f"texts[{index}]", "must be a str or a sequence of token ids", ids) from None

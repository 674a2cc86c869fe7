"""The wiring of models that give vectors or scores: their `VectorModel`, and what `info` says of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncengine.engine.vectors.pair_templates import pair_template
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.info import ModelInfo
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from asyncengine.execution.api import ModelBuilder


def vector_model(model: ModelBuilder, tokenizer: TextTokenizer | None) -> VectorModel | None:
    """Have the model give vectors or scores, and describe them; None: it writes text. Raises `UnsupportedModel`,
    `ModelNotFound`, and `InvalidParameter` for adapters, which encoders do not take."""
    if model.pooling is None:
        return None
    if model.pooling.whole and (model.config.adapters or model.config.adapter_root is not None):
        raise InvalidParameter("adapters", "are not read for encoders")
    name, template = model.loaded.name, None
    spec, width = model.pool(partial(_yes_and_no, tokenizer, name))
    if not spec.whole and (spec.scores_tokens or not model.pooling.modes):
        template = pair_template(name, model.loaded.hf_config.model_type, spec, tokenizer)
    return VectorModel(spec, width, template)


def _yes_and_no(tokenizer: TextTokenizer | None, name: str) -> tuple[int, int]:
    ids = [] if tokenizer is None else [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if [len(word_ids) for word_ids in ids] != [1, 1]:
        raise UnsupportedModel(f"{name} has no single tokens for yes and no, which its score would be made of")
    return ids[0][0], ids[1][0]


def described(info: ModelInfo, model: VectorModel, tokenizer: TextTokenizer | None) -> ModelInfo:
    """`info` with the model's task, its vectors, and the length at which texts are cut."""
    spec = model.spec
    stated: Any = None if tokenizer is None else tokenizer.hf.model_max_length
    limit = spec.max_length or (stated if isinstance(stated, int) and stated > 0 else info.max_model_len)
    return replace(
        info, task=spec.task, dimensions=model.width if spec.task == "embed" else 0, pooling=spec.in_words(),
        prompts=tuple(spec.prompts), labels=spec.labels if spec.task == "classify" else (),
        max_model_len=min(info.max_model_len, limit),
    )  # fmt: skip

"""The wiring of models that give vectors or scores: their `VectorModel`, and the pooler that their runner needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncengine.config import AdapterSettings, EngineConfig
from asyncengine.engine.vectors.pair_templates import pair_template
from asyncengine.engine.vectors.service import VectorModel
from asyncengine.errors import InvalidParameter, UnsupportedModel
from asyncengine.info import ModelInfo
from asyncengine.pooling_spec import PoolingSpec
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import torch

    from asyncengine.execution.models.formats import CheckpointSource
    from asyncengine.execution.models.loading import LoadedEncoder, LoadedModel
    from asyncengine.execution.pooling.pool import Pooler


def settings_of(spec: PoolingSpec | None, config: EngineConfig) -> EngineConfig:
    """`config` without what concerns written text, for a model (with a `spec`) that writes none."""
    return config if spec is None else config.replace(speculation="off", grammar_backend="none", cuda_graphs=False)


def pooled_decoder(
    loaded: LoadedModel, spec: PoolingSpec, tokenizer: TextTokenizer | None, checkpoint: CheckpointSource
) -> tuple[Pooler, VectorModel]:
    """Make `loaded` give hidden states; its pooler and description. Raises `UnsupportedModel`, `ModelNotFound`."""
    from asyncengine.execution.models.decoder import Decoder, PooledDecoder
    from asyncengine.execution.pooling.pool import Pooler

    if not isinstance(loaded.model, Decoder):
        raise UnsupportedModel(f"{loaded.name} runs through transformers' modules here, which give no vectors")
    template, head = None, None
    if spec.scores_tokens:
        spec = replace(spec, tokens=spec.tokens or _yes_and_no(tokenizer, loaded.name))
    elif not spec.modes:
        spec, head = replace(spec, modes=("lasttoken",)), _head(checkpoint, len(spec.labels))
    if spec.scores_tokens or head is not None:
        template = pair_template(loaded.name, loaded.hf_config.model_type, spec, tokenizer)
    loaded.model = model = PooledDecoder(loaded.model, spec.tokens)
    pooler = Pooler(spec, model.width, head)
    return pooler, VectorModel(spec, pooler.dimensions, template)


def _yes_and_no(tokenizer: TextTokenizer | None, name: str) -> tuple[int, int]:
    ids = [] if tokenizer is None else [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if [len(each) for each in ids] != [1, 1]:
        raise UnsupportedModel(f"{name} has no single tokens for yes and no, which its score would be made of")
    return ids[0][0], ids[1][0]


def _head(checkpoint: CheckpointSource, labels: int) -> torch.Tensor:
    """The head [labels, width] of a classifier made of a text generator, on the last position's hidden state."""
    from torch import Tensor

    name = next((name for name in ("score.weight", "model.score.weight") if name in checkpoint.tensors), None)
    head = None if name is None else checkpoint.read(name)
    if not isinstance(head, Tensor) or head.shape[0] != labels:
        raise UnsupportedModel(f"{checkpoint.folder} has no head for {labels} labels (score.weight)")
    return head


def described(info: ModelInfo, model: VectorModel, tokenizer: TextTokenizer | None) -> ModelInfo:
    """`info` with the model's task, its vectors, and the length at which texts are cut."""
    spec = model.spec
    own: Any = None if tokenizer is None else tokenizer.hf.model_max_length
    limit = spec.max_length or (own if isinstance(own, int) and own > 0 else info.max_model_len)
    return replace(
        info, task=spec.task, dimensions=model.width if spec.task == "embed" else 0, pooling=spec.in_words(),
        prompts=tuple(spec.prompts), labels=spec.labels if spec.task == "classify" else (),
        max_model_len=min(info.max_model_len, limit),
    )  # fmt: skip


def encoder_pooler(loaded: LoadedEncoder, spec: PoolingSpec, config: AdapterSettings) -> tuple[Pooler, VectorModel]:
    """The pooler (of a head's scores, where that pools) and description of an encoder. Raises `UnsupportedModel`,
    `ModelNotFound`, and `InvalidParameter` for adapters, which encoders do not take."""
    from asyncengine.execution.pooling.pool import Pooler

    if config.adapters or config.adapter_root is not None:
        raise InvalidParameter("adapters", "are not read for encoders")
    if spec.scores_tokens:
        raise UnsupportedModel(f"{loaded.name} is an encoder without a classification head: it gives no scores")
    if not spec.modes:
        labels = loaded.model.num_labels
        if labels != len(spec.labels):
            raise UnsupportedModel(f"{loaded.name} has a head of {labels} labels, and names {len(spec.labels)}")
        return Pooler(replace(spec, modes=("lasttoken",)), labels), VectorModel(spec, labels)
    pooler = Pooler(spec, loaded.model.hidden_size)
    return pooler, VectorModel(spec, pooler.dimensions)

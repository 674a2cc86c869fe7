"""The purpose that a model is loaded for: to write text, or to give vectors or scores."""

from __future__ import annotations

from asyncengine.config import ModelSettings
from asyncengine.models.families.encoders import is_encoder_config
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.kinds import check_architectures, check_files
from asyncengine.pooling.spec import PoolingSpec, read_pooling, root_folder


def pooling_of(checkpoint: CheckpointSource, config: ModelSettings) -> PoolingSpec | None:
    """The pooling that the model's files and the configuration ask for; None: it writes text. Raises as `read_pooling`,
    and `UnsupportedModel` for what is neither a text generator nor asked for vectors."""
    if checkpoint.metadata and config.task == "auto" and config.pooling is None:
        return None  # a GGUF file; what it says of pooling is not read
    found = read_pooling(
        root_folder(checkpoint.folder), checkpoint.config, config.task, config.pooling,
        encoder=is_encoder_config(checkpoint.config),
    )  # fmt: skip
    if found is None:
        check_files(checkpoint.folder)
        check_architectures(checkpoint.folder, checkpoint.config)
    return found


def is_headless(pooling: PoolingSpec | None) -> bool:
    """Whether hidden states are wanted of a text generator, and no logits."""
    return pooling is not None and not pooling.scores_tokens

"""The purpose that a model is loaded for: to write text, or to give vectors or scores, which a `PooledDecoder` does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncengine.config import ModelSettings
from asyncengine.execution.layers.places import Place
from asyncengine.execution.layers.step import CausalLM, StepContext
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families.encoders import is_encoder_config
from asyncengine.execution.models.formats import CheckpointSource
from asyncengine.execution.models.refusals import check_architectures, check_files
from asyncengine.pooling_spec import PoolingSpec, read_pooling, root_folder


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


class PooledDecoder(CausalLM):
    """A decoder whose `forward` gives, of the wanted rows, what is pooled: hidden states [N, width], or, of a model
    whose score is a logit, [N, 1]: that of the first of `tokens`, less that of the second if there is one."""

    def __init__(self, decoder: Decoder, tokens: Sequence[int] = ()) -> None:
        self.decoder, self.specs, self.states = decoder, decoder.specs, decoder.states
        self.input_vocab_size, self.vocab_size = decoder.input_vocab_size, decoder.vocab_size
        self.dtype, self.device = decoder.dtype, decoder.device
        self.width = 1 if tokens else decoder.config.embedding_width or decoder.config.width
        self._tokens = list(tokens)

    @property
    def unsteady(self) -> str | None:
        return self.decoder.unsteady

    @property
    def compiled(self) -> bool:
        return self.decoder.compiled

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """[N, width] of `rows` (int64 [N], ascending) of ids [T]; there may be none."""
        if not self._tokens:
            return self.decoder.hidden_states(ids, step, None if len(rows) == len(ids) else rows)
        logits = self.decoder.forward(ids, step, rows)[:, self._tokens].float()
        return logits[:, :1] - logits[:, 1:] if len(self._tokens) == 2 else logits

    def places(self) -> list[Place]:
        return self.decoder.places()

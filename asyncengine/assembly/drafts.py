"""Loading the draft model beside the model it guesses for."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from asyncengine.config import EngineConfig
from asyncengine.demo import resolve_draft
from asyncengine.errors import InvalidParameter, ModelNotFound, OutOfMemory, UnsupportedModel
from asyncengine.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    import torch

    from asyncengine.execution.models.formats import CheckpointSource
    from asyncengine.execution.models.loading import LoadedModel
    from asyncengine.execution.models.progress import LoadProgress


logger = logging.getLogger("asyncengine")

_UNUSED = "draft_model=%r is not used, and answers are the same without: %s"


def open_draft(config: EngineConfig, device: torch.device) -> CheckpointSource | None:
    """Find the draft model's files, before anything large is loaded. None: none is asked for.

    Raises `InvalidParameter` where none is to run, `ModelNotFound`. Where just this machine has no use for one, that is
    logged: guesses change no answer, and a program that asks for them has to start anywhere.
    """
    if config.draft_model is None:
        return None
    from asyncengine.execution.models.checkpoint import open_checkpoint

    if device.type != "cpu" and config.device == "auto":
        logger.warning(_UNUSED, config.draft_model, "it runs on a CPU only")
        return None
    if device.type != "cpu":
        raise InvalidParameter("draft_model", f"runs on a CPU only, not on {device}", config.draft_model)
    if config.attention_backend == "torch":
        raise InvalidParameter(
            "draft_model", 'nothing can be guessed with attention_backend="torch"', config.draft_model
        )
    try:
        path = resolve_draft(config.draft_model)
        return open_checkpoint(path, config.replace(images="off", mmproj=None), drafts=True)
    except (ModelNotFound, UnsupportedModel) as error:
        raise type(error)(f"draft_model: {error}") from error


def load_draft(
    checkpoint: CheckpointSource | None, config: EngineConfig, target: LoadedModel, tokenizer: TextTokenizer | None,
    progress: LoadProgress,
) -> LoadedModel | None:  # fmt: skip
    """The draft model, in the type of the `target` and on its device. None: `open_draft` found none, or a head of the
    target's, which was loaded with it; or its numbers depend on what is computed together, so that nothing can be
    guessed.

    Raises `InvalidParameter` if it has another vocabulary or cannot guess, `OutOfMemory`, `ModelNotFound`,
    `UnsupportedModel`.
    """
    from asyncengine.execution.models.loading import load_model

    if checkpoint is None or config.draft_model is None:
        return None
    if target.head is not None:
        if (reason := target.no_mtp or target.unsteady) is not None:
            logger.warning(_UNUSED, config.draft_model, reason)
        return None
    path, dtype = resolve_draft(config.draft_model), str(target.dtype).removeprefix("torch.")
    try:
        found = load_model(path, config.replace(dtype=dtype, max_model_len=None), progress, checkpoint)
        if not checkpoint.metadata:
            _check_words(path, checkpoint, tokenizer, config)
    except (ModelNotFound, OutOfMemory, UnsupportedModel) as error:
        raise type(error)(f"draft_model: {error}") from error
    if (found.vocab_size, found.input_vocab_size) != (target.vocab_size, target.input_vocab_size):
        limit = f"has {found.vocab_size} tokens where the model has {target.vocab_size}"
        raise InvalidParameter("draft_model", limit, config.draft_model)
    if found.states:
        reason = "keeps recurrent states, which cannot be taken back when a guess is wrong"
        raise InvalidParameter("draft_model", reason, config.draft_model)
    if target.unsteady is not None:
        logger.warning(_UNUSED, config.draft_model, target.unsteady)
        return None
    return found


def _check_words(
    path: str, checkpoint: CheckpointSource, tokenizer: TextTokenizer | None, config: EngineConfig
) -> None:
    """A token must mean the same to both. A folder without a tokenizer is taken to have the model's."""
    from asyncengine.text.tokenizer import load_tokenizer

    own = load_tokenizer(path, config, beside=checkpoint.folder)
    if own is None or tokenizer is None:
        return
    one, other = tokenizer.table, own.table
    for token in range(min(one.size, other.size)):
        ours, its = one.token_bytes(token), other.token_bytes(token)
        if ours != its:
            limit = f"has another vocabulary: token {token} is {its!r}, not {ours!r}"
            raise InvalidParameter("draft_model", limit, config.draft_model)

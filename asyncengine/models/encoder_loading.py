"""Loading an encoder: config.json to `EncoderConfig`, and its weights by name through the door of all models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from asyncengine.config import EngineConfig
from asyncengine.device.memory import bound_kernel_caches
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.models.checkpoint import open_checkpoint
from asyncengine.models.encoder import Encoder
from asyncengine.models.encoder_names import by_stored_name
from asyncengine.models.families.encoders import spelling_of
from asyncengine.models.first_kernels import encoder_kernels_of
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.hub import short_name
from asyncengine.models.loaded import Loaded
from asyncengine.models.loading import fill, layer_options, stored_kinds
from asyncengine.models.memory.needs import outline_encoder
from asyncengine.models.progress import LoadProgress
from asyncengine.models.reading import ModelPlan, read_encoder, typed


@dataclass(slots=True, kw_only=True)
class LoadedEncoder(Loaded):
    """An encoder, which gives hidden states or scores."""

    model: Encoder


def load_encoder(
    path_or_id: str,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None,
    ahead: CompileAhead | None = None,
    threads: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> LoadedEncoder:
    """Load a folder or hub id, of which `checkpoint` was opened already (None: not yet). `ahead` begins to compile the
    kernels that the model needs (None: they are compiled when they are called). `threads()`: weights are prepared
    within, once the names of kernels are known.

    Raises `ModelNotFound` (no such model, or files missing or broken), `UnsupportedModel` (a family or option that
    cannot run here), `OutOfMemory` (weights larger than what is free), `InvalidParameter` (max_model_len, device).
    """
    with progress or LoadProgress(config.show_progress) as bar:
        bar.stage("looking for the model")
        checkpoint = checkpoint or open_checkpoint(path_or_id, config, writes=False)
        plan = read_encoder(checkpoint, config)
        if plan.device.type == "cpu":
            bound_kernel_caches()
        with typed(checkpoint.folder):
            model = _load(plan, config, bar, ahead, threads)
    return LoadedEncoder(
        name=short_name(path_or_id),
        folder=checkpoint.folder,
        model=model,
        hf_config=plan.hf_config,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        dtype=plan.dtype,
        device=plan.device,
        weights_bytes=model.nbytes,
        fused=model.describe(),
        stored=stored_kinds(checkpoint),
    )


def _load(
    plan: ModelPlan, config: EngineConfig, bar: LoadProgress, ahead: CompileAhead | None,
    threads: Callable[[], AbstractContextManager[object]],
) -> Encoder:  # fmt: skip
    """The encoder with its weights. Names, shapes and memory are looked at before any memory is taken."""
    outline, weights = outline_encoder(plan, config)
    options = layer_options(plan, weights, config)
    model = Encoder(outline.config, options)
    if ahead is not None and config.attention_backend != "torch":
        ahead.start(encoder_kernels_of(model))
    with threads():
        slots = by_stored_name(model.slots(), plan.checkpoint.tensors, spelling_of(plan.hf_config.model_type))
        fill(slots, plan, weights, options, config, bar)
    return model

"""Loading an encoder: config.json to `EncoderConfig`, and its weights by name through the door of all models."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.device.memory import bound_kernel_caches
from asyncengine.errors import InvalidParameter
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.layers.kernels import TorchKernels, layer_kernels
from asyncengine.layers.options import LayerOptions
from asyncengine.models.checking import load_config
from asyncengine.models.checkpoint import open_checkpoint
from asyncengine.models.encoder import Encoder, EncoderConfig
from asyncengine.models.encoder_names import by_stored_name
from asyncengine.models.families.encoders import encoder_config_of, spelling_of
from asyncengine.models.first_kernels import encoder_kernels_of
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.hub import short_name
from asyncengine.models.loaded import Loaded
from asyncengine.models.loading import (
    check_memory,
    find_room,
    quantization_bits,
    resolve_device,
    resolve_dtype,
    stored_kinds,
    typed,
)
from asyncengine.models.outline import Weights, weights_of
from asyncengine.models.progress import LoadProgress
from asyncengine.models.weights import fill_randomly, load_weights

_CLASSIFIER = "ForSequenceClassification"


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
        with typed(checkpoint.folder):
            hf_config, described = read_encoder_config(checkpoint, config)
        device = resolve_device(config.device)
        dtype = resolve_dtype(config, hf_config, checkpoint, device)
        bits = quantization_bits(config, dtype, device)
        if device.type == "cpu":
            bound_kernel_caches()
        with typed(checkpoint.folder):
            model = _load(described, hf_config.model_type, checkpoint, config, dtype, device, bits, bar, ahead, threads)
    return LoadedEncoder(
        name=short_name(path_or_id),
        folder=checkpoint.folder,
        model=model,
        hf_config=hf_config,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        dtype=dtype,
        device=device,
        weights_bytes=model.nbytes,
        fused=model.describe(),
        stored=stored_kinds(checkpoint),
    )


def read_encoder_config(checkpoint: CheckpointSource, config: EngineConfig) -> tuple[Any, EncoderConfig]:
    """(the configuration, what the encoder is built of). Raises as `load_encoder`."""
    hf_config = load_config(checkpoint, config)
    named = checkpoint.config.get("architectures") or ()
    classifies = any(isinstance(name, str) and name.endswith(_CLASSIFIER) for name in named)
    described = encoder_config_of(hf_config, None, classifies)
    if config.max_model_len is not None:
        if config.max_model_len > described.max_model_len:
            limit = f"must not exceed the model's own {described.max_model_len}"
            raise InvalidParameter("max_model_len", limit, config.max_model_len)
        described = encoder_config_of(hf_config, config.max_model_len, classifies)
    return hf_config, described


class EncoderOutline(NamedTuple):
    """What is known of an encoder and its checkpoint before any memory is taken."""

    weights: Weights
    embeddings: int
    """Of the elements, those of tables, which are never quantized."""


def outline_of_encoder(
    described: EncoderConfig, family: str, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None,
) -> EncoderOutline:  # fmt: skip
    """Names and shapes are looked at. Raises `ModelNotFound` for those that are not as they should be."""
    outline = Encoder(described, LayerOptions(dtype, torch.device("meta"), TorchKernels()))
    slots = by_stored_name(outline.slots(), checkpoint.tensors, spelling_of(family))
    weights = weights_of(checkpoint, slots, described.stack.ignored, config, dtype, device, bits)
    tables = [table for table in (outline.embedding, outline.positions, outline.segments) if table is not None]
    embeddings = sum(math.prod(slot.shape) for table in tables for _, slot in table.slots())
    return EncoderOutline(weights, embeddings)


def _load(
    described: EncoderConfig, family: str, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None, bar: LoadProgress, ahead: CompileAhead | None,
    threads: Callable[[], AbstractContextManager[object]],
) -> Encoder:  # fmt: skip
    """The encoder with its weights. Names, shapes and memory are looked at before any memory is taken."""
    weights = outline_of_encoder(described, family, checkpoint, config, dtype, device, bits).weights
    check_memory(sum(weights.elements.values()), dtype, device, bits, weights.kept_bytes)
    kernels = layer_kernels(config.attention_backend, dtype, device)
    options = LayerOptions(dtype, device, kernels, bits, checkpoint.release, forms=weights.forms)
    model = Encoder(described, options)
    if ahead is not None and config.attention_backend != "torch":
        ahead.start(encoder_kernels_of(model))
    with threads():
        find_room(options, config, bar)
        if config.load_format == "dummy":
            bar.stage("making up weights")
            fill_randomly(model.slots(), dtype, device)
        else:
            slots = by_stored_name(model.slots(), checkpoint.tensors, spelling_of(family))
            load_weights(checkpoint, slots, weights.names, bar)
    return model

"""Loading an encoder: config.json to `EncoderConfig`, and its weights by name through the door of all models."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.device.memory import bound_kernel_caches
from asyncengine.errors import InvalidParameter
from asyncengine.kernels.compile_ahead import CompileAhead
from asyncengine.layers.kernels import TorchKernels, layer_kernels
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.stored import StoredForm, bytes_of
from asyncengine.models.checking import load_config
from asyncengine.models.checkpoint import open_checkpoint
from asyncengine.models.encoder import Encoder, EncoderConfig
from asyncengine.models.encoder_names import by_stored_name
from asyncengine.models.families.encoders import encoder_config_of, is_encoder_config, spelling_of
from asyncengine.models.first_kernels import encoder_kernels_of
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.loading import (
    check_memory,
    quantization_bits,
    resolve_device,
    resolve_dtype,
    stored_kinds,
    typed,
)
from asyncengine.models.outline import kept_forms
from asyncengine.models.progress import LoadProgress
from asyncengine.models.weights import assign, fill_randomly, load_weights, stored_forms

_CLASSIFIER = "ForSequenceClassification"


@dataclass(slots=True)
class LoadedEncoder:
    """An encoder ready to run."""

    name: str
    folder: Path
    model: Encoder
    hf_config: Any
    vocab_size: int
    """Token ids are below it."""
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    weights_bytes: int
    fused: list[str] = field(default_factory=list)
    """How it runs, e.g. "encoder x 1", "packed x 24"."""
    stored: dict[str, str] = field(default_factory=dict)
    """What quantized matrices are stored as, by name."""


def is_encoder(hf_config: Any) -> bool:
    """Whether a configuration (transformers' object, or config.json as a mapping) is that of a model whose tokens see
    those after them; also of one that `load_encoder` refuses by name."""
    return is_encoder_config(hf_config)


def load_encoder(
    path_or_id: str,
    config: EngineConfig,
    progress: LoadProgress | None = None,
    checkpoint: CheckpointSource | None = None,
    ahead: CompileAhead | None = None,
) -> LoadedEncoder:
    """Load a folder or hub id, of which `checkpoint` was opened already (None: not yet). `ahead` begins to compile the
    kernels that the model needs (None: they are compiled when they are called).

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
            model = _load(described, hf_config.model_type, checkpoint, config, dtype, device, bits, bar, ahead)
    return LoadedEncoder(
        name=path_or_id.rstrip("/").rsplit("/", 1)[-1],
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
    """What an encoder's weights take, before any memory is taken."""

    names: dict[str, str]
    """The slot of each of the checkpoint's tensors."""
    forms: dict[str, StoredForm]
    """How matrices that stay as they are stored are stored, by path."""
    elements: dict[str, int]
    """Of all others, by path."""
    kept_bytes: int
    """Of the first."""
    embeddings: int
    """Of `elements`, those of tables, which are never quantized."""


def outline_of_encoder(
    described: EncoderConfig, family: str, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None,
) -> EncoderOutline:  # fmt: skip
    """Names and shapes are looked at. Raises `ModelNotFound` for those that are not as they should be."""
    outline = Encoder(described, LayerOptions(dtype, torch.device("meta"), TorchKernels()))
    slots = by_stored_name(outline.slots(), checkpoint.tensors, spelling_of(family))
    names = {} if config.load_format == "dummy" else assign(checkpoint, slots, described.stack.ignored)
    forms = kept_forms(stored_forms(checkpoint, names), dtype, device, bits)
    elements = {name.removesuffix(".weight"): math.prod(slot.shape) for name, slot in slots.items()}
    kept = sum(bytes_of(each.numbers, elements.pop(path)) for path, each in forms.items())
    tables = [table for table in (outline.embedding, outline.positions, outline.segments) if table is not None]
    embeddings = sum(math.prod(slot.shape) for table in tables for _, slot in table.slots())
    return EncoderOutline(names, forms, elements, kept, embeddings)


def _load(
    described: EncoderConfig, family: str, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None, bar: LoadProgress, ahead: CompileAhead | None,
) -> Encoder:  # fmt: skip
    """The encoder with its weights. Names, shapes and memory are looked at before any memory is taken."""
    outline = outline_of_encoder(described, family, checkpoint, config, dtype, device, bits)
    check_memory(sum(outline.elements.values()), dtype, device, bits, outline.kept_bytes)
    kernels = layer_kernels(config.attention_backend, dtype, device)
    model = Encoder(described, LayerOptions(dtype, device, kernels, bits, checkpoint.release, forms=outline.forms))
    if ahead is not None and config.attention_backend != "torch":
        ahead.start(encoder_kernels_of(model))
    if config.load_format == "dummy":
        bar.stage("making up weights")
        fill_randomly(model.slots(), dtype, device)
    else:
        slots = by_stored_name(model.slots(), checkpoint.tensors, spelling_of(family))
        load_weights(checkpoint, slots, outline.names, bar)
    return model

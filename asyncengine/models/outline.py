"""What a model and its checkpoint are, before any memory is taken: for loading, and for who asks what it takes."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.layers.kernels import TorchKernels
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.stored import StoredForm, bytes_of
from asyncengine.models.decoder import Decoder, DecoderConfig
from asyncengine.models.formats import CheckpointSource
from asyncengine.models.weights import assign, settle_tie, slots_of, stored_forms

logger = logging.getLogger("asyncengine")


class Weights(NamedTuple):
    """Of a model's tensors: which of the checkpoint's they are, and what they take."""

    names: dict[str, str]
    """The slot of each of the checkpoint's tensors."""
    forms: dict[str, StoredForm]
    """Of matrices that stay as they are stored, by their path."""
    kept_bytes: int
    """Of these."""
    elements: dict[str, int]
    """Of all other tensors, by their path."""


class Outline(NamedTuple):
    """What is known of a decoder and its checkpoint before any memory is taken."""

    decoder: Decoder
    """Without memory."""
    weights: Weights


def outline_of(
    described: DecoderConfig, checkpoint: CheckpointSource, config: EngineConfig, dtype: torch.dtype,
    device: torch.device, bits: int | None,
) -> Outline:  # fmt: skip
    """Raises `ModelNotFound` for what `assign` refuses."""
    described = settle_tie(described, checkpoint)
    decoder = Decoder(described, LayerOptions(dtype, torch.device("meta"), TorchKernels()), 1)
    slots = slots_of(decoder, checkpoint)
    return Outline(decoder, weights_of(checkpoint, slots, described.ignored, config, dtype, device, bits))


def weights_of(
    checkpoint: CheckpointSource, slots: Mapping[str, TensorSlot], ignored: Sequence[str], config: EngineConfig,
    dtype: torch.dtype, device: torch.device, bits: int | None,
) -> Weights:  # fmt: skip
    """What `slots` are filled with; `ignored` as `assign` takes it, whose `ModelNotFound` it raises."""
    names = {} if config.load_format == "dummy" else assign(checkpoint, slots, ignored)
    forms = kept_forms(stored_forms(checkpoint, names), dtype, device, bits)
    elements = {name.removesuffix(".weight"): math.prod(slot.shape) for name, slot in slots.items()}
    kept = sum(bytes_of(each.numbers, elements.pop(path)) for path, each in forms.items())
    return Weights(names, forms, kept, elements)


def kept_forms(
    stored: Mapping[str, StoredForm], dtype: torch.dtype, device: torch.device, bits: int | None
) -> dict[str, StoredForm]:
    """Those of a checkpoint's quantized matrices that stay as they are: all, or (`bits`) what is no wider than that.

    None where there are no compiled kernels, which a line of the log says.
    """
    missing = compiler_missing(dtype, device)
    if stored and missing is not None:
        kinds, form = ", ".join(sorted({each.name for each in stored.values()})), str(dtype).removeprefix("torch.")
        logger.warning(
            "%d quantized matrices (%s) become %s: %s", len(stored), kinds, form, missing
        )  # fmt: skip
        return {}
    return {path: each for path, each in stored.items() if bits is None or each.numbers.bits <= bits}

"""What a model and its checkpoint are, before any memory is taken: for loading, and for who asks what it takes."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch

from asyncengine.config import EngineConfig
from asyncengine.layers.kernels import TorchKernels
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.slots import TensorSlot
from asyncengine.layers.stored import StoredForm, bytes_of
from asyncengine.layers.stored_weight import chunk_group, stored_missing
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
    mixtures = [mixture.experts for layer in decoder.layers for mixture in layer.mixtures()]
    experts = {name.removesuffix(".weight") for each in mixtures for name, _ in (*each.slots(), *each.stacked_slots())}
    return Outline(decoder, weights_of(checkpoint, slots, described.ignored, config, dtype, device, bits, experts))


def weights_of(
    checkpoint: CheckpointSource, slots: Mapping[str, TensorSlot], ignored: Sequence[str], config: EngineConfig,
    dtype: torch.dtype, device: torch.device, bits: int | None, experts: Collection[str] = (),
) -> Weights:  # fmt: skip
    """The tensors that `slots` are filled with; `ignored` as `assign` takes it, whose `ModelNotFound` it raises.
    `experts`: paths of matrices that kernels of their own multiply."""
    names = {} if config.load_format == "dummy" else assign(checkpoint, slots, ignored)
    forms = kept_forms(stored_forms(checkpoint, names), dtype, device, bits, experts)
    elements = {name.removesuffix(".weight"): math.prod(slot.shape) for name, slot in slots.items()}
    whole = device.type == "cuda"
    kept = sum(bytes_of(each.numbers, elements.pop(path), whole_bytes=whole) for path, each in forms.items())
    return Weights(names, forms, kept, elements)


def kept_forms(
    stored: Mapping[str, StoredForm], dtype: torch.dtype, device: torch.device, bits: int | None,
    experts: Collection[str] = (),
) -> dict[str, StoredForm]:  # fmt: skip
    """Those of a checkpoint's quantized matrices that stay as they are: all, or (`bits`) what is no wider than that.

    None where there are no kernels; on a GPU only those that one is for, and no `experts`. The log says which and why.
    """
    missing, lost = stored_missing(dtype, device), defaultdict[str, list[str]](list)
    for path, each in stored.items():
        if missing is not None:
            lost[missing].append(path)
        elif device.type == "cuda" and path in experts:
            lost["kernels for experts read no other type"].append(path)
        elif device.type == "cuda" and chunk_group(each.numbers) is None:
            lost[f"there is no kernel for {each.numbers}"].append(path)
    for why, paths in lost.items():
        kinds, form = ", ".join(sorted({stored[path].name for path in paths})), str(dtype).removeprefix("torch.")
        logger.warning("%d quantized matrices (%s) become %s: %s", len(paths), kinds, form, why)
    dense = {path for paths in lost.values() for path in paths}
    return {
        path: each for path, each in stored.items() if path not in dense and (bits is None or each.numbers.bits <= bits)
    }

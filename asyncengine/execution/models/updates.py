"""Other weights for a live decoder: a checkpoint, or tensors by name, of the model that it is.

Everything is looked at before the first weight is written. What is accepted gives, to the bit, what a fresh model of
these weights would give.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter, ModelNotFound
from asyncengine.execution.models.checkpoint import open_checkpoint
from asyncengine.execution.models.decoder import Decoder, DecoderConfig
from asyncengine.execution.models.description import read_config
from asyncengine.execution.models.families import MULTIMODAL
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor
from asyncengine.execution.models.multimodal import text_part
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.models.weights import assign, fill_randomly, load_weights, settle_tie, slots_of
from asyncengine.options import WeightSource

_KINDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_GIVEN = Path("the update")


class GivenTensors(CheckpointSource):
    """Tensors of this process. They stay the caller's: nothing of them is kept."""

    files = (_GIVEN,)
    folder = _GIVEN

    def __init__(
        self, given: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]], device: torch.device
    ) -> None:
        """They are read onto `device`. Raises `InvalidParameter` for what is no floating-point tensor with a name."""
        self.config, self.metadata = {}, {}
        self.tensors: dict[str, StoredTensor] = {}
        self._given: dict[str, torch.Tensor] = {}
        self._device = device
        for name, tensor in _pairs(given):
            if name in self._given:
                raise InvalidParameter("weights", f"have two tensors of the name {name}")
            whole = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if tensor.dtype not in _KINDS or tensor.is_meta or not whole:
                kind = type(tensor).__name__
                raise InvalidParameter("weights", f"must be whole float tensors; {name} is a {kind}", tensor.dtype)
            self._given[name] = tensor
            self.tensors[name] = StoredTensor(_KINDS[tensor.dtype], tuple(tensor.shape), _GIVEN)

    def read(self, name: str) -> torch.Tensor:
        return self._given[name].detach().to(self._device).contiguous()

    def release(self, tensor: object) -> None:
        """Nothing of it is a file's."""


def as_given(weights: WeightSource | None) -> WeightSource | None:
    """The same, to be read more than once."""
    return weights if weights is None or isinstance(weights, (str, os.PathLike)) else list(_pairs(weights))


def _pairs(given: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Checked one by one, as the caller's generator makes them."""
    try:
        pairs = iter(given.items() if isinstance(given, Mapping) else given)
    except TypeError:
        raise InvalidParameter("weights", "must be a path, or tensors by name", given) from None
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise InvalidParameter("weights", "must be a path, or pairs of a name and a tensor", pair)
        name, tensor = pair
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidParameter("weights", f"must be tensors by name; {name!r} has a", type(tensor).__name__)
        yield name, tensor


def prepare_update(
    decoder: Decoder, weights: WeightSource | None, config: EngineConfig, *, partial: bool = False,
    has_other_parts: bool = False,
) -> Callable[[], None]:  # fmt: skip
    """A function that writes `weights` into `decoder`, made after all that can be refused has been: names,
    shapes, stored forms, and of a checkpoint its configuration. Nobody may run the decoder while it writes.

    `partial`: tensors that are not given stay. `has_other_parts`: the decoder is a part of a model that reads images or
    sounds as well. `weights` None: those that `load_format="dummy"` makes up. Raises `ModelNotFound` naming what is
    missing, unknown, misshapen, or otherwise than the model has it; `InvalidParameter` naming one that is not finite.
    """
    if weights is None:
        if config.load_format != "dummy":
            raise InvalidParameter("weights", "must be a path, or tensors by name", weights)
        return lambda: fill_randomly(decoder.slots(), decoder.dtype, decoder.device)
    checkpoint: CheckpointSource
    if isinstance(weights, (str, os.PathLike)):
        checkpoint, described = _open(os.fspath(weights), decoder, config)
    else:
        checkpoint, described = GivenTensors(weights, decoder.device), decoder.config
        if has_other_parts:
            checkpoint = text_part(checkpoint, described)
    if partial:
        described = replace(described, tied=decoder.config.tied)  # which may have been told by a tensor that stays
    described = settle_tie(described, checkpoint)
    difference = _difference(replace(described, ignored=()), replace(decoder.config, ignored=()))
    if difference is not None:
        where, new, old = difference
        raise ModelNotFound(f"{checkpoint.folder} is of another model: its {where} is {new}, not {old}; load a new one")
    slots = slots_of(decoder, checkpoint)
    names = assign(checkpoint, slots, described.ignored, partial=partial)
    _check_finite(checkpoint, names)
    return lambda: load_weights(checkpoint, slots, names, LoadProgress(False))


def _check_finite(checkpoint: CheckpointSource, names: Iterable[str]) -> None:
    """Raises `InvalidParameter` naming the first tensor that holds NaN or infinity: all answers would be of them."""
    for name in names:
        tensor = checkpoint.read(name)
        if isinstance(tensor, torch.Tensor) and not bool(torch.isfinite(tensor).all()):
            raise InvalidParameter("weights", f"must be finite; {name} holds NaN or infinity")
        checkpoint.release(tensor)


def _open(path: str, decoder: Decoder, config: EngineConfig) -> tuple[CheckpointSource, DecoderConfig]:
    config = config.replace(load_format="auto")  # of a model whose weights were made up, these are not
    checkpoint = open_checkpoint(path, config)
    hf_config, described, _ = read_config(path, checkpoint, config)
    if described is None:
        raise ModelNotFound(f"{checkpoint.folder} is of another model: its family {hf_config.model_type!r}")
    if hf_config.model_type in MULTIMODAL:
        checkpoint = text_part(checkpoint, described)
    return checkpoint, described


def _difference(new: Any, old: Any, where: str = "configuration") -> tuple[str, Any, Any] | None:
    """The first field in which two declarations differ: its path, and what it is in each; None: there is none."""
    if is_dataclass(new) and type(new) is type(old):
        parts = [(field.name, getattr(new, field.name), getattr(old, field.name)) for field in fields(new)]
    elif isinstance(new, tuple) and isinstance(old, tuple) and len(new) == len(old):
        parts = [(str(place), *pair) for place, pair in enumerate(zip(new, old, strict=True))]
    else:
        return None if new == old else (where, _shown(new), _shown(old))
    found = (_difference(one, other, f"{where}.{name}") for name, one, other in parts)
    return next((each for each in found if each is not None), None)


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} entries"
    return type(value).__name__ if is_dataclass(value) else repr(value)

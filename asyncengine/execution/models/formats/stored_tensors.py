"""The tensors of a quantized safetensors checkpoint while the matrices that they make up are looked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, shorten
from asyncengine.execution.models.formats import StoredTensor

SCALES = ("F16", "BF16", "F32")
"""Kinds of tensors that scales come in."""


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """The files' headers, and the few small tensors that have to be read to know what the others mean."""

    folder: Path
    headers: Mapping[str, StoredTensor]
    read: Callable[[str], torch.Tensor]
    """A tensor by its name, mapped and not copied."""

    def paths(self, ending: str) -> Iterator[str]:
        """Paths of modules: the part before `ending` of the names that have it."""
        for name in self.headers:
            if name.endswith(ending):
                yield name.removesuffix(ending)

    def need(self, name: str, kinds: Sequence[str], shape: tuple[int, ...] | None = None) -> StoredTensor:
        """The header of a tensor that has to be there. Raises `ModelNotFound` if it is missing or something else."""
        found = self.headers.get(name)
        if found is None:
            raise ModelNotFound(f"{self.folder} lacks the tensor {name}")
        if found.kind not in kinds:
            raise ModelNotFound(f"{self.folder} has the tensor {name} as {found.kind}, not as {' or '.join(kinds)}")
        if shape is not None and found.shape != shape:
            raise self.misshapen(name, found.shape, shape)
        return found

    def matrix(self, name: str, kinds: Sequence[str]) -> StoredTensor:
        """The same, of two dimensions, none of them 0."""
        found = self.need(name, kinds)
        if len(found.shape) != 2 or 0 in found.shape:
            raise self.wrong(name, f"has the shape {list(found.shape)}, which is no matrix")
        return found

    def misshapen(self, name: str, shape: Sequence[int], wanted: object) -> ModelNotFound:
        shown = list(wanted) if isinstance(wanted, tuple) else wanted
        return ModelNotFound(f"{self.folder} has a wrong shape for the tensor {name}: {list(shape)}, not {shown}")

    def wrong(self, name: str, what: str) -> ModelNotFound:
        """The error that says what is wrong with a tensor."""
        return ModelNotFound(f"{self.folder}: {shorten(name, 300)} {what}")


def integer(settings: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number of a configuration. Raises `ModelNotFound`."""
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelNotFound(f"quantization_config: {name} must be a whole number, got {shorten(repr(value), 80)}")
    return value


def switch(settings: Mapping[str, Any], name: str, default: bool) -> bool:
    """A yes or no of a configuration. Raises `ModelNotFound`."""
    value = settings.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelNotFound(f"quantization_config: {name} must be true or false, got {shorten(repr(value), 80)}")
    return value

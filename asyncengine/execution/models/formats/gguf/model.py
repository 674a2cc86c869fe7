"""A GGUF model as a checkpoint: its configuration, and its tensors by the names that transformers gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.stored import StoredMatrix
from asyncengine.execution.models.formats import CheckpointSource, StoredTensor
from asyncengine.execution.models.formats.gguf.config import header_of, hugging_face_config
from asyncengine.execution.models.formats.gguf.container import GgufFile, Metadata, broken, open_files
from asyncengine.execution.models.formats.gguf.header import Header, shortest
from asyncengine.execution.models.formats.gguf.tensors import Held, model_tensors
from asyncengine.execution.models.refusals import check_sizes

_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class GgufModel(CheckpointSource):
    """A GGUF file, or a model's several."""

    def __init__(self, path: Path, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Open a file, or any one of a model's several, and read its header. `defaults` go before the file's own.

        Raises `ModelNotFound` for what is missing or broken, `UnsupportedModel` for what is no text generator, or has
        an architecture or a type of tensors that is not read.
        """
        self.path = self.folder = path
        self._opened = files = open_files(path)
        self.files = tuple([file.path for file in files])
        self.metadata: Metadata = files[0].metadata
        places: dict[str, Held] = {name: (file, place) for file in files for name, place in file.tensors.items()}
        if len(places) != sum([len(file.tensors) for file in files]):
            raise broken(path, "two of its parts have a tensor of the same name")
        header, row = header_of(path, self.metadata, {name: place for name, (_, place) in places.items()})
        factors = {name: _vector(*places[f"{name}.weight"]) for name in _FACTORS if f"{name}.weight" in places}
        self.config = hugging_face_config(header, row, factors)
        try:
            check_sizes(self.config, len(places))
        except ModelNotFound as error:
            raise ModelNotFound(f"{path}: {str(error).removeprefix('config.json: ')}") from None
        self._defaults: dict[str, Any] = {}
        for key, name in _SAMPLING.items():
            value = self.metadata.short.get(f"general.sampling.{key}")
            if type(value) in (int, float):
                self._defaults[name] = shortest(value) if isinstance(value, float) else value
        self._defaults.update(defaults)
        self._stored = model_tensors(header, row, places)
        self.tensors = {name: tensor.stored for name, tensor in self._stored.items()}
        self._values: dict[str, torch.Tensor] = {}
        for key, (there, shape) in row.values.items():
            for layer, value in enumerate(_each_layer(header, key)):
                name = row.prefix.format(layer) + there
                self._values[name] = torch.full(shape, value)
                self.tensors[name] = StoredTensor("F32", shape, path)

    def generation_defaults(self) -> dict[str, Any]:
        """Sampling parameters under generation_config.json's names: Ollama's first, then the file's own."""
        return dict(self._defaults)

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor under its name in transformers: mapped if nothing was done to it, or as it is stored."""
        return self._values[name].clone() if name in self._values else self._stored[name].read()

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """A tensor from `read` will not be read again. Nothing happens to a copy."""
        if not isinstance(tensor, torch.Tensor):
            tensor.release(0, tensor.shape[0])
            return
        for file in self._opened:
            first = tensor.data_ptr() - file.bytes.ctypes.data
            if 0 <= first < len(file.bytes) and tensor.is_contiguous():
                file.release(first, first + tensor.nbytes)


def _each_layer(header: Header, key: str) -> list[float]:
    """A finite number for each layer, by the key's whole name: an array, or one for all. Raises `ModelNotFound`."""
    layers = header["block_count"]
    found = header.metadata.short.get(key)
    values: list[Any] = found if isinstance(found, list) else [found] * layers
    if len(values) != layers or not all(isinstance(each, float) and math.isfinite(each) for each in values):
        raise ModelNotFound(f"{header.path}: {key} must have a finite number for each of {layers} layers")
    return values


def _vector(file: GgufFile, place: Any) -> NDArray[np.float32]:
    if place.kind.plain != "F32" or len(place.shape) != 1:
        raise broken(file.path, "its rotary factors are no vector of float32")
    return file.array(place).view("<f4")

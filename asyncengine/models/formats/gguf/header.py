"""Hyperparameters of a GGUF header, each of the type that it must have. Raises `ModelNotFound` naming the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.models.formats.gguf.container import Metadata, TensorPlace
from asyncengine.models.sizes import MAX_LAYERS

_MAX_ENDS = 64


class Header:
    """The values under "ARCHITECTURE.", and what tensors there are."""

    def __init__(self, path: Path, metadata: Metadata, architecture: str, tensors: Mapping[str, TensorPlace]) -> None:
        self.path, self.metadata, self.architecture, self.tensors = path, metadata, architecture, tensors

    def value(self, key: str) -> Any:
        name = f"{self.architecture}.{key}"
        if self.metadata.length(name) > MAX_LAYERS:
            raise ModelNotFound(f"{self.path}: {name} has {self.metadata.length(name)} values, at most {MAX_LAYERS}")
        return self.metadata.get(name)

    @property
    def layers(self) -> int:
        """Without those that only predict further tokens, which are not read."""
        return max(self.whole("block_count") - self.whole("nextn_predict_layers", 0), 0)

    def whole(self, key: str, default: int | None = None, *, zeros: bool = False) -> int:
        """A whole number, or an array of equal ones (a value for each layer); with `zeros`, some may be 0."""
        found = self.value(key)
        if isinstance(found, list):
            if zeros:
                found = [each for each in found if each != 0] or found[:1]
            if len(set(map(str, found))) != 1:
                raise UnsupportedModel(
                    f"{self.path}: {self.architecture}.{key} differs from layer to layer, which is not read"
                )
            found = found[0]
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise self._wrong(key, "a whole number", found)
        return found

    def of_layers(self, key: str) -> list[int]:
        """A whole number for each layer; an empty list where the header has one for all, or none."""
        found = self.value(key)
        if not isinstance(found, list):
            return []
        if len(found) < self.layers or not all(isinstance(each, int) and each >= 0 for each in found):
            raise ModelNotFound(f"{self.path}: {self.architecture}.{key} must have a number for each layer")
        return found[: self.layers]

    def real(self, key: str, default: float | None = None) -> float:
        found = self.value(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            raise self._wrong(key, "a finite number", found)
        return shortest(float(found))

    def each_layer(self, key: str) -> list[float]:
        """A number for each layer, by its whole name: an array, or one for all."""
        layers = self.whole("block_count")
        if self.metadata.length(key) not in (0, layers) or layers > MAX_LAYERS:
            raise ModelNotFound(f"{self.path}: {key} must have a number for each of {layers} layers")
        found = self.metadata.get(key)
        values: list[Any] = found if isinstance(found, list) else [found] * layers
        if not all(isinstance(each, float) and math.isfinite(each) for each in values):
            raise ModelNotFound(f"{self.path}: {key} must have a finite number for each of {layers} layers")
        return values

    def flag(self, key: str, default: bool) -> bool:
        found = self.value(key)
        if not isinstance(found, (bool, type(None))):
            raise self._wrong(key, "true or false", found)
        return default if found is None else found

    def token(self, name: str) -> int | None:
        """An id of a special token."""
        found = self.metadata.single(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def tokens(self, key: str) -> list[int]:
        """An array of ids, by its whole name; empty if it is none, or absurdly long."""
        found = self.metadata[key] if 0 < self.metadata.length(key) <= _MAX_ENDS else []
        return [each for each in found if isinstance(each, int) and not isinstance(each, bool)]

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def any_layer(self, end: str) -> bool:
        """Whether a layer has a tensor of that name: "attn_q.bias"."""
        return any(name.endswith(f".{end}") for name in self.tensors)

    def _wrong(self, key: str, what: str, found: object) -> ModelNotFound:
        got = "is missing" if found is None else f"must be {what}, got {shorten(repr(found), 60)}"
        return ModelNotFound(f"{self.path}: {self.architecture}.{key} {got}")


def shortest(value: float) -> float:
    """The number with the fewest digits that has the same float32: 1e-6, not 9.99999997e-07.

    Files hold float32 of what config.json had in decimal digits.
    """
    import numpy as np

    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) and float(single) == value else value

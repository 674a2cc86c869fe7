"""Hyperparameters of a GGUF header, each of the type that it must have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.models.formats.gguf.container import Metadata, TensorPlace
from asyncengine.models.sizes import MAX_LAYERS

MAX_STATES = 2**20
"""Numbers that the heads of a layer may have together."""
_MAX_ENDS = 64
"""Ids in `eos_token_ids`; a longer list is no list of ends."""


class StateSizes(NamedTuple):
    """Sizes of a layer's states; Qwen's groups are its heads of keys, of `size` numbers, its heads those of values."""

    heads: int
    head_dim: int
    size: int
    groups: int


class Header:
    """The values under "ARCHITECTURE." and the places of the tensors.

    Every method raises `ModelNotFound` naming the key whose value is missing or of another type.
    """

    def __init__(self, path: Path, metadata: Metadata, architecture: str, tensors: Mapping[str, TensorPlace]) -> None:
        self.path, self.metadata, self.architecture, self.tensors = path, metadata, architecture, tensors
        self._of_layers = {name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")}

    def value(self, key: str) -> Any:
        """The value as it is stored; None if it is missing."""
        name = f"{self.architecture}.{key}"
        if self.metadata.length(name) > MAX_LAYERS:
            raise ModelNotFound(f"{self.path}: {name} has {self.metadata.length(name)} values, at most {MAX_LAYERS}")
        return self.metadata.get(name)

    @property
    def layers(self) -> int:
        """The number of layers without those that only predict further tokens, which are not read."""
        return max(self.whole("block_count") - self.whole("nextn_predict_layers", 0), 0)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number, or an array of equal ones (a value for each layer) in which some may be 0."""
        found = self.value(key)
        if isinstance(found, list):
            found = [each for each in found if each != 0] or found[:1]  # layers of another kind have none
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

    def positive(self, key: str) -> int:
        """A whole number above 0."""
        if not (found := self.whole(key)):
            raise ModelNotFound(f"{self.path}: {self.architecture}.{key} must not be 0")
        return found

    def of_layers(self, key: str) -> list[int]:
        """A whole number for each layer; an empty list where the header has one for all, or none."""
        found = self.value(key)
        if not isinstance(found, list):
            return []
        if len(found) < self.layers or not all(isinstance(each, int) and each >= 0 for each in found):
            raise ModelNotFound(f"{self.path}: {self.architecture}.{key} must have a number for each layer")
        return found[: self.layers]

    def attending(self) -> list[int]:
        """The number of key heads of each layer, 0 for a layer without attention."""
        if not (found := self.of_layers("attention.head_count_kv")):
            key = f"{self.architecture}.attention.head_count_kv"
            raise ModelNotFound(f"{self.path}: {key} must say which layers attend")
        return found

    def state_sizes(self) -> StateSizes:
        """Sizes of the states of a layer, small enough to make memory for."""
        heads, inner = self.whole("ssm.time_step_rank"), self.whole("ssm.inner_size")
        size, groups = self.whole("ssm.state_size"), self.whole("ssm.group_count")
        if not heads or not groups or inner % heads or heads % groups or max(inner, groups * size) > MAX_STATES:
            raise ModelNotFound(
                f"{self.path}: {self.architecture}.ssm has states of {heads} heads in {inner} numbers, and {groups} "
                f"groups of {size}"
            )
        return StateSizes(heads, inner // heads, size, groups)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        found = self.value(key)
        if found is None and default is not None:
            return default
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            raise self._wrong(key, "a finite number", found)
        return shortest(float(found))

    def each_layer(self, key: str) -> list[float]:
        """A finite number for each layer, by the key's whole name: an array, or one for all."""
        layers = self.whole("block_count")
        if self.metadata.length(key) not in (0, layers) or layers > MAX_LAYERS:
            raise ModelNotFound(f"{self.path}: {key} must have a number for each of {layers} layers")
        found = self.metadata.get(key)
        values: list[Any] = found if isinstance(found, list) else [found] * layers
        if not all(isinstance(each, float) and math.isfinite(each) for each in values):
            raise ModelNotFound(f"{self.path}: {key} must have a finite number for each of {layers} layers")
        return values

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        found = self.value(key)
        if not isinstance(found, (bool, type(None))):
            raise self._wrong(key, "true or false", found)
        return default if found is None else found

    def token(self, name: str) -> int | None:
        """The id of a special token; None if there is none."""
        found = self.metadata.single(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) and not isinstance(found, bool) else None

    def ends(self) -> list[int]:
        """The ids that end a text: at the end of a turn as well, where the file names one."""
        key = "tokenizer.ggml.eos_token_ids"
        listed = self.metadata[key] if 0 < self.metadata.length(key) <= _MAX_ENDS else []
        found = [*map(self.token, ("eos", "eot", "eom")), *listed]
        return list(dict.fromkeys(each for each in found if isinstance(each, int) and not isinstance(each, bool)))

    def has(self, *names: str) -> bool:
        """True if a layer has one of these tensors: "attn_q.bias"."""
        return any(name in self._of_layers for name in names)

    def _wrong(self, key: str, what: str, found: object) -> ModelNotFound:
        got = "is missing" if found is None else f"must be {what}, got {shorten(repr(found), 60)}"
        return ModelNotFound(f"{self.path}: {self.architecture}.{key} {got}")


def shortest(value: float) -> float:
    """The number with the fewest digits that has the same float32: 1e-6, not 9.99999997e-07.

    Files hold the float32 of numbers that config.json has in decimal digits.
    """
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) and float(single) == value else value

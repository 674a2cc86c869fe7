"""Hyperparameters of a GGUF header, each of the type that it must have."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.formats.gguf.container import Metadata, TensorPlace

MAX_STATES = 2**20
"""Numbers that the heads of a layer may have together."""


class _Type(NamedTuple):
    words: str
    types: tuple[type, ...]


WHOLE, REAL = _Type("a whole number", (int,)), _Type("a finite number", (float, int))
_TYPES = {"whole": WHOLE, "real": REAL, "flag": _Type("true or false", (bool,))}
_TABLES = tomllib.loads((resources.files(__package__) / "header.toml").read_text(encoding="utf-8"))
KEYS: Mapping[str, _Type] = {key: _TYPES[title] for title, keys in _TABLES.items() for key in keys}
"""Types of the values that are read as `header[key]`, or as `header.get(key, default)` where files may lack them."""


class StateSizes(NamedTuple):
    """Sizes of a layer's states; Qwen's groups are its heads of keys, of `size` numbers, its heads those of values."""

    heads: int
    head_dim: int
    size: int
    groups: int


class Header(dict[str, Any]):
    """The values of `KEYS` under "ARCHITECTURE.", and the places of the tensors.

    A whole number may be an array of equal ones (a value for each layer) in which some are 0: that number. Making one
    raises `ModelNotFound` naming a key of another type, and `UnsupportedModel` for numbers that differ from layer to
    layer; reading one raises `ModelNotFound` for a key that is missing.
    """

    def __init__(self, path: Path, architecture: str, metadata: Metadata, tensors: Mapping[str, TensorPlace]) -> None:
        self.path, self.architecture, self.metadata, self.tensors = path, architecture, metadata, tensors
        self.tensors_of_layers = frozenset([name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")])
        """Names of tensors that a layer has: "attn_q.bias"."""
        for key, what in KEYS.items():
            name = f"{architecture}.{key}"
            value = found = metadata.short.get(name)
            if name in metadata.long:
                value = found = f"{metadata.long[name].length} values"
            elif isinstance(found, list) and what is WHOLE:
                sizes = [size for size in found if size != 0] or found[:1]  # layers of another kind have none
                if len(set(map(str, sizes))) != 1:
                    raise UnsupportedModel(f"{path}: {name} differs from layer to layer, which is not read")
                value = sizes[0]
            if value is None:
                continue
            fits = type(value) in what.types and math.isfinite(value) and (value >= 0 or what is REAL)
            if not fits:
                raise ModelNotFound(f"{path}: {name} must be {what.words}, got {shorten(repr(found), 60)}")
            self[key] = shortest(float(value)) if what is REAL else value
        self.layers = max(self.get("block_count", 0) - self.get("nextn_predict_layers", 0), 0)
        """Number of layers without those that only predict further tokens."""

    def __missing__(self, key: str) -> Any:
        raise ModelNotFound(f"{self.path}: {self.architecture}.{key} is missing")

    def positive(self, key: str) -> int:
        """A whole number above 0."""
        if not (found := int(self[key])):
            raise ModelNotFound(f"{self.path}: {self.architecture}.{key} must not be 0")
        return found

    def other(self, key: str) -> Any:
        """A value that may be of several types, as it is stored; None if it is missing, or too long."""
        return self.metadata.short.get(f"{self.architecture}.{key}")

    def of_layers(self, key: str) -> list[int]:
        """A whole number for each layer; an empty list where the header has one for all, or none."""
        found = self.other(key)
        if not isinstance(found, list):
            return []
        if len(found) < self.layers or not all(isinstance(number, int) and number >= 0 for number in found):
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
        heads, inner, size, groups = (
            self[f"ssm.{key}"] for key in ("time_step_rank", "inner_size", "state_size", "group_count")
        )
        if not heads or not groups or inner % heads or heads % groups or max(inner, groups * size) > MAX_STATES:
            raise ModelNotFound(
                f"{self.path}: {self.architecture}.ssm has states of {heads} heads in {inner} numbers, and {groups} "
                f"groups of {size}"
            )
        return StateSizes(heads, inner // heads, size, groups)


def shortest(value: float) -> float:
    """The number with the fewest digits that has the same float32: 1e-6, not 9.99999997e-07.

    Files hold the float32 of numbers that config.json has in decimal digits.
    """
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) and float(single) == value else value

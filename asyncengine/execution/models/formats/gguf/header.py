"""Hyperparameters of a GGUF header, with their types checked."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.models.formats.gguf.container import Metadata, TensorInfo

MAX_STATES = 2**20
"""Most numbers of all heads of a layer together: a file that asks for more is broken."""


class _Type(NamedTuple):
    words: str
    types: tuple[type, ...]


WHOLE, REAL = _Type("a whole number", (int,)), _Type("a finite number", (float, int))
_TYPES = {"whole": WHOLE, "real": REAL, "flag": _Type("true or false", (bool,))}
_TABLES = tomllib.loads((resources.files(__package__) / "header.toml").read_text(encoding="utf-8"))
KEYS: Mapping[str, _Type] = {key: _TYPES[title] for title, keys in _TABLES.items() for key in keys}
"""Type of each value that is read as `header[key]`, or as `header.get(key, default)` where files may lack it."""


class StateSizes(NamedTuple):
    """Sizes of a layer's recurrent state. For Qwen, `groups` are the key heads, of `size` numbers, and `heads` the
    value heads, of `head_dim` numbers."""

    heads: int
    head_dim: int
    size: int
    groups: int


class Header(dict[str, Any]):
    """The values of `KEYS` under "ARCHITECTURE.", and the tensors of the file.

    An integer may be stored as an array with a value for each layer; if all values but zeros are equal, it is that
    value. The constructor raises `ModelNotFound` naming a key of another type, and `UnsupportedModel` for values that
    differ between layers; `header[key]` raises `ModelNotFound` for a missing key.
    """

    def __init__(self, path: Path, architecture: str, metadata: Metadata, tensors: Mapping[str, TensorInfo]) -> None:
        self.path, self.architecture, self.metadata, self.tensors = path, architecture, metadata, tensors
        self.tensors_of_layers = frozenset([name.split(".", 2)[-1] for name in tensors if name.startswith("blk.")])
        """Names of the tensors of all layers, without the layer: "attn_q.bias"."""
        for key, expected in KEYS.items():
            name = f"{architecture}.{key}"
            value = stored = metadata.short.get(name)
            if name in metadata.long:
                value = stored = f"{metadata.long[name].length} values"
            elif isinstance(stored, list) and expected is WHOLE:
                sizes = [size for size in stored if size != 0] or stored[:1]  # layers of another type have 0
                if len(set(map(str, sizes))) != 1:
                    raise UnsupportedModel(f"{path}: {name} differs from layer to layer, which is not read")
                value = sizes[0]
            if value is None:
                continue
            fits = type(value) in expected.types and math.isfinite(value) and (value >= 0 or expected is REAL)
            if not fits:
                raise ModelNotFound(f"{path}: {name} must be {expected.words}, got {shorten(repr(stored), 60)}")
            self[key] = shortest(float(value)) if expected is REAL else value
        self.layers = max(self.get("block_count", 0) - self.get("nextn_predict_layers", 0), 0)
        """Number of layers without those of multi-token prediction heads."""

    def __missing__(self, key: str) -> Any:
        raise ModelNotFound(f"{self.path}: {self.architecture}.{key} is missing")

    def positive(self, key: str) -> int:
        """The integer at `key`. Raises `ModelNotFound` if it is 0."""
        if not (number := int(self[key])):
            raise ModelNotFound(f"{self.path}: {self.architecture}.{key} must not be 0")
        return number

    def other(self, key: str) -> Any:
        """The value at `key`, of any type, as it is stored; None if it is missing or too long."""
        return self.metadata.short.get(f"{self.architecture}.{key}")

    def of_layers(self, key: str) -> list[int]:
        """The integers at `key`, one for each layer; an empty list if the header has one for all layers, or none."""
        numbers = self.other(key)
        if not isinstance(numbers, list):
            return []
        if len(numbers) < self.layers or not all(isinstance(number, int) and number >= 0 for number in numbers):
            raise ModelNotFound(f"{self.path}: {self.architecture}.{key} must have a number for each layer")
        return numbers[: self.layers]

    def attending(self) -> list[int]:
        """The number of KV heads of each layer, 0 for a layer without attention."""
        if not (heads := self.of_layers("attention.head_count_kv")):
            key = f"{self.architecture}.attention.head_count_kv"
            raise ModelNotFound(f"{self.path}: {key} must say which layers attend")
        return heads

    def state_sizes(self) -> StateSizes:
        """Sizes of a layer's recurrent state. Raises `ModelNotFound` for sizes that do not fit together or exceed
        `MAX_STATES`."""
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
    """The decimal number with the fewest digits that rounds to the same float32: 1e-6, not 9.99999997e-07.

    A file holds the float32 of a number that config.json has in decimal digits, and layers compute with the latter.
    """
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) and float(single) == value else value

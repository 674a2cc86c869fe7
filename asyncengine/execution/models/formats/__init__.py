"""Checkpoint formats other than plain safetensors, each parsed into named tensors and quantized matrices.

`models.loading` reads every format as a `CheckpointSource`. A format's module finds and unpacks only: names and shapes
of tensors say which of them make up a matrix, and the quantization config is checked against them. Everything is
checked before the first weight is written, so that a broken checkpoint leaves a running model as it is.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncengine.errors import ModelNotFound, shorten

if TYPE_CHECKING:
    import torch

    from asyncengine.execution.layers.stored import StoredMatrix


ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""safetensors' name of each dtype that is read -> bytes of a number."""
UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")
"""Other dtypes of safetensors: a file may have such tensors, as long as none of them is read."""


class StoredTensor(NamedTuple):
    """Header of a tensor in a file, or of a quantized matrix, which may be several tensors there."""

    dtype: str
    """The dtype as safetensors calls it ("BF16"), or the type of a quantized matrix ("awq", "Q4_K")."""
    shape: tuple[int, ...]
    """The shape; of a quantized matrix, that of the unpacked matrix."""
    file: Path

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        """Whether `CheckpointSource.read` gives a `StoredMatrix` for it."""
        return self.dtype not in ITEM_BYTES and self.dtype not in UNREAD


class CheckpointSource(ABC):
    """A model on disk, before any of its weights is read."""

    folder: Path
    """The model's folder (of a GGUF model, its file), for error messages."""
    config: dict[str, Any]
    """The content of config.json; of a GGUF model, what that file would contain."""
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """Tensors by the names that transformers gives them."""
    metadata: Mapping[str, Any]
    """Metadata of a GGUF file: tokenizer, chat template, defaults. Empty for other formats."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """The tensor `name`: memory-mapped if it is stored unquantized, else a matrix in its stored form."""

    @abstractmethod
    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """Let the system reclaim the pages of a tensor from `read`, which will not be read again."""

    def generation_defaults(self) -> dict[str, Any]:
        """Default sampling parameters, under generation_config.json's names."""
        return {}

    def root(self) -> Path:
        """The folder of the whole model; `folder` may be the transformer's within it (sentence-transformers)."""
        return self.folder

    def quantized_types(self) -> dict[str, str]:
        """{module: storage type} of each matrix that is quantized in the files, in the order of layers."""
        types = {name: stored.dtype for name, stored in self.tensors.items() if stored.quantized}

        def in_order(name: str) -> list[tuple[int, str]]:
            return [(int(word), "") if word.isascii() and word.isdigit() else (-1, word) for word in name.split(".")]

        return {name.removesuffix(".weight"): types[name] for name in sorted(types, key=in_order)}


def read_json(file: Path, path_or_id: str) -> dict[str, Any]:
    """The JSON object in a file of a model's folder. Raises `ModelNotFound`."""
    if not file.is_file():
        raise ModelNotFound(f"{path_or_id} has no {file.name}")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ModelNotFound(f"{file} cannot be read: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelNotFound(f"{file} does not hold a JSON object")
    return content


def first_line(error: BaseException) -> str:
    """The message of an error raised by another library, in one short line."""
    return shorten(" ".join(str(error).split()), 300) or type(error).__name__

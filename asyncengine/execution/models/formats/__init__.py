"""Checkpoints in other forms than plain safetensors: each parsed into named tensors and stored matrices.

Whatever the files are, `models.loading` meets them as a `CheckpointSource`. A format's module only finds and unpacks:
which tensors make up a matrix follows from their names and shapes, and what the configuration says beside that is
checked against them. Everything is checked before the first weight is written.
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
"""Kinds of tensors, by safetensors' names for dtypes."""
UNREAD = ("F4", "F6_E2M3", "F6_E3M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64")
"""Kinds that nothing here is stored in."""


class StoredTensor(NamedTuple):
    """A tensor as files have it, or a quantized matrix, which may be several tensors there."""

    kind: str
    """Its dtype as safetensors calls it, or the type of a quantized matrix ("awq", "Q4_K")."""
    shape: tuple[int, ...]
    """The shape; of a quantized matrix, that of the matrix it stands for."""
    file: Path

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def quantized(self) -> bool:
        """Whether reading it gives a `StoredMatrix`."""
        return self.kind not in ITEM_BYTES and self.kind not in UNREAD


class CheckpointSource(ABC):
    """A model on disk, before any of its weights is read."""

    folder: Path
    """The folder it lies in, for messages."""
    config: dict[str, Any]
    """The content of config.json, or what it would be."""
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    """Tensors by the names that transformers gives them. `kind` is a dtype as safetensors calls it, or a quantized
    type."""
    metadata: Mapping[str, Any]
    """Entries of the file beside the tensors: tokenizer, chat template, defaults. Empty where it says nothing."""

    @abstractmethod
    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor, mapped where it is stored plainly; a quantized one as it is stored."""

    @abstractmethod
    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """Let the system take back the pages of what `read` gave: it will not be read again."""

    def generation_defaults(self) -> dict[str, Any]:
        """Defaults of sampling, under generation_config.json's names."""
        return {}

    def root(self) -> Path:
        """The folder of the whole model, where this is a part of it."""
        return self.folder

    def stored_kinds(self) -> dict[str, str]:
        """Storage type by name of each matrix that is quantized in its file, layer by layer."""
        kinds = {name: stored.kind for name, stored in self.tensors.items() if stored.quantized}

        def in_order(name: str) -> list[tuple[int, str]]:
            return [(int(part), "") if part.isascii() and part.isdigit() else (-1, part) for part in name.split(".")]

        return {name.removesuffix(".weight"): kinds[name] for name in sorted(kinds, key=in_order)}


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
    """The message of a foreign error, in one short line."""
    return shorten(" ".join(str(error).split()), 300) or type(error).__name__

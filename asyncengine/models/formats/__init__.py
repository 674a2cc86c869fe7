"""Checkpoints in other forms than plain safetensors: each parsed into named tensors and stored matrices.

Whatever the files are, `models.loading` meets them as a `CheckpointSource`. A format's module only finds and unpacks:
which tensors make up a matrix follows from their names and shapes, and what the configuration says beside that is
checked against them. Everything is checked before the first weight is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from asyncengine.layers.stored import StoredMatrix
    from asyncengine.models.checkpoint import StoredTensor


class CheckpointSource(Protocol):
    """A model on disk, before any of its weights is read."""

    @property
    def folder(self) -> Path:
        """Where it lies, for messages."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """As config.json has it, or would have it."""
        ...

    @property
    def files(self) -> tuple[Path, ...]: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By the names that transformers gives them. `kind` is a dtype as safetensors calls it, or a quantized type."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What the file says beside the tensors: tokenizer, chat template, defaults. Empty where it says nothing."""
        ...

    @property
    def elements(self) -> int:
        """Of all tensors."""
        ...

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor, mapped where it is stored plainly; a quantized one as it is stored."""
        ...

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """What `read` gave will not be read again: the system may take back its pages."""
        ...

    def generation_defaults(self) -> dict[str, Any]:
        """Of sampling, under generation_config.json's names."""
        ...

    def stored_types(self) -> dict[str, str]:
        """What each tensor is stored as, by name."""
        ...

"""Slots for a checkpoint's tensors: the one door by which weights enter a model, when loading and when updating."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncengine.execution.layers.stored import StoredForm, StoredMatrix, dense


@dataclass(frozen=True, slots=True, eq=False)
class TensorSlot:
    """The place of one named tensor."""

    shape: tuple[int, ...]
    """The tensor's shape in a checkpoint."""
    load: Callable[[torch.Tensor | StoredMatrix], None]
    """Takes a tensor of that shape and any float dtype, or quantized, perhaps mapped from a file; keeps nothing of it.
    """
    initial: float | None = None
    """The value in a model without a checkpoint; None: random numbers."""
    other_shape: tuple[int, ...] | None = None
    """Another shape that the tensor may have: `load` tells by the shape what it is given."""
    replaces: tuple[str, ...] = ()
    """Names of tensors in whose stead checkpoints may have this one."""
    waits_with: object = None
    """Key that it shares with the slots that are packed together with it, once all of them are filled."""
    memory: Sequence[torch.Tensor] = ()
    """All memory that `load` writes to; empty: it is not said."""
    takes: StoredForm | None = None
    """The only form that it takes, since memory was made for that; None: any, and plain numbers."""

    @staticmethod
    def into(target: torch.Tensor, added: float = 0.0, initial: float | None = None) -> TensorSlot:
        """A slot that copies into `target`, in its dtype, and adds `added` there (Gemma's norms: 1 + weight)."""

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            target.copy_(tensor if isinstance(tensor, torch.Tensor) else dense(tensor).view(target.shape))
            if added:
                target.add_(added)

        return TensorSlot(tuple(target.shape), load, initial)

    @staticmethod
    def some(
        target: torch.Tensor, count: int, rows: Sequence[tuple[slice, slice]], initial: float | None = None
    ) -> TensorSlot:
        """A slot for `count` numbers that copies some of them into `target`: (which, their places there)."""

        def load(tensor: torch.Tensor | StoredMatrix) -> None:
            whole = (tensor if isinstance(tensor, torch.Tensor) else dense(tensor)).view(count)
            for given, own in rows:
                target[own] = whole[given]

        return TensorSlot((count,), load, initial)

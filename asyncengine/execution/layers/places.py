"""Products of a model that low-rank adapters change, and the paths by which adapters name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One product of the model, and the modules (by their Hugging Face paths) whose outputs lie in it side by side."""

    in_features: int
    """Rows of the table for an embedding."""
    parts: tuple[tuple[str, int], ...]
    """(path, width of its output); "" for outputs of no module."""
    kind: Literal["linear", "conv1d", "embedding"] = "linear"
    head: bool = False
    """Gets the rows whose logits are wanted, not all tokens."""
    scale: float = 1.0
    kept: tuple[tuple[slice, ...], ...] | None = None
    """The outputs of each part that are computed here; None: all."""
    here: bool = True
    """False: another process computes it."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Outputs of each part here."""
        if self.kept is None:
            return tuple(width for _, width in self.parts)
        return tuple(sum(own.stop - own.start for own in each) for each in self.kept)

    def kept_rows(self, part: int, b: torch.Tensor) -> torch.Tensor:
        """Rows of b [all outputs of a part, ...] whose outputs are computed here."""
        return b if self.kept is None else torch.cat([b[own] for own in self.kept[part]])

    @property
    def embedding(self) -> bool:
        return self.kind == "embedding"

    @property
    def path(self) -> str:
        """The first part's: layers name the product by it."""
        return self.parts[0][0]

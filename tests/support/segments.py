"""Steps of state layers, by hand: which tokens belong to which row, and where states come from and go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from asyncengine.execution.layers.states import StatePools, StateSegments, StateStep
from asyncengine.execution.layers.step import StepContext

Part = tuple[int, int, int]
"""(tokens, source, target)."""


def segments_of(rows: Sequence[Sequence[Part]]) -> StateSegments:
    """Segments of each row, whose tokens stand one after another in the step."""
    bounds, flat, token = [0], [], 0
    for row in rows:
        for tokens, source, target in row:
            flat.append((token, token + tokens, source, target))
            token += tokens
        bounds.append(len(flat))
    begins, ends, sources, targets = np.array(flat, dtype=np.int64).reshape(-1, 4).T.copy()
    return StateSegments(np.array(bounds, dtype=np.int64), begins, ends, sources, targets)


def forward(layer: Any, x: torch.Tensor, rows: Sequence[Sequence[Part]], pools: StatePools) -> torch.Tensor:
    """Outputs of a layer for inputs [tokens, width] of these rows; it keeps its states in `pools`."""
    backend: Any = None
    step = StepContext(torch.arange(len(x)), backend, states=StateStep(pools, segments_of(rows)))
    with torch.inference_mode():
        found: torch.Tensor = layer(x, step)
    return found

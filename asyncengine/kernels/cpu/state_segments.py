"""A step's segments (`layers.states.StateSegments`) for kernels of state layers: int64 by address."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Segments(Protocol):
    """The fields of `StateSegments`."""

    @property
    def rows(self) -> NDArray[np.int64]: ...
    @property
    def begins(self) -> NDArray[np.int64]: ...
    @property
    def ends(self) -> NDArray[np.int64]: ...
    @property
    def sources(self) -> NDArray[np.int64]: ...
    @property
    def targets(self) -> NDArray[np.int64]: ...


def segment_places(segments: Segments) -> tuple[int, int, int, int, int, int]:
    """(rows, addresses of the bounds of rows, of begins, ends, sources and targets). `segments` holds their memory."""
    parts = (segments.rows, segments.begins, segments.ends, segments.sources, segments.targets)
    bounds, begins, ends, sources, targets = (part.ctypes.data for part in parts)
    return len(segments.rows) - 1, bounds, begins, ends, sources, targets

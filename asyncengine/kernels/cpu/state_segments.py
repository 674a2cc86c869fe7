"""A step's segments (`layers.states.StateSegments`) for kernels of state layers: int64 by address."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class SegmentPlaces(NamedTuple):
    """Segments by address, as kernels take them."""

    rows: int
    bounds: int
    begins: int
    ends: int
    sources: int
    targets: int

    @classmethod
    def of(cls, segments: Segments | SegmentPlaces) -> SegmentPlaces:
        """(rows, addresses of the bounds of rows, of begins, ends, sources and targets). `segments` holds their
        memory."""
        if isinstance(segments, SegmentPlaces):
            return segments
        parts = (segments.rows, segments.begins, segments.ends, segments.sources, segments.targets)
        return cls(len(segments.rows) - 1, *(part.ctypes.data for part in parts))

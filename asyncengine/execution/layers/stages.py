"""Layers that are spread over several processes, the stages of one model (pipeline parallelism).

Each stage has a run of layers, one behind the other (GPipe, Huang et al. 2018). The first, which is the engine's own
process, also has what lies before and behind all layers: embeddings, and the output layer, which are often one matrix.
Every stage knows the whole model, so that names, forms and sizes are those of one process. Weights of other stages are
memory that is never written to, and takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Stage(NamedTuple):
    """One process's part of a model."""

    rank: int
    """0: the engine's own process."""
    size: int
    cuts: tuple[int, ...]
    """[size + 1] layers at which the stages begin, and their number."""

    @property
    def run(self) -> range:
        """The layers that are computed here."""
        return range(self.cuts[self.rank], self.cuts[self.rank + 1])

    def has(self, layer: int | None) -> bool:
        """Whether a layer is computed here; None: what lies before and behind all layers."""
        return self.rank == 0 if layer is None else layer in self.run


def cut_layers(sizes: Sequence[int], outside: int, size: int) -> tuple[int, ...] | None:
    """Layers at which stages begin, and the number of all: as even as may be by what each layer reads, of which the
    first stage has `outside` beside its layers; each has one layer at least. None: there are too few."""
    if len(sizes) < size:
        return None
    ends = [*accumulate(sizes, initial=outside)]
    cuts = [0]
    for stage in range(1, size):
        wanted = ends[-1] * stage / size
        nearest = min(range(len(ends)), key=lambda cut: abs(ends[cut] - wanted))
        cuts.append(min(max(nearest, cuts[-1] + 1), len(sizes) - (size - stage)))
    return (*cuts, len(sizes))

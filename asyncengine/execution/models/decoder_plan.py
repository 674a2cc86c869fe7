"""The plan of a decoder: what follows from its configuration, from the stage of a pipeline and from the kernels.

A pure function of these; no tensor is read, and none is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from asyncengine.execution.layers.basic import Matrix

if TYPE_CHECKING:
    from asyncengine.execution.models.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """The indices of each layer's cache, states and rotation, and what of the model this process computes."""

    pools: tuple[int, ...]
    """The index of the keys and values that a layer attends to in the attention backend."""
    states: tuple[int, ...]
    """The number of layers before it that keep a recurrent state."""
    rotaries: tuple[int, ...]
    """The index of its rotary embedding; the one behind the last: none."""
    run: range
    """The layers that are computed in this process."""
    last_kept: int
    """The last layer whose keys, values or states later steps read."""
    carries_norms: bool
    """Stages hand on the stream and its norm: a layer norm is of a sum before that is rounded."""
    projections: tuple[tuple[Matrix, int], ...]
    """Matrices from embeddings to the layers and back, each with the width that it reads; (): widths are equal."""
    taps: tuple[int, ...]
    """Layers before which the head that predicts further tokens reads the stream, as `MTPConfig.taps`."""
    records: bool
    """Whether short steps may be recorded, if compiled kernels make all that the layers compute."""

    @property
    def is_last(self) -> bool:
        """Whether the last layer of all is computed here."""
        return self.run.stop == len(self.pools)

    @property
    def reads_norms(self) -> bool:
        """Whether the first layer here gets the norm of its input from the stage before."""
        return self.carries_norms and self.run.start > 0

    @property
    def hands_on_norms(self) -> bool:
        """Whether the next stage gets the norm of its input from here."""
        return self.carries_norms and not self.is_last

    @property
    def normed(self) -> range:
        """The layers behind which this process computes the norm that the next layer, or the head, begins with."""
        return self.run if self.is_last or self.carries_norms else self.run[:-1]


def plan_decoder(
    config: DecoderConfig, stage: range | None = None, *, kernels: str = "compiled", sharded: bool = False
) -> DecoderPlan:
    """The plan of all layers in one process, or of those in `stage` where a pipeline divides them. `kernels`: the name
    of the `LayerKernels`. `sharded`: other ranks have parts of each layer."""
    pools: list[int] = []
    taken = 0
    for layer in config.layers:
        source = None if layer.attention is None else layer.attention.keys_of
        pools.append(taken if source is None else pools[source])
        taken += layer.attention is not None and source is None
    rotary = [None if layer.attention is None else layer.attention.rotary for layer in config.layers]
    keeps = [each.state is not None or getattr(each.attention, "keys_of", 0) is None for each in config.layers]
    carries_norms = stage is not None and config.norm.kind != "rms"
    inner, outer = config.width, config.outer_width
    projections = (Matrix(config.project_in, inner), outer), (Matrix(config.project_out, outer), inner)
    return DecoderPlan(
        pools=tuple(pools),
        states=tuple(accumulate((layer.state is not None for layer in config.layers[:-1]), initial=0)),
        rotaries=tuple(len(config.rotary) if index is None else index for index in rotary),
        run=range(len(config.layers)) if stage is None else stage,
        last_kept=max(index for index, kept in enumerate(keeps) if kept),
        carries_norms=carries_norms,
        projections=() if inner == outer else projections,
        taps=() if config.mtp is None else config.mtp.taps,
        # a gather of ranks, and a norm that is handed on, are no kernels of a record
        records=kernels == "compiled" and not sharded and not carries_norms,
    )

"""The plan of a decoder's layers: which cache each reads, which rotation it has, which of them are computed here."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncengine.execution.models.decoder import DecoderConfig


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The consequences, by layer, of a decoder's configuration and of the stage of a pipeline; no tensor is asked."""

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

    @property
    def is_last(self) -> bool:
        """Whether the last layer of all is computed here."""
        return self.run.stop == len(self.pools)


def plan_layers(config: DecoderConfig, stage: range | None = None) -> LayerPlan:
    """The plan of all layers in one process, or of those in `stage` where a pipeline divides them."""
    pools: list[int] = []
    taken = 0
    for layer in config.layers:
        source = None if layer.attention is None else layer.attention.keys_of
        pools.append(taken if source is None else pools[source])
        taken += layer.attention is not None and source is None
    rotary = [None if layer.attention is None else layer.attention.rotary for layer in config.layers]
    keeps = [each.state is not None or getattr(each.attention, "keys_of", 0) is None for each in config.layers]
    return LayerPlan(
        pools=tuple(pools),
        states=tuple(accumulate((layer.state is not None for layer in config.layers[:-1]), initial=0)),
        rotaries=tuple(len(config.rotary) if index is None else index for index in rotary),
        run=range(len(config.layers)) if stage is None else stage,
        last_kept=max(index for index, kept in enumerate(keeps) if kept),
        carries_norms=stage is not None and config.norm.kind != "rms",
    )

"""Order in which instances are stopped: by status, layers on devices, and placement. Pure.

GPUStack's rule: status (at most 100) + offload (10) + placement (1), the lowest goes first. Placement by binpack is
scored as if the instance were about to be placed where it is: its own claims count as free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from asyncengine.checks import as_choice, as_number
from asyncengine.cluster.fit import Shares, free_memory
from asyncengine.cluster.nodes import Instance, Share
from asyncengine.cluster.scores import STRATEGIES, Spread, binpack, combine
from asyncengine.cluster.table import Cluster
from asyncengine.errors import InvalidParameter

STATUS_MAX, OFFLOAD_MAX, PLACEMENT_MAX = 100.0, 10.0, 1.0


class Ranked(NamedTuple):
    """An instance, and the score of keeping it."""

    instance: Instance
    score: float


def rank_for_removal(
    cluster: Cluster,
    model: str,
    *,
    strategy: str = "spread",
    total_max: float | None = None,
    names: Iterable[str] | None = None,
) -> tuple[Ranked, ...]:
    """The instances of `model`, the first to be stopped first; of equal scores, the oldest.

    `total_max`: scores are scaled so that the best possible is this. `names`: only these instances.

    Raises `InvalidParameter`.
    """
    as_choice("strategy", strategy, STRATEGIES)
    scale = 1.0
    if total_max is not None:
        best = STATUS_MAX + OFFLOAD_MAX + PLACEMENT_MAX
        scale = as_number("total_max", total_max, 0.0, 1e9, exclusive_low=True) / best
    wanted = None if names is None else dict.fromkeys(names)
    found = [
        each for each in cluster.instances.values() if each.model == model and (wanted is None or each.name in wanted)
    ]
    if wanted is not None and len(found) < len(wanted):
        missing = next(name for name in wanted if name not in {each.name for each in found})
        raise InvalidParameter("names", f"{missing!r} is no instance of {model!r}")
    if not found:
        return ()
    free, host_free = free_memory(cluster, np.arange(len(cluster.alive)))
    spread = Spread(cluster, model, np.flatnonzero(cluster.alive), PLACEMENT_MAX)

    def placement(instance: Instance) -> float:
        shares = [_as_shares(cluster, share) for share in instance.shares]
        if strategy == "spread":
            scores = [spread.of(each.rows, each.columns) for each in shares]
        else:
            scores = [binpack(free, host_free, each, most=PLACEMENT_MAX, back=True) for each in shares]
        return combine(strategy, np.concatenate(scores))

    ranked = [Ranked(each, (_status(cluster, each) + _offload(each) + placement(each)) * scale) for each in found]
    return tuple(sorted(ranked, key=lambda each: each.score))


def _status(cluster: Cluster, instance: Instance) -> float:
    """Score of an instance's state. On several nodes, the first is looked at."""
    ready = bool(cluster.ready[cluster.row_of(instance.shares[0].node)])
    if not ready or instance.state == "failed":
        return 0.0
    return STATUS_MAX if instance.state == "running" else STATUS_MAX * 0.5


def _offload(instance: Instance) -> float:
    return 0.0 if instance.layers is None else instance.layers[0] / instance.layers[1] * OFFLOAD_MAX


def _as_shares(cluster: Cluster, share: Share) -> Shares:
    row, columns = cluster.place_of(share)
    claims = [taken for _, taken in share.devices]
    return Shares(np.array([row]), np.array([columns], np.int64), np.array([claims], np.int64), share.host_bytes)

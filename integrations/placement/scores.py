"""Scores of candidates: placement (at most 100) plus locality of the model's files (at most 5). Pure functions.

The formulas and weights are GPUStack's (of August 2026, commit 47277d79) but for two rules (docs/howto/placement.md).
`binpack` prefers what is nearly full, `spread` (the default) nodes and devices where few instances run, those of the
same model above all.

Spread is graded, between the fewest and the most instances that any candidate's node runs: none of this model is
preferred, but a node with few of both passes one with none of it and the most of others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from asyncengine.integrations.placement.fit import Shares, View
from asyncengine.integrations.placement.table import Cluster, Int64Array

Float64Array = NDArray[np.float64]

PLACEMENT_MAX, LOCALITY_MAX = 100.0, 5.0
_HOST, _DEVICE = 1.0, 2.0
"""Weights of memory in binpack."""
_LEADER = 5.0
"""Weight of the first node of several; each other has 1."""
_NODE, _OF_DEVICES = 0.85, 0.15
"""Weights of a node's score and its devices' in spread."""
_OTHERS = 0.2
"""Weight of another model's instance on a device, beside one of the same."""
_DRAFT = 0.5
STRATEGIES = ("spread", "binpack")


class Spread:
    """Scores of nodes and devices by how few instances run there: of one model above all, and of others."""

    def __init__(self, table: Cluster, model: str, compared: Int64Array, most: float = PLACEMENT_MAX) -> None:
        """`compared`: [n] rows of the table among which the fewest and the most are looked for. `most`: the score of a
        place where nothing runs."""
        self._current, self._every, self._most = table.counts_of(model), table.counts(), most
        current = self._current.nodes
        near, far = _few(current, compared), _few(self._every.nodes - current, compared)
        if current[compared].min() == 0:  # somewhere none of this model runs: that is better than anywhere else
            scores = np.where(current == 0, 0.85 + 0.15 * far, 0.45 + 0.35 * near + 0.20 * far)
        else:
            scores = 0.50 + 0.25 * near + 0.15 * far
        self._nodes: Float64Array = scores * most

    def of(self, rows: Int64Array, columns: Int64Array) -> Float64Array:
        """[m] scores of the nodes in these rows [m] of the table, together with devices in the columns [m, k]."""
        nodes: Float64Array = self._nodes[rows]
        count = columns.shape[1]
        if not count:
            return nodes
        total, width = np.zeros(len(nodes)), self._every.devices.shape[1]
        for column in columns.T:
            places = rows * width + column  # flat indices are twice as fast as pairs
            current = self._current.devices.ravel()[places]
            others = self._every.devices.ravel()[places] - current
            total = total + 1 / (1 + current + others * _OTHERS)
        return nodes * _NODE + total / count * self._most * _OF_DEVICES


def _few(counts: Int64Array, compared: Int64Array) -> Float64Array:
    """Counts scaled to 1 for the fewest of those in the `compared` rows, and 0 for the most."""
    fewest, most = int(counts[compared].min()), int(counts[compared].max())
    if most <= fewest:
        return np.ones(len(counts))
    return 1.0 - (counts - fewest) / (most - fewest)


def binpack(
    free: Int64Array, host_free: Int64Array, shares: Shares, *, most: float = PLACEMENT_MAX, back: bool = False
) -> Float64Array:
    """Fullness of the fullest device of each row with the claims. `back`: these are part of what is not free."""
    rows = shares.rows
    host = host_free[rows] + (shares.host if back else 0)
    of_host = _part(np.full(len(rows), shares.host), host) * most
    if not shares.columns.shape[1]:
        return of_host
    best = np.zeros(len(rows))
    for column, claim in zip(shares.columns.T, shares.claims.T, strict=True):
        of_device = _part(claim, free[rows, column] + (claim if back else 0)) * most * _DEVICE
        best = np.maximum(best, (of_host * _HOST + of_device) / (_HOST + _DEVICE))
    return best


def combine(strategy: str, scores: Float64Array) -> float:
    """Score of an instance from those of its nodes: their mean, in binpack with the first node at its weight."""
    weights = np.ones(len(scores))
    weights[0] = _LEADER if strategy == "binpack" else 1.0
    return float(np.average(scores, weights=weights))


def _part(claim: Int64Array, free: Int64Array) -> Float64Array:
    """Claim over free memory; 0 where nothing is free."""
    return np.divide(claim, free, out=np.zeros(len(claim)), where=free > 0)


def _locality(table: Cluster, view: View) -> Float64Array:
    """[rows of the view] 1 where the model's files lie; and half as important, where any node of the cluster has them,
    those of its draft."""
    claim = view.claim
    near = table.rows_with(("file", claim.model))[view.slots].astype(np.float64)
    if claim.draft is None or ("file", claim.draft) not in table.named:
        return near
    return (near + _DRAFT * table.rows_with(("file", claim.draft))[view.slots]) / (1.0 + _DRAFT)


def score(strategy: str, table: Cluster, view: View, found: list[Shares], *, together: bool) -> Float64Array:
    """Scores of the candidates, placement and locality together: of each `Shares`, whose rows are one instance
    (`together`), else of the rows of the only one."""
    near = _locality(table, view) * LOCALITY_MAX
    if strategy == "spread":
        compared = np.zeros(len(table.alive), np.bool_)
        for shares in found:
            compared[view.slots[shares.rows]] = True
        spread = Spread(table, view.claim.model, np.flatnonzero(compared))
        placed = [spread.of(view.slots[shares.rows], shares.columns) for shares in found]
    else:
        placed = [binpack(view.free, view.host_free, shares) for shares in found]
    if together:
        return np.array(
            [combine(strategy, each) + near[shares.rows].mean() for each, shares in zip(placed, found, strict=True)]
        )
    return placed[0] + near[found[0].rows]

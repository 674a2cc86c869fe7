"""Scores of candidates: placement (at most 100) plus locality of the model's files (at most 5). Pure functions.

The formulas and weights are GPUStack's (of August 2026, commit 47277d79). `binpack` prefers what is nearly full,
`spread` (the default) nodes and devices where few instances run, those of the same model above all.

Spread is graded, between the fewest and the most instances that any candidate's node runs. Where some node runs none of
this model, such nodes get 85 points and up to 15 more for few instances of other models; a node that runs some gets 45,
up to 35 more for few of them and up to 20 for few others. So none of this model is preferred, but a node with few of
both passes one with none of it and the most of others. Earlier releases of GPUStack ranked by strict levels instead: an
empty node, then one that runs only other models, then one that runs only this model, then one that runs both.

Two rules differ from GPUStack's. The followers of an instance on several nodes count in binpack with their mean (there
with their sum times their number, so that a score passes 100). Spread counts an instance once in a node's total (there
once for each of its devices), and scores all nodes of an instance (there only the first).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.cluster.claims import Claim
from asyncengine.cluster.fit import Found, Shares, View
from asyncengine.cluster.table import Cluster, Counts, Int64Array

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


class Places(NamedTuple):
    """Instances that run on the nodes of a view: of this model, and of all."""

    slots: Int64Array
    """[rows] rows of the table, for the rows of the view."""
    current: Counts
    every: Counts

    @classmethod
    def of(cls, table: Cluster, slots: Int64Array, model: str) -> Places:
        return cls(slots, table.counts_of(model), table.counts())

    def totals(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Instances of this model, and of others, on each node."""
        slots = self.slots[rows]
        current = self.current.nodes[slots]
        return current, self.every.nodes[slots] - current

    def on_devices(self, rows: Int64Array, columns: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Instances of this model, and of others, on one device of each node."""
        places = self.slots[rows] * self.every.devices.shape[1] + columns  # flat indices are twice as fast as pairs
        current = self.current.devices.ravel()[places]
        return current, self.every.devices.ravel()[places] - current


def score(strategy: str, table: Cluster, view: View, claim: Claim, found: Found) -> tuple[Float64Array, list[float]]:
    """Scores of the rows of `single`, and of `teams`: placement and locality together."""
    if strategy == "spread":
        single, teams = spread(view, Places.of(table, view.slots, claim.model), found)
    else:
        single = binpack_of(view.free, view.host_free, found.single)
        teams = [combine(binpack_of(view.free, view.host_free, team).tolist()) for team in found.teams]
    single = single + _locality(view, table, claim, found.single.rows[:, None]) * LOCALITY_MAX
    for number, team in enumerate(found.teams):
        teams[number] += float(_locality(view, table, claim, team.rows[None, :])[0]) * LOCALITY_MAX
    return single, teams


# ---------------------------------------------------------------- binpack


def binpack_of(
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


def combine(scores: list[float]) -> float:
    """Score of an instance from those of its nodes: their mean, with the first node at its weight."""
    return (scores[0] * _LEADER + sum(scores[1:])) / (_LEADER + len(scores) - 1)


def _part(claim: Int64Array, free: Int64Array) -> Float64Array:
    """Claim over free memory; 0 where nothing is free."""
    parts: Float64Array = np.divide(claim, free, out=np.zeros(len(claim)), where=free > 0)
    return parts


# ---------------------------------------------------------------- spread


def spread(view: View, places: Places, found: Found) -> tuple[Float64Array, list[float]]:
    compared = np.zeros(len(view.slots), np.bool_)
    compared[np.concatenate([found.single.rows, *(team.rows for team in found.teams)])] = True
    current, others = places.totals(np.arange(len(view.slots)))
    nodes = spread_over_nodes(current, others, Among.of(current[compared], others[compared]))
    single = spread_over_devices(places, found.single, nodes[found.single.rows])
    teams = []
    for team in found.teams:
        teams.append(float(spread_over_devices(places, team, nodes[team.rows]).mean()))
    return single, teams


class Among(NamedTuple):
    """Fewest and most instances, of this model and of others, on the nodes that are compared."""

    current: tuple[int, int]
    others: tuple[int, int]

    @classmethod
    def of(cls, current: Int64Array, others: Int64Array) -> Among:
        if not len(current):
            return cls((0, 0), (0, 0))
        return cls((int(current.min()), int(current.max())), (int(others.min()), int(others.max())))


def spread_over_nodes(
    current: Int64Array, others: Int64Array, among: Among, most: float = PLACEMENT_MAX
) -> Float64Array:
    """Score of each node, at most `most`: high where few instances of this model and of others run."""
    near, far = _few(current, *among.current), _few(others, *among.others)
    if among.current[0] == 0:  # somewhere none of this model runs: that is better than anywhere else
        scores = np.where(current == 0, 0.85 + 0.15 * far, 0.45 + 0.35 * near + 0.20 * far)
    else:
        scores = 0.50 + 0.25 * near + 0.15 * far
    return scores * most


def spread_over_devices(
    places: Places, shares: Shares, nodes: Float64Array, most: float = PLACEMENT_MAX
) -> Float64Array:
    """Scores of the nodes in `shares` and of the devices there, together. `nodes`: scores of these nodes."""
    count = shares.columns.shape[1]
    if not count:
        return nodes
    total = np.zeros(len(nodes))
    for column in shares.columns.T:
        own, beside = places.on_devices(shares.rows, column)
        total = total + 1 / (1 + own + beside * _OTHERS)
    scores: Float64Array = nodes * _NODE + total / count * most * _OF_DEVICES
    return scores


def _few(counts: Int64Array, fewest: int, most: int) -> Float64Array:
    """Counts scaled to 1 for the fewest and 0 for the most."""
    if most <= fewest:
        return np.ones(len(counts))
    scaled: Float64Array = 1.0 - (counts - fewest) / (most - fewest)
    return scaled


# ---------------------------------------------------------------- locality


def _locality(view: View, table: Cluster, claim: Claim, rows: Int64Array) -> Float64Array:
    """Share of each candidate's nodes, `rows` [m, nodes], where the model's files lie; and half as important, where any
    node of the cluster has them, those of its draft."""

    def share(model: str) -> Float64Array:
        if ("file", model) not in table.named:
            return np.zeros(len(rows))
        near: Float64Array = table.rows_with(("file", model))[view.slots[rows]].sum(axis=1) / rows.shape[1]
        return near

    if claim.draft is None or ("file", claim.draft) not in table.named:
        return share(claim.model)
    return (share(claim.model) + _DRAFT * share(claim.draft)) / (1.0 + _DRAFT)

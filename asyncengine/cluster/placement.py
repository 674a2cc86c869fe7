"""Placement of one more instance of a model: filter the nodes, fit the claim, score the candidates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncengine.checks import as_choice, as_items
from asyncengine.cluster import fit
from asyncengine.cluster.claims import Claim
from asyncengine.cluster.filters import passing
from asyncengine.cluster.fit import Found, Shares, View, view_of
from asyncengine.cluster.nodes import Instance, Node, Share, State
from asyncengine.cluster.scores import STRATEGIES, score
from asyncengine.cluster.table import Cluster
from asyncengine.errors import InvalidParameter, OutOfMemory


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for an instance."""

    model: str
    stage: str
    """"device", "devices" (of one node), "nodes" or "cpu"."""
    shares: tuple[Share, ...]
    """The first leads."""
    score: float
    candidates: int
    """Number of candidates among which it was the best."""

    def instance(self, name: str, *, state: State = "starting") -> Instance:
        """The instance to add to the cluster once it is decided."""
        return Instance(name=name, model=self.model, shares=self.shares, state=state)


class Reason(NamedTuple):
    """A reason why some nodes cannot take a model."""

    what: str
    """Filter that they fell to, or "no device", "host memory", "device memory"."""
    nodes: int
    text: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model that fits nowhere now. Every node of the cluster is counted in exactly one reason."""

    model: str
    nodes: int
    reasons: tuple[Reason, ...]
    device_bytes: int
    """The largest claim on devices that would have fitted, all else being equal; 0: none."""
    cpu_bytes: int
    """The largest claim on a host's memory that would have fitted."""

    def __str__(self) -> str:
        falls = "; ".join(f"{reason.nodes} {reason.text}" for reason in self.reasons)
        could = [f"{_gib(self.device_bytes)} on devices"] if self.device_bytes else []
        could += [f"{_gib(self.cpu_bytes)} of host memory"] if self.cpu_bytes else []
        most = f"; a claim of {' or '.join(could)} would have fitted" if could else ""
        return f"{self.model} fits on none of {self.nodes} nodes: {falls or 'there are none'}{most}"

    def error(self) -> OutOfMemory:
        """The refusal as an exception."""
        return OutOfMemory(str(self))


def place(
    model: Claim,
    nodes: Cluster | Iterable[Node],
    *,
    instances: Iterable[Instance] = (),
    strategy: str = "spread",
) -> Placement | Refusal:
    """Place one more instance of `model`. Pure: nothing is taken, the same input gives the same answer.

    `nodes`: a `Cluster`, which is fast for many placements, or nodes and the `instances` that run on them.

    Raises `InvalidParameter` for what is malformed, and for no nodes at all where no `Cluster` is given.
    """
    if not isinstance(model, Claim):
        raise InvalidParameter("model", "must be a Claim", model)
    as_choice("strategy", strategy, STRATEGIES)
    if isinstance(nodes, Cluster):
        table = nodes
        if as_items("instances", instances):
            raise InvalidParameter("instances", "are those of the Cluster")
    else:
        table = Cluster(nodes, instances)
        if not len(table):
            raise InvalidParameter("nodes", "must be at least one")
    mask, fell = passing(table, model)
    view = view_of(table, mask, model)
    for stage, find in fit.STAGES:
        found = find(view, model)
        if found:
            return _best(table, view, model, strategy, stage, found)
    reasons = [Reason(*each) for each in fell] + _did_not_fit(view, model)
    devices = 0 if model.device_bytes is None else fit.largest_on_devices(view, model)
    return Refusal(model.model, len(table), tuple(reasons), devices, fit.largest_on_processors(view, model))


def _best(table: Cluster, view: View, claim: Claim, strategy: str, stage: str, found: Found) -> Placement:
    """The candidate of the highest score, the first of several."""
    single, teams = score(strategy, table, view, claim, found)
    if found.teams:
        best = max(range(len(teams)), key=teams.__getitem__)
        shares, rows, highest = found.teams[best], range(len(found.teams[best].rows)), teams[best]
    else:
        best = int(single.argmax())
        shares, rows, highest = found.single, range(best, best + 1), float(single[best])
    chosen = tuple(_share(view, table, shares, row, claim.cpus) for row in rows)
    return Placement(claim.model, stage, chosen, highest, len(single) + len(teams))


def _share(view: View, table: Cluster, shares: Shares, row: int, cpus: float) -> Share:
    slot = int(view.slots[shares.rows[row]])
    indices = table.index[slot, shares.columns[row]]
    devices = tuple((int(index), int(taken)) for index, taken in zip(indices, shares.claims[row], strict=True))
    return Share(node=table.name_of(slot), devices=devices, host_bytes=shares.host, cpus=cpus)


def _did_not_fit(view: View, claim: Claim) -> list[Reason]:
    """Reasons why nodes that passed all filters cannot take the claim, with their numbers."""
    nothing = np.zeros(len(view.slots), np.bool_)
    has = (view.kind >= 0).any(axis=1) if claim.device_bytes is not None else nothing
    enough = fit.host_suffices(view, claim)
    device = has & enough
    host = (has & ~enough) | (~has if claim.cpu_bytes is not None else nothing)
    counts = {name: int(np.count_nonzero(mask)) for name, mask in (("device memory", device), ("host memory", host))}
    counts["no device"] = len(view.slots) - sum(counts.values())
    text = {
        "device memory": "with too little free memory on devices",
        "host memory": "with too little free host memory",
        "no device": "without a device",
    }
    return [Reason(name, count, text[name]) for name, count in counts.items() if count]


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 // 100 else f"{count} bytes"

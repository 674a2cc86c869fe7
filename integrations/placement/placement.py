"""Placement of one more instance of a model: filter the nodes, fit the claim, score the candidates; and the order in
which instances are stopped.

A node falls to the first filter that it does not pass. Their order and meaning are GPUStack's: cluster, devices chosen
by hand, labels, status, backend, local path (which GPUStack looks at only where devices are chosen by hand); then CPUs,
which it does not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from asyncengine.checks import as_choice, as_items, as_number
from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.integrations.placement import fit
from asyncengine.integrations.placement.fit import Shares, View, free_memory
from asyncengine.integrations.placement.nodes import Claim, Instance, Node, Share, State, size
from asyncengine.integrations.placement.scores import STRATEGIES, Spread, binpack, combine, score
from asyncengine.integrations.placement.table import Cluster, Mask, cpu_units


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
        could = [f"{size(self.device_bytes)} on devices"] if self.device_bytes else []
        could += [f"{size(self.cpu_bytes)} of host memory"] if self.cpu_bytes else []
        most = f"; a claim of {' or '.join(could)} would have fitted" if could else ""
        return f"{self.model} fits on none of {self.nodes} nodes: {falls or 'there are none'}{most}"

    def error(self) -> OutOfMemory:
        """The refusal as an exception."""
        return OutOfMemory(str(self))


def place(
    model: Claim, nodes: Cluster | Iterable[Node], *, instances: Iterable[Instance] = (), strategy: str = "spread"
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
    mask, fell = _passing(table, model)
    view = View(table, mask, model)
    for stage, find in fit.STAGES:
        found = find(view)
        if found:
            return _best(table, view, strategy, stage, found)
    on_processors = 0 if model.cpu_bytes is None else int(view.host_free.max(initial=0))
    reasons = (*fell, *_did_not_fit(view))
    return Refusal(model.model, len(table), reasons, fit.largest_on_devices(view), on_processors)


def _filters(table: Cluster, claim: Claim) -> Iterator[tuple[str, Mask, str]]:
    """Name of each filter that the claim has something against nodes by, the rows that pass, and the words for a node
    that does not."""
    if claim.cluster is not None:
        yield "cluster", table.rows_with(("cluster", claim.cluster)), f"not in cluster {claim.cluster!r}"
    if claim.on:
        yield "devices", np.logical_or.reduce(table.chosen(claim.on), axis=1), "none of the chosen devices"
    if claim.labels:
        has = [table.rows_with(("label", key, value)) for key, value in claim.labels]
        words = ", ".join(f"{key}={value}" for key, value in claim.labels)
        yield "labels", np.logical_and.reduce(has), f"without the labels {words}"
    yield "status", table.ready, "not ready"
    if claim.backend is not None:
        wanted = (claim.backend,) if claim.version is None else (claim.backend, claim.version)
        yield "backend", table.rows_with(("backend", *wanted)), f"without {' '.join(wanted)}"
    if claim.path is not None:
        yield "path", table.rows_with(("path", claim.path)), f"no path {claim.path!r}"
    if claim.cpus:
        enough: Mask = table.cpu_limit - table.cpu_used >= cpu_units(claim.cpus)
        yield "cpus", enough, f"with fewer than {claim.cpus:g} free CPUs"


def _passing(table: Cluster, claim: Claim) -> tuple[Mask, list[Reason]]:
    """[rows] nodes that pass all filters; and the reasons why others do not."""
    mask, left = table.alive, len(table)
    fell: list[Reason] = []
    for name, passes, words in _filters(table, claim):
        mask = mask & passes
        remaining = int(np.count_nonzero(mask))
        if remaining < left:
            fell.append(Reason(name, left - remaining, words))
        left = remaining
    return mask, fell


def _best(table: Cluster, view: View, strategy: str, stage: str, found: list[Shares]) -> Placement:
    """The candidate of the highest score, the first of several."""
    scores = score(strategy, table, view, found, together=stage == "nodes")
    best = int(np.argmax(scores))
    shares, rows = (
        (found[best], range(len(found[best].rows))) if stage == "nodes" else (found[0], range(best, best + 1))
    )
    chosen = tuple(_share(view, table, shares, row) for row in rows)
    return Placement(view.claim.model, stage, chosen, float(scores[best]), len(scores))


def _share(view: View, table: Cluster, shares: Shares, row: int) -> Share:
    slot = int(view.slots[shares.rows[row]])
    indices = table.index[slot, shares.columns[row]].tolist()
    devices = tuple(zip(indices, shares.claims[row].tolist(), strict=True))
    return Share(node=table.name_of(slot), devices=devices, host_bytes=shares.host, cpus=view.claim.cpus)


def _did_not_fit(view: View) -> list[Reason]:
    """Reasons why nodes that passed all filters cannot take the claim, with their numbers."""
    claim, enough = view.claim, view.host_suffices
    has = (view.kind >= 0).any(axis=1) & (claim.device_bytes is not None)
    host = (has & ~enough) | (~has & (claim.cpu_bytes is not None))
    reasons = (
        ("device memory", has & enough, "with too little free memory on devices"),
        ("host memory", host, "with too little free host memory"),
        ("no device", ~has & ~host, "without a device"),
    )
    return [Reason(what, count, text) for what, mask, text in reasons if (count := int(np.count_nonzero(mask)))]


STATUS_MAX, OFFLOAD_MAX, PLACEMENT_MAX = 100.0, 10.0, 1.0


class Ranked(NamedTuple):
    """An instance, and the score of keeping it."""

    instance: Instance
    score: float


def rank_for_removal(
    cluster: Cluster, model: str, *, strategy: str = "spread", total_max: float | None = None,
    names: Iterable[str] | None = None,
) -> tuple[Ranked, ...]:  # fmt: skip
    """The instances of `model`, the first to be stopped first; of equal scores, the oldest.

    GPUStack's rule: status (at most 100) + offload (10) + placement (1), the lowest goes first. Placement by binpack is
    scored as if the instance were about to be placed where it is: its own claims count as free.

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

    def keeping(instance: Instance) -> float:
        shares = [_as_shares(cluster, share) for share in instance.shares]
        if strategy == "spread":
            scores = [spread.of(each.rows, each.columns) for each in shares]
        else:
            scores = [binpack(free, host_free, each, most=PLACEMENT_MAX, back=True) for each in shares]
        on_devices, layers = instance.layers or (0, 1)
        offload = on_devices / layers * OFFLOAD_MAX
        return _status(cluster, instance) + offload + combine(strategy, np.concatenate(scores))

    ranked = [Ranked(each, keeping(each) * scale) for each in found]
    return tuple(sorted(ranked, key=lambda each: each.score))


def _status(cluster: Cluster, instance: Instance) -> float:
    """Score of an instance's state. On several nodes, the first is looked at."""
    ready = bool(cluster.ready[cluster.row_of(instance.shares[0].node)])
    if not ready or instance.state == "failed":
        return 0.0
    return STATUS_MAX if instance.state == "running" else STATUS_MAX * 0.5


def _as_shares(cluster: Cluster, share: Share) -> Shares:
    row, columns = cluster.place_of(share)
    claims = [taken for _, taken in share.devices]
    return Shares(np.array([row]), np.array([columns], np.int64), np.array([claims], np.int64), share.host_bytes)

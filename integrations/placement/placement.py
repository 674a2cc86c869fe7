"""Placement of one more instance of a model: filter the nodes, fit the claim, score the candidates; and the order in
which instances are stopped.

A node falls to the first filter that it does not pass. Their order and meaning are GPUStack's: cluster, devices chosen
by hand, labels, status, backend, local path (which GPUStack looks at only where devices are chosen by hand); then CPUs,
which it does not count.

A score is that of the place (at most 100) plus locality of the model's files (at most 5). The formulas and weights are
GPUStack's (of August 2026, commit 47277d79) but for two rules (docs/howto/placement.md). `binpack` prefers what is
nearly full, `spread` (the default) nodes and devices where few instances run, those of the same model above all: graded
between the fewest and the most instances that any candidate's node runs, none of this model is preferred, but a node
with few of both passes one with none of it and the most of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.checks import as_choice, as_items, as_number
from asyncengine.errors import InvalidParameter, OutOfMemory
from asyncengine.integrations.placement import fit
from asyncengine.integrations.placement.fit import Shares, View, free_memory
from asyncengine.integrations.placement.nodes import Claim, Instance, Node, Share, State, size
from asyncengine.integrations.placement.table import Cluster, Int64Array, Mask, cpu_units

Float64Array = NDArray[np.float64]

SCORE_MAX, LOCALITY_MAX = 100.0, 5.0
_HOST, _DEVICE = 1.0, 2.0
"""Weights of memory in binpack."""
_LEADER = 5.0
"""Weight of the first node of several; each other has 1."""
_NODE, _OF_DEVICES = 0.85, 0.15
"""Weights of a node's score and its devices' in spread."""
_OTHER_MODELS = 0.2
"""Weight of another model's instance on a device, beside one of the same."""
_DRAFT = 0.5
STRATEGIES = ("spread", "binpack")


class Spread:
    """Scores of nodes and devices by how few instances run there: of one model above all, and of others."""

    def __init__(self, table: Cluster, model: str, compared: Int64Array, most: float = SCORE_MAX) -> None:
        """`compared`: [n] rows of the table, whose fewest and most instances the scores lie between. `most`: the score
        of a node where nothing runs."""
        self._current, self._every, self._most = table.counts_of(model), table.counts(), most
        current = self._current.nodes
        near, far = _few(current, compared), _few(self._every.nodes - current, compared)
        if current[compared].min() == 0:  # a node without this model is preferred to all that run it
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
            flat = rows * width + column  # flat indices are twice as fast as pairs
            current = self._current.devices.ravel()[flat]
            other_models = self._every.devices.ravel()[flat] - current
            total = total + 1 / (1 + current + other_models * _OTHER_MODELS)
        return nodes * _NODE + total / count * self._most * _OF_DEVICES


def _few(counts: Int64Array, compared: Int64Array) -> Float64Array:
    """Counts scaled to 1 for the fewest of those in the `compared` rows, and 0 for the most."""
    fewest, most = int(counts[compared].min()), int(counts[compared].max())
    if most <= fewest:
        return np.ones(len(counts))
    return 1.0 - (counts - fewest) / (most - fewest)


def binpack(
    free: Int64Array, host_free: Int64Array, shares: Shares, *, most: float = SCORE_MAX, back: bool = False
) -> Float64Array:
    """Scores of nodes by how full the claims make their fullest device. `back`: the claims run there already, so their
    bytes are added to the free ones."""
    rows = shares.rows
    host = host_free[rows] + (shares.host if back else 0)
    of_host = _fraction(np.full(len(rows), shares.host), host) * most
    if not shares.columns.shape[1]:
        return of_host
    best = np.zeros(len(rows))
    for column, claim in zip(shares.columns.T, shares.claims.T, strict=True):
        of_device = _fraction(claim, free[rows, column] + (claim if back else 0)) * most * _DEVICE
        best = np.maximum(best, (of_host * _HOST + of_device) / (_HOST + _DEVICE))
    return best


def combine(strategy: str, scores: Float64Array) -> float:
    """Score of an instance from those of its nodes: their mean, in binpack with the first node at its weight."""
    weights = np.ones(len(scores))
    weights[0] = _LEADER if strategy == "binpack" else 1.0
    return float(np.average(scores, weights=weights))


def _fraction(claim: Int64Array, free: Int64Array) -> Float64Array:
    """Claim over free memory; 0 where nothing is free."""
    return np.divide(claim, free, out=np.zeros(len(claim)), where=free > 0)


def _locality(table: Cluster, view: View) -> Float64Array:
    """[rows of the view] 1 where the model's files lie. If any node has the files of its draft, they count half."""
    claim = view.claim
    near = table.rows_with(("file", claim.model))[view.slots].astype(np.float64)
    if claim.draft is None or ("file", claim.draft) not in table.named:
        return near
    return (near + _DRAFT * table.rows_with(("file", claim.draft))[view.slots]) / (1.0 + _DRAFT)


def score(strategy: str, table: Cluster, view: View, teams: list[Shares], *, together: bool) -> Float64Array:
    """Scores of the candidates, placement and locality together. `together`: each `Shares` is one instance on several
    nodes; else each row of the only `Shares` is a candidate."""
    near = _locality(table, view) * LOCALITY_MAX
    if strategy == "spread":
        compared = np.zeros(len(table.alive), np.bool_)
        for shares in teams:
            compared[view.slots[shares.rows]] = True
        spread = Spread(table, view.claim.model, np.flatnonzero(compared))
        placed = [spread.of(view.slots[shares.rows], shares.columns) for shares in teams]
    else:
        placed = [binpack(view.free, view.host_free, shares) for shares in teams]
    if together:
        return np.array(
            [combine(strategy, each) + near[shares.rows].mean() for each, shares in zip(placed, teams, strict=True)]
        )
    return placed[0] + near[teams[0].rows]


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes and devices for an instance."""

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
    """Name of the filter that excluded them, or "no device", "host memory", "device memory"."""
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

    Raises `InvalidParameter` for malformed input, and for no nodes at all where no `Cluster` is given.
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
        teams = find(view)
        if teams:
            return _best(table, view, strategy, stage, teams)
    on_processors = 0 if model.cpu_bytes is None else int(view.host_free.max(initial=0))
    reasons = (*fell, *_did_not_fit(view))
    return Refusal(model.model, len(table), reasons, fit.largest_on_devices(view), on_processors)


def _filters(table: Cluster, claim: Claim) -> Iterator[tuple[str, Mask, str]]:
    """The filters that this claim needs: name, [rows] nodes that pass, and the words for a node that does not."""
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


def _best(table: Cluster, view: View, strategy: str, stage: str, teams: list[Shares]) -> Placement:
    """The candidate of the highest score, the first of several."""
    scores = score(strategy, table, view, teams, together=stage == "nodes")
    best = int(np.argmax(scores))
    shares, rows = (
        (teams[best], range(len(teams[best].rows))) if stage == "nodes" else (teams[0], range(best, best + 1))
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
    return [Reason(name, count, text) for name, mask, text in reasons if (count := int(np.count_nonzero(mask)))]


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
    instances = [i for i in cluster.instances.values() if i.model == model and (wanted is None or i.name in wanted)]
    if wanted is not None and len(instances) < len(wanted):
        missing = next(name for name in wanted if name not in {instance.name for instance in instances})
        raise InvalidParameter("names", f"{missing!r} is no instance of {model!r}")
    if not instances:
        return ()
    free, host_free = free_memory(cluster, np.arange(len(cluster.alive)))
    spread = Spread(cluster, model, np.flatnonzero(cluster.alive), PLACEMENT_MAX)

    def keeping(instance: Instance) -> float:
        shares = [_as_shares(cluster, share) for share in instance.shares]
        if strategy == "spread":
            scores = [spread.of(node.rows, node.columns) for node in shares]
        else:
            scores = [binpack(free, host_free, node, most=PLACEMENT_MAX, back=True) for node in shares]
        on_devices, layers = instance.layers or (0, 1)
        offload = on_devices / layers * OFFLOAD_MAX
        return _status(cluster, instance) + offload + combine(strategy, np.concatenate(scores))

    ranked = [Ranked(instance, keeping(instance) * scale) for instance in instances]
    return tuple(sorted(ranked, key=lambda entry: entry.score))


def _status(cluster: Cluster, instance: Instance) -> float:
    """Score of an instance's state and of its first node's readiness."""
    ready = bool(cluster.ready[cluster.row_of(instance.shares[0].node)])
    if not ready or instance.state == "failed":
        return 0.0
    return STATUS_MAX if instance.state == "running" else STATUS_MAX * 0.5


def _as_shares(cluster: Cluster, share: Share) -> Shares:
    row, columns = cluster.position_of(share)
    claims = [count for _, count in share.devices]
    return Shares(np.array([row]), np.array([columns], np.int64), np.array([claims], np.int64), share.host_bytes)

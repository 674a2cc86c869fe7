"""Stages that fit a claim, from one device to several nodes; the first that finds anything decides.

A device gives what is free of it, or, where the claim has a utilization, that share of it if so much is free. On k
devices each gives what each has a copy of and the k-th part of the rest, as tensor parallelism divides a model; as few
devices as possible. So more free memory never leads to a later stage or to more devices: whatever fitted still does.
The stages are GPUStack's, whose own rules do not have that property (docs/howto/placement.md compares them).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncengine.cluster.claims import Claim
from asyncengine.cluster.table import Cluster, Int64Array, Mask

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Nodes that passed all filters, and the memory that is free there, in the order that breaks ties."""

    slots: Int64Array
    """[rows] rows of the table."""
    total: Int64Array
    """[rows, columns] bytes that a device has; 0 where there is none, or none that the claim may use."""
    free: Int64Array
    """[rows, columns] bytes that can be taken."""
    kind: NDArray[np.int32]
    """[rows, columns] number of the device's kind; -1: no device."""
    host_free: Int64Array
    unified: Mask
    kinds: tuple[int, ...]
    """Kinds of devices, in the order in which they are first met."""
    memo: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Intermediate results for the claim that it was made for, shared by the stages."""

    def once(self, what: str, kind: int, work: Callable[[], T]) -> T:
        """The result of `work()`, which is called the first time only."""
        if (what, kind) not in self.memo:
            self.memo[what, kind] = work()
        found: T = self.memo[what, kind]
        return found


def view_of(table: Cluster, mask: Mask, claim: Claim) -> View:
    """The view of the rows in `mask`. Nodes where the model's files lie come first."""
    slots = np.flatnonzero(mask)
    if ("file", claim.model) in table.named:
        has = table.rows_with(("file", claim.model))[slots]
        slots = np.concatenate((slots[has], slots[~has]))
    kind, total = table.kind[slots], table.total[slots]
    if claim.on:
        mine = table.chosen(claim.on)[slots]
        kind, total = np.where(mine, kind, -1), np.where(mine, total, 0)
    free, host_free = free_memory(table, slots)
    if claim.on:
        free = np.where(kind >= 0, free, 0)
    return View(slots, total, free, kind, host_free, table.unified[slots], _kinds(kind, len(table.kinds)))


def free_memory(table: Cluster, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Free bytes of devices [rows, columns] and of hosts [rows], for the table's rows `slots`."""
    used, free = table.used[slots], table.limit[slots]
    free -= used  # in place: each array of a large cluster is memory that the system must map
    np.maximum(free, 0, out=free)
    host_free = np.maximum(table.host_limit[slots] - table.host_used[slots], 0)
    shared = np.flatnonzero(table.unified[slots])
    if len(shared):  # the device's claims are on the same bytes
        taken = table.device_reserved[slots[shared]] + used[shared].sum(axis=1)
        host_free[shared] = np.maximum(host_free[shared] - taken, 0)
        free[shared] = np.minimum(free[shared], host_free[shared, None])
    return free, host_free


def _kinds(kind: NDArray[np.int32], known: int) -> tuple[int, ...]:
    flat = kind.ravel()
    found: list[tuple[int, int]] = []
    for each in range(known):
        there = flat == each
        if len(there) and there[first := int(there.argmax())]:
            found.append((first, each))
    return tuple(each for _, each in sorted(found))


class Shares(NamedTuple):
    """One node's part of a placement in each row, of equally many devices."""

    rows: Int64Array
    """[m] rows of the view."""
    columns: Int64Array
    """[m, k] devices, in the order in which they were chosen; k = 0: the host's processors."""
    claims: Int64Array
    """[m, k] bytes of each device."""
    host: int
    """Bytes of host memory on each node."""


class Found(NamedTuple):
    """Candidates: each row of `single`, or each of `teams`, whose first row leads."""

    single: Shares
    teams: tuple[Shares, ...] = ()

    def __bool__(self) -> bool:
        return len(self.single.rows) > 0 or len(self.teams) > 0


NOTHING = Found(Shares(np.empty(0, np.int64), np.empty((0, 0), np.int64), np.empty((0, 0), np.int64), 0))


def offers(view: View, claim: Claim) -> Int64Array:
    """[rows, columns] bytes that each device gives to this claim; 0 where the host's memory does not suffice."""
    return view.once("offers", -1, lambda: _offers(view, claim))


def _offers(view: View, claim: Claim) -> Int64Array:
    given = view.free
    if view.unified.any():
        beside = np.maximum(view.host_free - claim.host_bytes, 0)
        given = np.where(view.unified[:, None], np.minimum(given, beside[:, None]), given)
    if claim.utilization > 0:
        wanted = (view.total * claim.utilization).astype(np.int64)
        given = np.where(given >= wanted, wanted, 0)
    return np.where((view.kind >= 0) & host_suffices(view, claim)[:, None], given, 0)


def host_suffices(view: View, claim: Claim) -> Mask:
    mask: Mask = view.host_free >= claim.host_bytes
    return mask


def on_one_device(view: View, claim: Claim) -> Found:
    if claim.device_bytes is None or (claim.devices or 1) > 1:
        return NOTHING
    given = offers(view, claim)
    fits = given >= claim.device_bytes
    masks = [fits] if len(view.kinds) < 2 else [fits & (view.kind == kind) for kind in view.kinds]
    places = [np.nonzero(mask) for mask in masks]
    rows = np.concatenate([place[0] for place in places])
    columns = np.concatenate([place[1] for place in places])
    claims = np.full(len(rows), claim.device_bytes) if claim.utilization == 0 else given[rows, columns]
    return Found(Shares(rows, columns[:, None], claims[:, None], claim.host_bytes))


def on_several_devices(view: View, claim: Claim) -> Found:
    """Place on the fewest devices of one node and one kind that suffice."""
    if claim.device_bytes is None or claim.devices == 1:
        return NOTHING
    ranked = [_ranked(view, claim, kind) for kind in view.kinds]
    for count in _counts(view, claim):
        if claim.devices not in (None, count):
            continue
        part = claim.part(count)
        found = []
        for order, given in ranked:
            rows = np.flatnonzero(given[:, count - 1] >= part)
            columns = order[rows, :count]
            found.append((rows, columns, _taken(given[rows, :count], claim, part)))
        if any(len(rows) for rows, _, _ in found):
            rows, columns, claims = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            return Found(Shares(rows, columns, claims, claim.host_bytes))
    return NOTHING


def on_several_nodes(view: View, claim: Claim) -> Found:
    """Place on equally many devices of one kind on each node: the fewest devices that suffice, then the fewest nodes. A
    team of each kind for which as few suffice. (One node never does: the stages before have tried that.)"""
    if claim.device_bytes is None or not claim.several_nodes:
        return NOTHING
    best = (0, 0)
    teams: list[Shares] = []
    for kind in view.kinds:
        order, given = _ranked(view, claim, kind)
        for count in _counts(view, claim, least=1):
            nodes = np.argsort(-given[:, count - 1], kind="stable")
            sizes = np.arange(1, len(nodes) + 1) * count
            fits = given[nodes, count - 1] >= claim.part(sizes)
            if claim.devices is not None:
                fits &= sizes == claim.devices
            if not fits.any():
                continue
            many = int(fits.argmax()) + 1
            if teams and (many * count, many) > best:
                continue
            if (many * count, many) != best:
                best, teams = (many * count, many), []
            rows = np.sort(nodes[:many])
            claims = _taken(given[rows, :count], claim, claim.part(best[0]))
            teams.append(Shares(rows, order[rows, :count], claims, claim.host_bytes))
    return Found(NOTHING.single, tuple(teams))


def on_processors(view: View, claim: Claim) -> Found:
    """Place on the processors of one node."""
    if claim.cpu_bytes is None:
        return NOTHING
    rows = np.flatnonzero(view.host_free >= claim.cpu_bytes)
    none = np.empty((len(rows), 0), np.int64)
    return Found(Shares(rows, none, none, claim.cpu_bytes))


STAGES: tuple[tuple[str, Callable[[View, Claim], Found]], ...] = (
    ("device", on_one_device), ("devices", on_several_devices), ("nodes", on_several_nodes), ("cpu", on_processors),
)  # fmt: skip


def largest_on_devices(view: View, claim: Claim) -> int:
    """The largest `device_bytes` for which one of the stages would find devices, all else being equal."""
    most = 0
    for kind in view.kinds:
        _, given = _ranked(view, claim, kind)
        for count in _counts(view, claim, least=1):
            offered = -np.sort(-given[:, count - 1])[: None if claim.several_nodes else 1]
            sizes = np.arange(1, len(offered) + 1) * count
            if claim.devices is not None:
                offered = np.where(sizes == claim.devices, offered, 0)
            most = max(most, int(claim.whole(offered, sizes).max(initial=0)))
    return most if most >= claim.copied_bytes else 0


def largest_on_processors(view: View, claim: Claim) -> int:
    """The largest `cpu_bytes` that would fit."""
    return 0 if claim.cpu_bytes is None else int(view.host_free.max(initial=0))


def _counts(view: View, claim: Claim, least: int = 2) -> list[int]:
    """Numbers of devices of one node that the model can be split over."""
    return [count for count in range(least, view.kind.shape[1] + 1) if claim.divides(count)]


def _ranked(view: View, claim: Claim, kind: int) -> tuple[Int64Array, Int64Array]:
    """Columns and bytes of the devices of this kind on each node, those that give most first."""

    def rank() -> tuple[Int64Array, Int64Array]:
        given = offers(view, claim)
        if len(view.kinds) > 1:
            given = np.where(view.kind == kind, given, 0)
        order = np.argsort(-given, axis=1, kind="stable")
        return order, np.take_along_axis(given, order, axis=1)

    return view.once("ranked", kind, rank)


def _taken(given: Int64Array, claim: Claim, part: int) -> Int64Array:
    return given if claim.utilization > 0 else np.full_like(given, part)

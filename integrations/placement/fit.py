"""Stages that fit a claim, from one device to several nodes; the first that finds candidates decides.

A device offers its free memory, or, where the claim has a utilization, that share of its memory if it is free. On k
devices each takes the copied bytes and the k-th part of the rest, as tensor parallelism divides a model; the fewest
devices are taken. So more free memory never leads to a later stage or to more devices: what fitted before still fits.
The stages are GPUStack's, whose own rules do not have that property (docs/howto/placement.md compares them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.integrations.placement.nodes import Claim
from asyncengine.integrations.placement.table import Cluster, Int64Array, Mask


class View:
    """Nodes that passed all filters, and the memory that is free there for a claim. Nodes that have the model's files
    come first, as the order breaks ties."""

    def __init__(self, table: Cluster, mask: Mask, claim: Claim) -> None:
        """`mask`: [rows of the table] the nodes."""
        slots = np.flatnonzero(mask)
        if ("file", claim.model) in table.named:
            has = table.rows_with(("file", claim.model))[slots]
            slots = np.concatenate((slots[has], slots[~has]))
        self.claim = claim
        self.slots: Int64Array = slots
        """[rows] rows of the table."""
        self.kind: NDArray[np.int32] = table.kind[slots]
        """[rows, columns] number of the device's kind; -1: there is none, or none that the claim may use."""
        self.total: Int64Array = table.total[slots]
        """[rows, columns] bytes that a device has."""
        self.free, self.host_free = free_memory(table, slots)
        self.unified: Mask = table.unified[slots]
        if claim.on:
            self.kind = np.where(table.chosen(claim.on)[slots], self.kind, -1)
        self.kinds = _kinds(self.kind, len(table.kinds))
        """Kinds of devices, in the order in which they are first met."""

    @cached_property
    def host_suffices(self) -> Mask:
        """[rows] nodes that have the host memory that the claim takes beside devices."""
        return self.host_free >= self.claim.host_bytes

    @cached_property
    def offers(self) -> Int64Array:
        """[rows, columns] bytes that each device offers; 0 where the host's memory does not suffice."""
        offered, claim = self.free, self.claim
        if self.unified.any():
            beside = np.maximum(self.host_free - claim.host_bytes, 0)
            offered = np.where(self.unified[:, None], np.minimum(offered, beside[:, None]), offered)
        if claim.utilization > 0:
            wanted = (self.total * claim.utilization).astype(np.int64)
            offered = np.where(offered >= wanted, wanted, 0)
        return np.where((self.kind >= 0) & self.host_suffices[:, None], offered, 0)

    @cached_property
    def ranked(self) -> list[tuple[Int64Array, Int64Array]]:
        """For each kind of device: [rows, columns] columns and offers of each node's devices, largest offers first."""
        by_type = []
        for kind in self.kinds:
            offered = self.offers if len(self.kinds) == 1 else np.where(self.kind == kind, self.offers, 0)
            order = np.argsort(-offered, axis=1, kind="stable")
            by_type.append((order, np.take_along_axis(offered, order, axis=1)))
        return by_type

    def counts(self, least: int) -> Iterator[int]:
        """Numbers of devices of one node, from `least` on, that the model can be split over."""
        return filter(self.claim.divides, range(least, self.kind.shape[1] + 1))


def free_memory(table: Cluster, slots: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Free bytes of devices [rows, columns] and of hosts [rows], for the table's rows `slots`."""
    used, free = table.used[slots], table.limit[slots]
    free -= used  # in place: mapping a new array for a large cluster takes longer than the subtraction
    np.maximum(free, 0, out=free)
    host_free = np.maximum(table.host_limit[slots] - table.host_used[slots], 0)
    shared = np.flatnonzero(table.unified[slots])
    if len(shared):  # the device's claims are on the same bytes
        device_bytes = table.device_reserved[slots[shared]] + used[shared].sum(axis=1)
        host_free[shared] = np.maximum(host_free[shared] - device_bytes, 0)
        free[shared] = np.minimum(free[shared], host_free[shared, None])
    return free, host_free


def _kinds(kind: NDArray[np.int32], count: int) -> tuple[int, ...]:
    flat = kind.ravel()
    first_met: list[tuple[int, int]] = []
    for number in range(count):
        matches = flat == number
        if len(matches) and matches[first := int(matches.argmax())]:
            first_met.append((first, number))
    return tuple(number for _, number in sorted(first_met))


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


def on_one_device(view: View) -> list[Shares]:
    """Place on one device, of any kind."""
    claim = view.claim
    if claim.device_bytes is None or (claim.devices or 1) > 1:
        return []
    fits = view.offers >= claim.device_bytes
    masks = [fits] if len(view.kinds) < 2 else [fits & (view.kind == kind) for kind in view.kinds]
    rows, columns = np.concatenate([np.nonzero(mask) for mask in masks], axis=1)
    return _shares(view, rows, columns[:, None], view.offers[rows, columns][:, None], claim.device_bytes)


def on_several_devices(view: View) -> list[Shares]:
    """Place on the fewest devices of one node and one kind that suffice."""
    claim = view.claim
    if claim.device_bytes is None or claim.devices == 1:
        return []
    for count in view.counts(2):
        if claim.devices not in (None, count):
            continue
        each_bytes, candidates = claim.per_device(count), list[Shares]()
        for order, offered in view.ranked:
            rows = np.flatnonzero(offered[:, count - 1] >= each_bytes)
            candidates += _shares(view, rows, order[rows, :count], offered[rows, :count], each_bytes)
        if candidates:
            rows, columns, claims = (np.concatenate(arrays) for arrays in list(zip(*candidates, strict=True))[:3])
            return [Shares(rows, columns, claims, claim.host_bytes)]
    return []


def on_several_nodes(view: View) -> list[Shares]:
    """Place on equally many devices of one kind on each node: the fewest devices that suffice, then the fewest nodes.
    One `Shares` for each kind for which as few suffice. (One node never suffices: the stages before tried that.)"""
    claim = view.claim
    if claim.device_bytes is None or not claim.several_nodes:
        return []
    best = (0, 0)
    teams: list[Shares] = []
    for order, offered in view.ranked:
        for count in view.counts(1):
            nodes = np.argsort(-offered[:, count - 1], kind="stable")
            sizes = np.arange(1, len(nodes) + 1) * count
            fits = offered[nodes, count - 1] >= claim.per_device(sizes)
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
            teams += _shares(view, rows, order[rows, :count], offered[rows, :count], claim.per_device(many * count))
    return teams


def on_processors(view: View) -> list[Shares]:
    """Place on the processors of one node."""
    if view.claim.cpu_bytes is None:
        return []
    rows = np.flatnonzero(view.host_free >= view.claim.cpu_bytes)
    none = np.empty((len(rows), 0), np.int64)
    return [Shares(rows, none, none, view.claim.cpu_bytes)] if len(rows) else []


STAGES: tuple[tuple[str, Callable[[View], list[Shares]]], ...] = (
    ("device", on_one_device), ("devices", on_several_devices), ("nodes", on_several_nodes), ("cpu", on_processors),
)  # fmt: skip
"""Name of each stage, and the function that finds its candidates: each row of the one `Shares`; in stage "nodes" each
`Shares`, whose rows are one instance's nodes, the leader first. An empty list if nothing fits."""


def largest_on_devices(view: View) -> int:
    """The largest `device_bytes` for which one of the stages would find devices, all else being equal; 0 if none."""
    most, claim = 0, view.claim
    if claim.device_bytes is None:
        return 0
    for _, offered in view.ranked:
        for count in view.counts(1):
            most_first = -np.sort(-offered[:, count - 1])[: None if claim.several_nodes else 1]
            sizes = np.arange(1, len(most_first) + 1) * count
            if claim.devices is not None:
                most_first = np.where(sizes == claim.devices, most_first, 0)
            most = max(most, int(claim.largest(most_first, sizes).max(initial=0)))
    return most if most >= claim.copied_bytes else 0


def _shares(view: View, rows: Int64Array, columns: Int64Array, offers: Int64Array, each_bytes: int) -> list[Shares]:
    """The shares of these devices as a list, empty without rows. With a utilization each device's whole offer is taken,
    else `each_bytes`."""
    claims = offers if view.claim.utilization > 0 else np.full_like(offers, each_bytes)
    return [Shares(rows, columns, claims, view.claim.host_bytes)] if len(rows) else []

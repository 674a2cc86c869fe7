"""Stages that fit a claim, from one device to several nodes; the first that finds anything decides.

A device gives what is free of it, or, where the claim has a utilization, that share of it if so much is free. On k
devices each gives what each has a copy of and the k-th part of the rest, as tensor parallelism divides a model; as few
devices as possible. So more free memory never leads to a later stage or to more devices: whatever fitted still does.
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
    """Nodes that passed all filters, and the memory that is free there for a claim. Those where the model's files lie
    come first: the order breaks ties."""

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
        """[rows, columns] bytes that each device gives; 0 where the host's memory does not suffice."""
        given, claim = self.free, self.claim
        if self.unified.any():
            beside = np.maximum(self.host_free - claim.host_bytes, 0)
            given = np.where(self.unified[:, None], np.minimum(given, beside[:, None]), given)
        if claim.utilization > 0:
            wanted = (self.total * claim.utilization).astype(np.int64)
            given = np.where(given >= wanted, wanted, 0)
        return np.where((self.kind >= 0) & self.host_suffices[:, None], given, 0)

    @cached_property
    def ranked(self) -> list[tuple[Int64Array, Int64Array]]:
        """Columns and bytes of the devices of each kind on each node, those that give most first."""
        found = []
        for kind in self.kinds:
            given = self.offers if len(self.kinds) == 1 else np.where(self.kind == kind, self.offers, 0)
            order = np.argsort(-given, axis=1, kind="stable")
            found.append((order, np.take_along_axis(given, order, axis=1)))
        return found

    def counts(self, least: int) -> Iterator[int]:
        """Numbers of devices of one node, from `least` on, that the model can be split over."""
        return filter(self.claim.divides, range(least, self.kind.shape[1] + 1))


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


def on_one_device(view: View) -> list[Shares]:
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
        part, found = claim.part(count), list[Shares]()
        for order, given in view.ranked:
            rows = np.flatnonzero(given[:, count - 1] >= part)
            found += _shares(view, rows, order[rows, :count], given[rows, :count], part)
        if found:
            rows, columns, claims = (np.concatenate(arrays) for arrays in list(zip(*found, strict=True))[:3])
            return [Shares(rows, columns, claims, claim.host_bytes)]
    return []


def on_several_nodes(view: View) -> list[Shares]:
    """Place on equally many devices of one kind on each node: the fewest devices that suffice, then the fewest nodes. A
    team of each kind for which as few suffice. (One node never does: the stages before have tried that.)"""
    claim = view.claim
    if claim.device_bytes is None or not claim.several_nodes:
        return []
    best = (0, 0)
    teams: list[Shares] = []
    for order, given in view.ranked:
        for count in view.counts(1):
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
            teams += _shares(view, rows, order[rows, :count], given[rows, :count], claim.part(many * count))
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
"""Name of each stage, and what finds its candidates: each row of one `Shares`, or where an instance takes several nodes
("nodes") the rows of each together, the first of which leads. None: an empty list."""


def largest_on_devices(view: View) -> int:
    """The largest `device_bytes` for which one of the stages would find devices, all else being equal; 0: none."""
    most, claim = 0, view.claim
    if claim.device_bytes is None:
        return 0
    for _, given in view.ranked:
        for count in view.counts(1):
            offered = -np.sort(-given[:, count - 1])[: None if claim.several_nodes else 1]
            sizes = np.arange(1, len(offered) + 1) * count
            if claim.devices is not None:
                offered = np.where(sizes == claim.devices, offered, 0)
            most = max(most, int(claim.whole(offered, sizes).max(initial=0)))
    return most if most >= claim.copied_bytes else 0


def _shares(view: View, rows: Int64Array, columns: Int64Array, given: Int64Array, part: int) -> list[Shares]:
    """Shares of devices that give so much, if there are any: with a utilization all of it is taken, else `part` of
    each."""
    claims = given if view.claim.utilization > 0 else np.full_like(given, part)
    return [Shares(rows, columns, claims, view.claim.host_bytes)] if len(rows) else []

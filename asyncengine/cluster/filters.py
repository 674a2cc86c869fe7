"""Which nodes come into question at all: filters in a fixed order, each a small pure function over the whole table.

A filter says which rows pass, as an array of bool; None: it has nothing against any. A node falls to the first filter
that it does not pass. Order and meaning are GPUStack's: cluster, devices chosen by hand, labels, status, backend, local
path (which GPUStack looks at only where devices are chosen by hand); then CPUs, which it does not count.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from asyncengine.cluster.claims import Claim
from asyncengine.cluster.table import Cluster, parts_of

Mask = NDArray[np.bool_]
Filter = Callable[[Cluster, Claim], "Mask | None"]


def in_cluster(table: Cluster, claim: Claim) -> Mask | None:
    if claim.cluster is None:
        return None
    return np.asarray(table.cluster == table.clusters.get(claim.cluster, -1), np.bool_)


def has_chosen_devices(table: Cluster, claim: Claim) -> Mask | None:
    if not claim.on:
        return None
    mask: Mask = np.logical_or.reduce(chosen(table, claim), axis=1)
    return mask


def has_labels(table: Cluster, claim: Claim) -> Mask | None:
    return _with_all(table, [("label", key, value) for key, value in claim.labels])


def is_ready(table: Cluster, claim: Claim) -> Mask | None:
    return table.ready


def has_backend(table: Cluster, claim: Claim) -> Mask | None:
    if claim.backend is None:
        return None
    return with_name(table, ("backend", claim.backend, *(() if claim.version is None else (claim.version,))))


def has_path(table: Cluster, claim: Claim) -> Mask | None:
    return None if claim.path is None else with_name(table, ("path", claim.path))


def has_cpus(table: Cluster, claim: Claim) -> Mask | None:
    if claim.cpus == 0:
        return None
    return np.asarray(table.cpu_limit - table.cpu_used >= parts_of(claim.cpus), np.bool_)


FILTERS: tuple[tuple[str, Filter], ...] = (
    ("cluster", in_cluster), ("devices", has_chosen_devices), ("labels", has_labels), ("status", is_ready),
    ("backend", has_backend), ("path", has_path), ("cpus", has_cpus),
)  # fmt: skip


def in_words(name: str, claim: Claim) -> str:
    """What a node that fell to the filter `name` lacks."""
    if name == "cluster":
        return f"not in cluster {claim.cluster!r}"
    if name == "devices":
        return "none of the chosen devices"
    if name == "labels":
        return "without the labels " + ", ".join(f"{key}={value}" for key, value in claim.labels)
    if name == "status":
        return "not ready"
    if name == "backend":
        return f"without {claim.backend}" + ("" if claim.version is None else f" {claim.version}")
    if name == "cpus":
        return f"with fewer than {claim.cpus:g} free CPUs"
    return f"no path {claim.path!r}"


def passing(table: Cluster, claim: Claim) -> tuple[Mask, list[tuple[str, int]]]:
    """Rows that pass all filters, and how many nodes fell to which, in order."""
    mask: Mask = table.alive
    left, fell = len(table), []
    for name, passes in FILTERS:
        own = passes(table, claim)
        if own is None:
            continue
        mask = mask & own
        remaining = int(np.count_nonzero(mask))
        if remaining < left:
            fell.append((name, left - remaining))
        left = remaining
    return mask, fell


def chosen(table: Cluster, claim: Claim) -> Mask:
    """[rows, columns]: devices that the claim names by hand."""
    mask = np.zeros(table.kind.shape, np.bool_)
    for node, indices in claim.on:
        row = table.find(node)
        if row is not None:
            mask[row] = np.isin(table.index[row], indices) & (table.kind[row] >= 0)
    return mask


def with_name(table: Cluster, key: tuple[str, ...]) -> Mask:
    """Rows that have what `key` names."""
    rows = table.named.get(key, ())
    mask = np.zeros(len(table.alive), np.bool_)
    mask[np.fromiter(rows, np.int64, len(rows))] = True
    return mask


def _with_all(table: Cluster, keys: list[tuple[str, ...]]) -> Mask | None:
    if not keys:
        return None
    masks = [with_name(table, key) for key in keys]
    return masks[0] if len(masks) == 1 else np.logical_and.reduce(masks)

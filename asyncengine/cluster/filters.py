"""Filters of nodes in a fixed order, each a small pure function over the whole table.

A filter returns the rows that pass, as an array of bool; None if it has nothing against any. A node falls to the first
filter that it does not pass. Order and meaning are GPUStack's: cluster, devices chosen by hand, labels, status,
backend, local path (which GPUStack looks at only where devices are chosen by hand); then CPUs, which it does not count.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncengine.cluster.claims import Claim
from asyncengine.cluster.table import Cluster, Mask, cpu_units


def in_cluster(table: Cluster, claim: Claim) -> Mask | None:
    if claim.cluster is None:
        return None
    return table.rows_with(("cluster", claim.cluster))


def has_chosen_devices(table: Cluster, claim: Claim) -> Mask | None:
    if not claim.on:
        return None
    mask: Mask = np.logical_or.reduce(table.chosen(claim.on), axis=1)
    return mask


def has_labels(table: Cluster, claim: Claim) -> Mask | None:
    if not claim.labels:
        return None
    mask: Mask = np.logical_and.reduce([table.rows_with(("label", key, value)) for key, value in claim.labels])
    return mask


def is_ready(table: Cluster, claim: Claim) -> Mask | None:
    return table.ready


def has_backend(table: Cluster, claim: Claim) -> Mask | None:
    if claim.backend is None:
        return None
    return table.rows_with(("backend", claim.backend, *(() if claim.version is None else (claim.version,))))


def has_path(table: Cluster, claim: Claim) -> Mask | None:
    return None if claim.path is None else table.rows_with(("path", claim.path))


def has_cpus(table: Cluster, claim: Claim) -> Mask | None:
    if claim.cpus == 0:
        return None
    return np.asarray(table.cpu_limit - table.cpu_used >= cpu_units(claim.cpus), np.bool_)


def _labels_in_words(claim: Claim) -> str:
    return "without the labels " + ", ".join(f"{key}={value}" for key, value in claim.labels)


def _backend_in_words(claim: Claim) -> str:
    return f"without {claim.backend}" + ("" if claim.version is None else f" {claim.version}")


FILTERS: tuple[tuple[str, Callable[[Cluster, Claim], Mask | None], Callable[[Claim], str]], ...] = (
    ("cluster", in_cluster, lambda claim: f"not in cluster {claim.cluster!r}"),
    ("devices", has_chosen_devices, lambda claim: "none of the chosen devices"),
    ("labels", has_labels, _labels_in_words),
    ("status", is_ready, lambda claim: "not ready"),
    ("backend", has_backend, _backend_in_words),
    ("path", has_path, lambda claim: f"no path {claim.path!r}"),
    ("cpus", has_cpus, lambda claim: f"with fewer than {claim.cpus:g} free CPUs"),
)
"""Name of each filter, the filter, and the words for a node that fell to it."""


def passing(table: Cluster, claim: Claim) -> tuple[Mask, list[tuple[str, int, str]]]:
    """Rows that pass all filters; and of each filter that nodes fell to its name, their number, and why in words."""
    mask: Mask = table.alive
    left, fell = len(table), []
    for name, passes, in_words in FILTERS:
        own = passes(table, claim)
        if own is None:
            continue
        mask = mask & own
        remaining = int(np.count_nonzero(mask))
        if remaining < left:
            fell.append((name, left - remaining, in_words(claim)))
        left = remaining
    return mask, fell

"""Filters of nodes in a fixed order, each over the whole table. A node falls to the first one that it does not pass.

Order and meaning are GPUStack's: cluster, devices chosen by hand, labels, status, backend, local path (which GPUStack
looks at only where devices are chosen by hand); then CPUs, which it does not count.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncengine.cluster.claims import Claim
from asyncengine.cluster.table import Cluster, Mask, cpu_units


def filters(table: Cluster, claim: Claim) -> Iterator[tuple[str, Mask, str]]:
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


def passing(table: Cluster, claim: Claim) -> tuple[Mask, list[tuple[str, int, str]]]:
    """Rows that pass all filters; and of each filter that nodes fell to its name, their number, and why in words."""
    mask, left, fell = table.alive, len(table), []
    for name, passes, words in filters(table, claim):
        mask = mask & passes
        remaining = int(np.count_nonzero(mask))
        if remaining < left:
            fell.append((name, left - remaining, words))
        left = remaining
    return mask, fell

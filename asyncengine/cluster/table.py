"""A cluster as it is now, in arrays that follow it: nodes come and go, instances start and stop.

A row is a node, a column a device of it. Rows stand in the order in which nodes came, which is the order that breaks
ties; the row of a node that has gone stays empty until a quarter of the table is, when the others move together.
Everything that is asked of all nodes at once is an array over rows or a set of rows by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.checks import as_items
from asyncengine.cluster.counts import Counts, Int64Array, ModelCounts
from asyncengine.cluster.nodes import Instance, Node, Share
from asyncengine.errors import InvalidParameter

_ROWS, _EMPTY_AT_LEAST = 16, 64
_NO_KIND = -1
_UNCOUNTED = 2**62
_PARTS = 10_000
"""Of a CPU: Ray's resolution. Whole numbers of them add up exactly, however often they are taken and given back."""


class Cluster:
    """Nodes and what runs on them. Belongs to one thread or loop; pure bookkeeping, nothing is started here."""

    def __init__(self, nodes: Iterable[Node] = (), instances: Iterable[Instance] = ()) -> None:
        """Raises `InvalidParameter` for a node or instance that is there twice."""
        nodes, instances = as_items("nodes", nodes), as_items("instances", instances)
        self._nodes: dict[str, Node] = {}
        self._rows: dict[str, int] = {}
        self._names: list[str | None] = []
        self._instances: dict[str, Instance] = {}
        self._on: list[dict[str, None]] = []
        """Names of the instances of each row, in the order in which they came."""
        self.kinds: dict[str, int] = {}
        self.clusters: dict[str, int] = {}
        self.named: dict[tuple[str, ...], set[int]] = {}
        """Rows by what they have: ("label", key, value), ("file", model), ("path", path), ("backend", name),
        ("backend", name, version)."""
        self.current = ModelCounts()
        self._allocate(max(_ROWS, len(nodes)), max((len(_a_node(node).devices) for node in nodes), default=1))
        for node in nodes:
            self.add(node)
        for instance in instances:
            self.start(instance)

    def __len__(self) -> int:
        """Nodes."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """In the order in which they came."""
        return tuple(self._nodes.values())

    @property
    def instances(self) -> Mapping[str, Instance]:
        """By name, in the order in which they came."""
        return MappingProxyType(self._instances)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows in use (empty ones included), and columns."""
        return len(self._names), self.kind.shape[1]

    def name_of(self, row: int) -> str:
        name = self._names[row]
        assert name is not None
        return name

    def find(self, node: str) -> int | None:
        return self._rows.get(node)

    def row_of(self, node: str) -> int:
        """Raises `InvalidParameter` for a node that is not here."""
        row = self._rows.get(node)
        if row is None:
            raise InvalidParameter("node", "is not in the cluster", node)
        return row

    def column_of(self, node: str, index: int) -> int:
        """Raises `InvalidParameter` for a device that the node has not."""
        row = self.row_of(node)
        found = np.flatnonzero((self.index[row] == index) & (self.kind[row] != _NO_KIND))
        if not len(found):
            raise InvalidParameter("devices", f"node {node!r} has no device {index}")
        return int(found[0])

    def counts_of(self, model: str) -> Counts:
        return self.current.of(model, *self.kind.shape)

    # ------------------------------------------------------------ nodes

    def add(self, node: Node) -> None:
        """Raises `InvalidParameter` for a node of a name that is here already."""
        if _a_node(node).name in self._rows:
            raise InvalidParameter("nodes", "has a node of this name already", node.name)
        if len(self._names) - len(self._nodes) > max(_EMPTY_AT_LEAST, len(self._nodes) // 3):
            self._close_gaps()
        rows, columns = self.kind.shape
        if len(self._names) == rows or len(node.devices) > columns:
            self._allocate(2 * rows if len(self._names) == rows else rows, max(columns, len(node.devices)))
        row = len(self._names)
        self._names.append(node.name)
        self._on.append({})
        self._nodes[node.name], self._rows[node.name] = node, row
        for column, device in enumerate(node.devices):
            self.total[row, column] = device.memory
            self.limit[row, column] = max(device.memory - node.device_reserved, 0)
            self.kind[row, column] = self.kinds.setdefault(device.kind, len(self.kinds))
            self.index[row, column] = device.index
        self.host_limit[row] = max(node.host_memory - node.host_reserved, 0)
        self.cpu_limit[row] = _UNCOUNTED if node.cpus is None else parts_of(node.cpus)
        self.device_reserved[row] = node.device_reserved
        self.unified[row], self.ready[row], self.alive[row] = node.unified, node.ready, True
        self.cluster[row] = self.clusters.setdefault(node.cluster, len(self.clusters))
        for key in _keys(node):
            self.named.setdefault(key, set()).add(row)

    def remove(self, name: str) -> tuple[Instance, ...]:
        """A node goes. The instances that had a share of it, which are gone from everywhere."""
        row = self.row_of(name)
        lost = tuple(self.stop(instance) for instance in tuple(self._on[row]))
        node = self._nodes.pop(name)
        for key in _keys(node):
            self.named[key].discard(row)
            if not self.named[key]:
                del self.named[key]
        del self._rows[name]
        self._names[row] = None
        self.alive[row] = self.ready[row] = False
        self.kind[row] = _NO_KIND
        self.total[row] = self.limit[row] = self.host_limit[row] = self.cpu_limit[row] = 0
        return lost

    def set_ready(self, name: str, ready: bool) -> None:
        self.ready[self.row_of(name)] = ready

    # ------------------------------------------------------------ instances

    def start(self, instance: Instance) -> None:
        """Memory is taken, also beyond what there is: an instance is a fact. Raises `InvalidParameter` for one whose
        name is taken or whose nodes and devices are not here."""
        if not isinstance(instance, Instance):
            raise InvalidParameter("instances", "must be Instances", instance)
        if instance.name in self._instances:
            raise InvalidParameter("instances", "has an instance of this name already", instance.name)
        places = [self._place_of(share) for share in instance.shares]
        self._instances[instance.name] = instance
        for share, (row, columns) in zip(instance.shares, places, strict=True):
            self._on[row][instance.name] = None
            self._take(instance.model, share, row, columns, 1)

    def stop(self, name: str) -> Instance:
        """What it had is free again. Raises `InvalidParameter` for an unknown one."""
        instance = self._instances.pop(name, None)
        if instance is None:
            raise InvalidParameter("instance", "is not in the cluster", name)
        for share in instance.shares:
            row, columns = self._place_of(share)
            del self._on[row][name]
            self._take(instance.model, share, row, columns, -1)
        return instance

    def _place_of(self, share: Share) -> tuple[int, tuple[int, ...]]:
        row = self.row_of(share.node)
        return row, tuple(self.column_of(share.node, index) for index, _ in share.devices)

    def _take(self, model: str, share: Share, row: int, columns: tuple[int, ...], step: int) -> None:
        for column, (_, taken) in zip(columns, share.devices, strict=True):
            self.used[row, column] += step * taken
        self.host_used[row] += step * share.host_bytes
        self.cpu_used[row] += step * parts_of(share.cpus)
        self.all_counts.add(row, columns, step)
        self.current.add(model, row, columns, step)

    # ------------------------------------------------------------ memory of the table itself

    def _allocate(self, rows: int, columns: int) -> None:
        """Room for so many, with what was there in its place."""

        def grown(name: str, like: NDArray[Any]) -> Any:
            old = getattr(self, name, None)
            if old is not None:
                like[tuple(slice(size) for size in old.shape)] = old
            return like

        self.total: Int64Array = grown("total", np.zeros((rows, columns), np.int64))
        self.limit: Int64Array = grown("limit", np.zeros((rows, columns), np.int64))
        """Bytes of a device that may be taken."""
        self.used: Int64Array = grown("used", np.zeros((rows, columns), np.int64))
        self.kind: NDArray[np.int32] = grown("kind", np.full((rows, columns), _NO_KIND, np.int32))
        self.index: Int64Array = grown("index", np.zeros((rows, columns), np.int64))
        self.host_limit: Int64Array = grown("host_limit", np.zeros(rows, np.int64))
        self.host_used: Int64Array = grown("host_used", np.zeros(rows, np.int64))
        self.cpu_limit: Int64Array = grown("cpu_limit", np.zeros(rows, np.int64))
        """In ten-thousandths."""
        self.cpu_used: Int64Array = grown("cpu_used", np.zeros(rows, np.int64))
        self.device_reserved: Int64Array = grown("device_reserved", np.zeros(rows, np.int64))
        self.cluster: Int64Array = grown("cluster", np.zeros(rows, np.int64))
        for name in ("unified", "ready", "alive"):
            setattr(self, name, grown(name, np.zeros(rows, np.bool_)))
        self.unified: NDArray[np.bool_]
        self.ready: NDArray[np.bool_]
        self.alive: NDArray[np.bool_]
        counts = Counts(np.zeros((rows, columns), np.int64), np.zeros(rows, np.int64))
        old: Counts | None = getattr(self, "all_counts", None)
        if old is not None:
            counts.devices[: len(old.nodes), : old.devices.shape[1]] = old.devices
            counts.nodes[: len(old.nodes)] = old.nodes
        self.all_counts: Counts = counts
        self.current.forget_arrays()

    def _close_gaps(self) -> None:
        """Rows of nodes that have gone are given up; the others keep their order."""
        kept = np.flatnonzero(self.alive)
        new_row = np.full(len(self.alive), -1, np.int64)
        new_row[kept] = np.arange(len(kept))
        for name in ("total", "limit", "used", "kind", "index", "host_limit", "host_used", "cpu_limit",
                     "cpu_used", "device_reserved", "cluster", "unified", "ready", "alive"):  # fmt: skip
            setattr(self, name, getattr(self, name)[kept])
        self.all_counts = Counts(self.all_counts.devices[kept], self.all_counts.nodes[kept])
        self._names = [self._names[row] for row in kept]
        self._on = [self._on[row] for row in kept]
        self._rows = {name: int(new_row[row]) for name, row in self._rows.items()}
        for key, rows in self.named.items():
            self.named[key] = {int(new_row[row]) for row in rows}
        self.current.renumber(new_row)
        self._allocate(max(_ROWS, len(kept) + len(kept) // 4), self.kind.shape[1])


def parts_of(cpus: float) -> int:
    """In ten-thousandths."""
    return round(cpus * _PARTS)


def _keys(node: Node) -> list[tuple[str, ...]]:
    """What the node can be asked for by name."""
    found: list[tuple[str, ...]] = [("label", key, value) for key, value in node.labels]
    found += [("file", model) for model in node.files]
    found += [("path", path) for path in node.paths]
    for name, versions in node.backends:
        found += [("backend", name), *(("backend", name, version) for version in versions)]
    return found


def _a_node(node: Any) -> Node:
    if not isinstance(node, Node):
        raise InvalidParameter("nodes", "must be Nodes", node)
    return node

"""A cluster as arrays, which change with it: nodes come and go, instances start and stop.

A row is a node, a column a device of it. Rows stand in the order in which nodes came, which is the order that breaks
ties; the row of a node that has gone stays empty until a quarter of the table is, when the others move together.
Everything that is asked of all nodes at once is an array over rows or a set of rows by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.checks import as_items
from asyncengine.cluster.nodes import Instance, Node, Share
from asyncengine.errors import InvalidParameter

Int64Array = NDArray[np.int64]
Mask = NDArray[np.bool_]

_ROWS, _EMPTY_AT_LEAST = 16, 64
_NO_KIND = -1
_UNCOUNTED = 2**62
_CPU_UNIT = 10_000
"""Parts of a CPU: Ray's resolution. Whole numbers add up exactly, however often they are taken and given back."""
_PLACES, _WHOLE_NODE = 2048, 2047
"""Places of a row: its columns (more than any node has devices), and the node itself. With the row it is one number."""
_ARRAYS: dict[str, tuple[Any, int, bool]] = {
    "total": (np.int64, 0, True), "limit": (np.int64, 0, True), "used": (np.int64, 0, True),
    "kind": (np.int32, _NO_KIND, True), "index": (np.int64, 0, True), "device_counts": (np.int64, 0, True),
    "node_counts": (np.int64, 0, False), "model_device_counts": (np.int64, 0, True),
    "model_node_counts": (np.int64, 0, False), "host_limit": (np.int64, 0, False), "host_used": (np.int64, 0, False),
    "cpu_limit": (np.int64, 0, False), "cpu_used": (np.int64, 0, False), "device_reserved": (np.int64, 0, False),
    "cluster": (np.int64, 0, False), "unified": (np.bool_, 0, False), "ready": (np.bool_, 0, False),
    "alive": (np.bool_, 0, False),
}  # fmt: skip
"""Arrays of the table: type, value of an empty place, and whether they have columns."""


class Counts(NamedTuple):
    """Numbers of instances at every place of a table."""

    devices: Int64Array
    """[rows, columns] instances on each device."""
    nodes: Int64Array
    """[rows] instances with a share of the node, whatever number of devices that has."""


class Cluster:
    """Nodes and the instances on them. Belongs to one thread or loop; pure bookkeeping, nothing is started here."""

    total: Int64Array
    """[rows, columns] bytes that a device has."""
    limit: Int64Array
    """[rows, columns] bytes of a device that may be taken."""
    used: Int64Array
    kind: NDArray[np.int32]
    """[rows, columns] number of the device's kind in `kinds`; -1: there is none."""
    index: Int64Array
    """[rows, columns] index of the device on its node."""
    device_counts: Int64Array
    """[rows, columns] instances on each device."""
    node_counts: Int64Array
    model_device_counts: Int64Array
    """Memory of `counts_of`, like `model_node_counts`."""
    model_node_counts: Int64Array
    host_limit: Int64Array
    host_used: Int64Array
    cpu_limit: Int64Array
    """[rows] ten-thousandths of a CPU."""
    cpu_used: Int64Array
    device_reserved: Int64Array
    cluster: Int64Array
    unified: Mask
    ready: Mask
    alive: Mask

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
        self.by_model: dict[str, dict[int, int]] = {}
        """Instances of each model, by row and place."""
        self._allocate(max(_ROWS, len(nodes)), max((len(_a_node(node).devices) for node in nodes), default=1))
        for node in nodes:
            self.add(node)
        for instance in instances:
            self.start(instance)

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Nodes in the order in which they came."""
        return tuple(self._nodes.values())

    @property
    def instances(self) -> Mapping[str, Instance]:
        """Instances by name, in the order in which they came."""
        return MappingProxyType(self._instances)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows in use (empty ones included), and of columns."""
        return len(self._names), self.kind.shape[1]

    def find(self, node: str) -> int | None:
        """Row of a node; None if it is not here."""
        return self._rows.get(node)

    def name_of(self, row: int) -> str:
        name = self._names[row]
        assert name is not None
        return name

    def row_of(self, node: str) -> int:
        """Row of a node. Raises `InvalidParameter` for one that is not here."""
        row = self._rows.get(node)
        if row is None:
            raise InvalidParameter("node", "is not in the cluster", node)
        return row

    def column_of(self, node: str, index: int) -> int:
        """Column of a device. Raises `InvalidParameter` for one that the node has not."""
        row = self.row_of(node)
        found = np.flatnonzero((self.index[row] == index) & (self.kind[row] != _NO_KIND))
        if not len(found):
            raise InvalidParameter("devices", f"node {node!r} has no device {index}")
        return int(found[0])

    def counts(self) -> Counts:
        """Counts of all instances. For reading only: they change with the table."""
        return Counts(self.device_counts, self.node_counts)

    def counts_of(self, model: str) -> Counts:
        """Counts of the instances of one model, in arrays that the next call fills anew: making them takes longer."""
        sparse = self.by_model.get(model, {})
        numbers = np.fromiter(sparse.values(), np.int64, len(sparse))
        rows, places = np.divmod(np.fromiter(sparse, np.int64, len(sparse)), _PLACES)
        counts = Counts(self.model_device_counts, self.model_node_counts)
        for array in counts:
            array.fill(0)
        whole = places == _WHOLE_NODE
        counts.nodes[rows[whole]] = numbers[whole]
        counts.devices[rows[~whole], places[~whole]] = numbers[~whole]
        return counts

    def rows_with(self, key: tuple[str, ...]) -> Mask:
        """[rows] nodes that have what `key` names (see `named`)."""
        rows = self.named.get(key, ())
        mask = np.zeros(len(self.alive), np.bool_)
        mask[np.fromiter(rows, np.int64, len(rows))] = True
        return mask

    def chosen(self, on: Iterable[tuple[str, tuple[int, ...]]]) -> Mask:
        """[rows, columns] devices of these nodes and indices, as far as they are here."""
        mask = np.zeros(self.kind.shape, np.bool_)
        for node, indices in on:
            row = self._rows.get(node)
            if row is not None:
                mask[row] = np.isin(self.index[row], indices) & (self.kind[row] >= 0)
        return mask

    # ------------------------------------------------------------ nodes

    def add(self, node: Node) -> None:
        """Add a node. Raises `InvalidParameter` for one whose name is here already."""
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
        self.cpu_limit[row] = _UNCOUNTED if node.cpus is None else cpu_units(node.cpus)
        self.device_reserved[row] = node.device_reserved
        self.unified[row], self.ready[row], self.alive[row] = node.unified, node.ready, True
        self.cluster[row] = self.clusters.setdefault(node.cluster, len(self.clusters))
        for key in _keys(node):
            self.named.setdefault(key, set()).add(row)

    def remove(self, name: str) -> tuple[Instance, ...]:
        """Remove a node, and the instances that had a share of it from all their nodes: these are returned."""
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
        """Add an instance, whose memory is taken even beyond what there is: it is a fact. Raises `InvalidParameter` for
        one whose name is taken or whose nodes and devices are not here."""
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
        """Remove an instance, whose memory is free again. Raises `InvalidParameter` for an unknown one."""
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
            self.device_counts[row, column] += step
        self.host_used[row] += step * share.host_bytes
        self.cpu_used[row] += step * cpu_units(share.cpus)
        self.node_counts[row] += step
        counts = self.by_model.setdefault(model, {})
        for place in (*columns, _WHOLE_NODE):
            key = row * _PLACES + place
            counts[key] = counts.get(key, 0) + step
            if not counts[key]:
                del counts[key]
        if not counts:
            del self.by_model[model]

    # ------------------------------------------------------------ memory of the table itself

    def _allocate(self, rows: int, columns: int) -> None:
        """Make room for so many, with what was there in its place."""
        for name, (dtype, empty, has_columns) in _ARRAYS.items():
            array = np.full((rows, columns) if has_columns else rows, empty, dtype)
            old = getattr(self, name, None)
            if old is not None:
                array[tuple(slice(size) for size in old.shape)] = old
            setattr(self, name, array)

    def _close_gaps(self) -> None:
        """Give up the rows of nodes that have gone; the others keep their order."""
        kept = np.flatnonzero(self.alive)
        new_row = np.full(len(self.alive), -1, np.int64)
        new_row[kept] = np.arange(len(kept))
        for name in _ARRAYS:
            setattr(self, name, getattr(self, name)[kept])
        self._names = [self._names[row] for row in kept]
        self._on = [self._on[row] for row in kept]
        self._rows = {name: int(new_row[row]) for name, row in self._rows.items()}
        for key, rows in self.named.items():
            self.named[key] = {int(new_row[row]) for row in rows}
        for model, counts in self.by_model.items():
            moved = {int(new_row[key // _PLACES]) * _PLACES + key % _PLACES: n for key, n in counts.items()}
            self.by_model[model] = moved
        self._allocate(max(_ROWS, len(kept) + len(kept) // 4), self.kind.shape[1])


def cpu_units(cpus: float) -> int:
    """CPUs in ten-thousandths."""
    return round(cpus * _CPU_UNIT)


def _keys(node: Node) -> list[tuple[str, ...]]:
    """Keys of everything the node has by name."""
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

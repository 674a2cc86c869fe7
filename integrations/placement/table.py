"""A cluster as arrays, which change with it: nodes come and go, instances start and stop.

A row is a node, a column a device of it. Rows stand in the order in which nodes came, which is the order that breaks
ties. The row of a removed node stays empty until no row is left for a new one; then all arrays are made anew.
Properties that are asked of all nodes at once are arrays over rows, or sets of rows by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncengine.checks import as_items
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.placement.nodes import Instance, Node, Share

Int64Array = NDArray[np.int64]
Mask = NDArray[np.bool_]

_ROWS = 16  # fewest rows of a table, so that its first nodes do not each make it anew
_NONE = -1
_UNCOUNTED = 2**62  # CPU limit of nodes that do not count them: beyond all claims, and differences stay in int64
_CPU_UNIT = 10_000
"""Units of one CPU: Ray's resolution. Integers add up exactly, however often they are taken and given back."""


class Counts(NamedTuple):
    """Numbers of instances on every device and node of a table."""

    devices: Int64Array
    """[rows, columns] instances on each device."""
    nodes: Int64Array
    """[rows] instances with a share of the node, whatever number of devices that has."""


class Cluster:
    """Nodes and the instances on them. Belongs to one thread or loop; pure bookkeeping, nothing is started here."""

    def __init__(self, nodes: Iterable[Node] = (), instances: Iterable[Instance] = ()) -> None:
        """Raises `InvalidParameter` for a node or instance that is there twice."""
        nodes, instances = as_items("nodes", nodes), as_items("instances", instances)
        self._nodes: dict[str, Node] = {}
        self._instances: dict[str, Instance] = {}
        self._build(max(_ROWS, len(nodes)), max((len(_a_node(node).devices) for node in nodes), default=1))
        for node in nodes:
            self.add(node)
        for instance in instances:
            self.start(instance)

    def _build(self, rows: int, columns: int) -> None:
        """Make arrays of this size, and enter the nodes and instances that are here."""
        devices = rows, columns
        self.total: Int64Array = np.zeros(devices, np.int64)
        """[rows, columns] bytes that a device has."""
        self.limit: Int64Array = np.zeros(devices, np.int64)
        """[rows, columns] bytes of a device that may be taken."""
        self.used: Int64Array = np.zeros(devices, np.int64)
        self.kind: NDArray[np.int32] = np.full(devices, _NONE, np.int32)
        """[rows, columns] number of the device's kind in `kinds`; -1: there is none."""
        self.index: Int64Array = np.full(devices, _NONE, np.int64)
        """[rows, columns] index of the device on its node; -1: there is none."""
        self.host_limit: Int64Array = np.zeros(rows, np.int64)
        self.host_used: Int64Array = np.zeros(rows, np.int64)
        self.cpu_limit: Int64Array = np.zeros(rows, np.int64)
        """[rows] ten-thousandths of a CPU."""
        self.cpu_used: Int64Array = np.zeros(rows, np.int64)
        self.device_reserved: Int64Array = np.zeros(rows, np.int64)
        self.unified: Mask = np.zeros(rows, np.bool_)
        self.ready: Mask = np.zeros(rows, np.bool_)
        self.alive: Mask = np.zeros(rows, np.bool_)
        self._counts = Counts(np.zeros(devices, np.int64), np.zeros(rows, np.int64))
        self._counts_of_model = Counts(np.zeros(devices, np.int64), np.zeros(rows, np.int64))
        self.by_model: dict[str, dict[int, int]] = {}
        """Instances of each model, by device (its index in the flattened `used`) and by node (-1 - its row)."""
        self.kinds: dict[str, int] = {}
        self.named: dict[tuple[str, ...], set[int]] = {}
        """Rows by what they have: ("cluster", name), ("label", key, value), ("file", model), ("path", path),
        ("backend", name), ("backend", name, version)."""
        self._rows: dict[str, int] = {}
        self._names: list[str] = []
        """Name of the node of each row, also of one that has gone."""
        self._on: list[dict[str, None]] = []
        """Names of the instances of each row, in the order in which they came."""
        for node in self._nodes.values():
            self._enter(node)
        for instance in self._instances.values():
            self._take(instance, 1)

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
        return self._names[row]

    def row_of(self, node: str) -> int:
        """Row of a node. Raises `InvalidParameter` for one that is not here."""
        row = self._rows.get(node)
        if row is None:
            raise InvalidParameter("node", "is not in the cluster", node)
        return row

    def column_of(self, node: str, index: int) -> int:
        """Column of a device. Raises `InvalidParameter` for one that the node has not."""
        columns = np.flatnonzero(self.index[self.row_of(node)] == index)
        if not len(columns):
            raise InvalidParameter("devices", f"node {node!r} has no device {index}")
        return int(columns[0])

    def counts(self) -> Counts:
        """Counts of all instances. For reading only: they change with the table."""
        return self._counts

    def counts_of(self, model: str) -> Counts:
        """Counts of the instances of one model. The arrays are filled anew by the next call: allocating them for each
        placement would take longer than filling them."""
        sparse = self.by_model.get(model, {})
        keys = np.fromiter(sparse, np.int64, len(sparse))
        numbers = np.fromiter(sparse.values(), np.int64, len(sparse))
        on_node, counts = keys < 0, self._counts_of_model
        for array in counts:
            array.fill(0)
        counts.nodes[-1 - keys[on_node]] = numbers[on_node]
        counts.devices.ravel()[keys[~on_node]] = numbers[~on_node]
        return counts

    def rows_with(self, key: tuple[str, ...]) -> Mask:
        """[rows] nodes that have the property `key` (see `named`)."""
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
                mask[row] = np.isin(self.index[row], indices)
        return mask

    # ------------------------------------------------------------ nodes

    def add(self, node: Node) -> None:
        """Add a node. Raises `InvalidParameter` for one whose name is here already."""
        if _a_node(node).name in self._nodes:
            raise InvalidParameter("nodes", "has a node of this name already", node.name)
        rows, columns = self.kind.shape
        if len(self._names) == rows or len(node.devices) > columns:
            self._build(2 * len(self) + _ROWS, max(columns, len(node.devices)))
        self._nodes[node.name] = node
        self._enter(node)

    def _enter(self, node: Node) -> None:
        """Fill the next row."""
        row = self._rows[node.name] = len(self._names)
        self._names.append(node.name)
        self._on.append({})
        for column, device in enumerate(node.devices):
            self.total[row, column] = device.memory
            self.limit[row, column] = max(device.memory - node.device_reserved, 0)
            self.kind[row, column] = self.kinds.setdefault(device.kind, len(self.kinds))
            self.index[row, column] = device.index
        self.host_limit[row] = max(node.host_memory - node.host_reserved, 0)
        self.cpu_limit[row] = _UNCOUNTED if node.cpus is None else cpu_units(node.cpus)
        self.device_reserved[row] = node.device_reserved
        self.unified[row], self.ready[row], self.alive[row] = node.unified, node.ready, True
        for key in _keys(node):
            self.named.setdefault(key, set()).add(row)

    def remove(self, name: str) -> tuple[Instance, ...]:
        """Remove a node, and the instances that had a share of it from all their nodes: these are returned."""
        row = self.row_of(name)
        lost = tuple(self.stop(instance) for instance in tuple(self._on[row]))
        for key in _keys(self._nodes.pop(name)):
            self.named[key].discard(row)
            if not self.named[key]:
                del self.named[key]
        del self._rows[name]
        self.alive[row] = self.ready[row] = False
        self.kind[row] = self.index[row] = _NONE
        self.total[row] = self.limit[row] = self.host_limit[row] = self.cpu_limit[row] = 0
        return lost

    def set_ready(self, name: str, ready: bool) -> None:
        """Say whether a node takes new instances."""
        row = self.row_of(name)
        self._nodes[name] = self._nodes[name].replace(ready=ready)
        self.ready[row] = ready

    # ------------------------------------------------------------ instances

    def start(self, instance: Instance) -> None:
        """Add an instance. It runs already, so its memory is taken even beyond the node's. Raises `InvalidParameter`
        for one whose name is taken or whose nodes and devices are not here."""
        if not isinstance(instance, Instance):
            raise InvalidParameter("instances", "must be Instances", instance)
        if instance.name in self._instances:
            raise InvalidParameter("instances", "has an instance of this name already", instance.name)
        self._take(instance, 1)
        self._instances[instance.name] = instance

    def stop(self, name: str) -> Instance:
        """Remove an instance, whose memory is free again. Raises `InvalidParameter` for an unknown one."""
        instance = self._instances.pop(name, None)
        if instance is None:
            raise InvalidParameter("instance", "is not in the cluster", name)
        self._take(instance, -1)
        return instance

    def position_of(self, share: Share) -> tuple[int, list[int]]:
        """Row and columns of an instance's share. Raises `InvalidParameter` for a node or device that is not here."""
        return self.row_of(share.node), [self.column_of(share.node, index) for index, _ in share.devices]

    def _take(self, instance: Instance, step: int) -> None:
        """Take an instance's memory and CPUs (`step` 1), or give them back (-1)."""
        positions = [self.position_of(share) for share in instance.shares]  # raises before anything is changed
        model = self.by_model.setdefault(instance.model, {})
        for share, (row, columns) in zip(instance.shares, positions, strict=True):
            for column, (_, count) in zip(columns, share.devices, strict=True):
                self.used[row, column] += step * count
                self._counts.devices[row, column] += step
            self.host_used[row] += step * share.host_bytes
            self.cpu_used[row] += step * cpu_units(share.cpus)
            self._counts.nodes[row] += step
            if step > 0:
                self._on[row][instance.name] = None
            else:
                del self._on[row][instance.name]
            for key in (-1 - row, *(row * self.kind.shape[1] + column for column in columns)):
                model[key] = model.get(key, 0) + step
                if not model[key]:
                    del model[key]
        if not model:
            del self.by_model[instance.model]


def cpu_units(cpus: float) -> int:
    """CPUs in ten-thousandths."""
    return round(cpus * _CPU_UNIT)


def _keys(node: Node) -> list[tuple[str, ...]]:
    """Keys of everything the node has by name."""
    keys: list[tuple[str, ...]] = [("cluster", node.cluster)]
    keys += [("label", key, value) for key, value in node.labels]
    keys += [("file", model) for model in node.files]
    keys += [("path", path) for path in node.paths]
    for name, versions in node.backends:
        keys += [("backend", name), *(("backend", name, version) for version in versions)]
    return keys


def _a_node(node: Any) -> Node:
    if not isinstance(node, Node):
        raise InvalidParameter("nodes", "must be Nodes", node)
    return node

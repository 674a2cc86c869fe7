"""How many instances run where: of each model and of all, for scores that spread."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

_COLUMNS = 2048
"""More than any node has devices, so that (row, column) fits one number."""
_KEPT = 8
"""Models whose counts are kept as arrays: those that were asked for last."""


class Counts(NamedTuple):
    """Instances at every place of a table of nodes."""

    devices: Int64Array
    """[rows, columns]: on each device."""
    nodes: Int64Array
    """[rows]: instances with a share of the node, whatever number of devices that has."""

    def add(self, row: int, columns: tuple[int, ...], step: int) -> None:
        for column in columns:
            self.devices[row, column] += step
        self.nodes[row] += step


class ModelCounts:
    """Counts of each model by place, as sparse as the models are; arrays are made of them when they are asked for."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[int, int]] = {}
        self._nodes: dict[str, dict[int, int]] = {}
        self._kept: OrderedDict[str, Counts] = OrderedDict()

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, model: str, row: int, columns: tuple[int, ...], step: int) -> None:
        """`step` +1 or -1: an instance's share of `row` comes or goes, on these columns."""
        for column in columns:
            _change(self._devices, model, row * _COLUMNS + column, step)
        _change(self._nodes, model, row, step)
        if model in self._kept:
            self._kept[model].add(row, columns, step)

    def of(self, model: str, rows: int, columns: int) -> Counts:
        """For reading only: it changes with the table."""
        found = self._kept.get(model)
        if found is None:
            found = _filled(self._devices.get(model, {}), self._nodes.get(model, {}), rows, columns)
            self._kept[model] = found
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(model)
        return found

    def forget_arrays(self) -> None:
        """The table has another shape now."""
        self._kept.clear()

    def renumber(self, new_row: Int64Array) -> None:
        """Row r is `new_row[r]` from now on."""
        self._kept.clear()
        for counts in self._devices.values():
            moved = {int(new_row[key // _COLUMNS]) * _COLUMNS + key % _COLUMNS: n for key, n in counts.items()}
            counts.clear()
            counts.update(moved)
        for counts in self._nodes.values():
            moved = {int(new_row[row]): n for row, n in counts.items()}
            counts.clear()
            counts.update(moved)


def _change(counts: dict[str, dict[int, int]], model: str, key: int, step: int) -> None:
    """Nothing is left of what has gone: neither zeros nor models without instances."""
    own = counts.setdefault(model, {})
    own[key] = own.get(key, 0) + step
    if not own[key]:
        del own[key]
    if not own:
        del counts[model]


def _filled(devices: dict[int, int], nodes: dict[int, int], rows: int, columns: int) -> Counts:
    counts = Counts(np.zeros((rows, columns), np.int64), np.zeros(rows, np.int64))
    row, column = np.divmod(np.fromiter(devices.keys(), np.int64, len(devices)), _COLUMNS)
    counts.devices[row, column] = np.fromiter(devices.values(), np.int64, len(devices))
    own = np.fromiter(nodes.keys(), np.int64, len(nodes))
    counts.nodes[own] = np.fromiter(nodes.values(), np.int64, len(nodes))
    return counts

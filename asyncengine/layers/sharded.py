"""Weights that are spread over several processes, the ranks of one model (tensor parallelism).

A matrix [outputs, inputs] is split by outputs alone, and what the ranks make of a row is gathered: a number is one
whole dot product, made by one rank by the kernel and in the order that one process would use. So its bits are the same
at any number of ranks, for every form of weights whose rows do not depend on their company. Megatron-LM (Shoeybi et al.
2019) splits every second matrix by inputs instead and adds up partial sums, which halves the exchanges and rounds
otherwise; between processes of one machine an exchange costs a barrier and a copy in shared memory. As there, what lies
between a layer's two products is a rank's own, where it can be told apart: heads of attention, with their keys and
values, and the inner numbers of a feed-forward part (`Share`). Then the first product is not gathered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch

from asyncengine.device.output_buffers import OutputBufferPool
from asyncengine.layers.stored import RowRange, StoredForm, StoredMatrix
from asyncengine.layers.weight_forms import QuantizedWeight, WeightForm

UNIT = 32
"""Rows between two places where a matrix may be cut: whole panels of every packed and quantized form."""
_PANEL = 16
"""Rows of a panel of a quantized form."""
Make = Callable[[int, int, Sequence[int], Sequence[str]], WeightForm]
"""(outputs, inputs, bounds, paths) -> memory for such a weight, as `LayerOptions.weight` has it."""


Spans = Sequence[tuple[int, int]]
"""(first, end) of rows of a matrix, ascending; all of a span are of one matrix of the checkpoint."""


class Ranks(Protocol):
    """The processes that compute one model together, as one of them sees the exchange of results between them."""

    rank: int
    """This one's number, from 0; 0 is the engine's own process."""
    size: int

    def rows_at_once(self, row_bytes: int) -> int:
        """Rows of so many bytes that can be exchanged at once."""
        ...

    def place(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns] into which all ranks write before the next `meet`, and from which they read behind
        it until the one after."""
        ...

    def meet(self) -> None:
        """Wait until all ranks have come here. Raises `RuntimeError` if one of them is gone."""
        ...


def cut_rows(outputs: int, size: int, firsts: Sequence[int]) -> tuple[int, ...] | None:
    """Rows at which the ranks' parts of a matrix begin and the last one ends, as even as may be; None: there are too
    few rows. `firsts`: rows from which cuts are counted in units, ascending from 0."""
    cuts = [0]
    for rank in range(1, size):
        wanted = outputs * rank // size
        place = bisect_right(firsts, wanted) - 1
        end = firsts[place + 1] if place + 1 < len(firsts) else outputs
        cuts.append(min(firsts[place] + -(-(wanted - firsts[place]) // UNIT) * UNIT, end))
    cuts.append(outputs)
    return tuple(cuts) if all(one < other for one, other in pairwise(cuts)) else None


class ShardedWeight:
    """A `WeightForm` of which this rank holds some rows; what others hold comes by `Ranks`."""

    def __init__(
        self, ranks: Ranks, cuts: Sequence[int], inputs: int, bounds: Sequence[int], paths: Sequence[str],
        forms: Mapping[str, StoredForm], make: Make,
    ) -> None:  # fmt: skip
        """`cuts`: those of `cut_rows`. `bounds`, `paths` as in `LayerOptions.weight`; `forms`: stored forms of those
        paths that stay as they are stored."""
        self.outputs, self.inputs = cuts[-1], inputs
        self.first, self.last = cuts[ranks.rank : ranks.rank + 2]
        self._ranks, self._firsts = ranks, [0, *bounds]
        ends = [*bounds, self.outputs]
        here = [a < self.last and b > self.first for a, b in zip(self._firsts, ends, strict=True)]
        within = [bound - self.first for bound in bounds if self.first < bound < self.last]
        self.own = make(self.last - self.first, inputs, within, [p for p, own in zip(paths, here, strict=False) if own])
        self.bias_dtype, self.compiled = self.own.bias_dtype, self.own.compiled
        self._forms = [forms.get(path) for path in paths] or [None]
        self._memory = OutputBufferPool()
        # which rows wait for each other is the same in every rank: an update is refused by the first or by none
        self.waiting: Any = self.own.waiting
        if self.waiting is None and isinstance(self.own, QuantizedWeight) and any(bound % _PANEL for bound in bounds):
            self.waiting = object()

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        """Take what this rank holds of rows from `first` on: nothing else of them is read."""
        begin, end = max(first, self.first), min(first + weight.shape[0], self.last)
        if begin < end:
            own = slice(begin - first, end - first)
            part = weight[own] if isinstance(weight, torch.Tensor) else RowRange(weight, own.start, own.stop)
            self.own.load(begin - self.first, part)

    def takes(self, first: int) -> StoredForm | None:
        return self._forms[min(bisect_right(self._firsts, first), len(self._forms)) - 1]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        found = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        rows, results = x.reshape(-1, self.inputs), found.view(-1, self.outputs)
        added = None if bias is None else bias[self.first : self.last]
        for some in self._some(len(rows), x.dtype):
            part = rows[some]
            place = self._ranks.place(len(part), self.outputs, x.dtype)
            self.own.multiply(part, added, place[:, self.first : self.last])
            self._ranks.meet()
            results[some].copy_(place)
        return found

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        """Logits in rank 0; elsewhere nothing in particular is in the result, which nobody reads."""
        found = memory.take((len(x), self.outputs))
        added = None if bias is None else bias[self.first : self.last]
        for some in self._some(len(x), found.dtype):
            part = x[some]
            place = self._ranks.place(len(part), self.outputs, found.dtype)
            place[:, self.first : self.last] = self.own.logits(part, added, self._memory)
            self._ranks.meet()
            if self._ranks.rank == 0:
                found[some].copy_(place)
        return found

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        for some in self._some(len(ids), out.dtype, self.inputs):
            part = ids[some]
            place = self._ranks.place(len(part), self.inputs, out.dtype)
            (here,) = ((part >= self.first) & (part < self.last)).nonzero(as_tuple=True)
            if len(here):
                rows = out.new_empty(len(here), self.inputs)
                self.own.read_rows((part[here] - self.first).contiguous(), rows)
                place[here] = rows
            self._ranks.meet()
            out[some].copy_(place)

    def _some(self, rows: int, dtype: torch.dtype, columns: int | None = None) -> list[slice]:
        """Rows that are exchanged at once, one part after the other."""
        most = self._ranks.rows_at_once((columns or self.outputs) * dtype.itemsize)
        return [slice(first, first + most) for first in range(0, rows, most)]


class Share(NamedTuple):
    """This rank's part of a layer that computes alone with what its first product gives, up to its last: some heads of
    attention, or some numbers of a feed-forward part."""

    ranks: Ranks
    every: Sequence[Spans]
    """Rows of the first product that each rank has."""
    cuts: Sequence[int]
    """Columns at which the ranks' parts of what the last product reads begin, and their end."""

    @property
    def spans(self) -> Spans:
        """Rows of the first product that this one has."""
        return self.every[self.ranks.rank]

    def part(self, count: int) -> slice:
        """This rank's of so many heads, which the ranks share evenly."""
        return slice(count * self.ranks.rank // self.ranks.size, count * (self.ranks.rank + 1) // self.ranks.size)

    def columns(self, whole: torch.Tensor) -> torch.Tensor:
        """The columns of a first product [rows, all its rows] that this rank goes on with."""
        return torch.cat([whole[:, first:last] for first, last in self.spans], dim=1)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """[rows, all columns] of what each rank has [rows, its columns] of."""
        columns, (first, last) = self.cuts[-1], self.cuts[self.ranks.rank :][:2]
        found, most = own.new_empty(len(own), columns), self.ranks.rows_at_once(columns * own.itemsize)
        for begin in range(0, len(own), most):
            part = own[begin : begin + most]
            place = self.ranks.place(len(part), columns, own.dtype)
            place[:, first:last] = part
            self.ranks.meet()
            found[begin : begin + most] = place
        return found


def share_of(ranks: Ranks | None, cuts: Sequence[int] | None, rows: Sequence[int], columns: int) -> Share | None:
    """This rank's part of a layer of heads, or of single numbers, which the ranks have from one of `cuts` to the next.
    The first product has `rows` rows for each, in as many blocks; the last reads `columns` numbers of each. None: one
    process has all, as `cuts` are None."""
    if ranks is None or cuts is None:
        return None
    firsts = [cuts[-1] * each for each in accumulate(rows, initial=0)]
    every = [
        [(base + first * each, base + last * each) for base, each in zip(firsts, rows, strict=False)]
        for first, last in pairwise(cuts)
    ]
    return Share(ranks, every, [cut * columns for cut in cuts])


def even_cuts(ranks: Ranks | None, count: int) -> list[int] | None:
    """Heads of `count` at which the ranks' parts begin and the last one ends; None: they cannot be even."""
    if ranks is None or count % ranks.size:
        return None
    return list(range(0, count + 1, count // ranks.size))


def paths_of(spans: Spans, bounds: Sequence[int], paths: Sequence[str]) -> list[str]:
    """The matrix of each span, if the matrices have names."""
    return [paths[bisect_right(bounds, first)] for first, _ in spans] if paths else []


class LocalWeight:
    """A `WeightForm` of some rows of a matrix. What they give stays in this rank."""

    def __init__(self, spans: Spans, inputs: int, bounds: Sequence[int], paths: Sequence[str], make: Make) -> None:
        """`bounds`, `paths` as in `LayerOptions.weight`, of the whole matrix."""
        self.spans, self.inputs = spans, inputs
        ends = [*accumulate(last - first for first, last in spans)]
        self.outputs, self._firsts = ends[-1], [0, *ends]
        self.own = make(self.outputs, inputs, ends[:-1], paths_of(spans, bounds, paths))
        self.bias_dtype, self.compiled = self.own.bias_dtype, self.own.compiled
        self.waiting: Any = self.own.waiting
        if self.waiting is None and isinstance(self.own, QuantizedWeight) and any(bound % _PANEL for bound in bounds):
            self.waiting = object()  # as in every other rank

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        for given, own in self.own_rows(first, weight.shape[0]):
            part = weight[given] if isinstance(weight, torch.Tensor) else RowRange(weight, given.start, given.stop)
            self.own.load(own.start, part)

    def own_rows(self, first: int, count: int) -> list[tuple[slice, slice]]:
        """(which of `count` rows from `first` on, the places of those among its own) of what it takes of them."""
        found = []
        for (begin, end), own in zip(self.spans, self._firsts, strict=False):
            low, high = max(begin, first), min(end, first + count)
            if low < high:
                found.append((slice(low - first, high - first), slice(own + low - begin, own + high - begin)))
        return found

    def takes(self, first: int) -> StoredForm | None:
        span = next(place for place, (_, last) in enumerate(self.spans) if first < last)
        return self.own.takes(self._firsts[span])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.own.multiply(x, bias, out)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        return self.own.logits(x, bias, memory)

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        raise RuntimeError("rows of a weight of which other ranks have some cannot be read")


def held_by(ranks: Ranks | None, experts: int) -> range:
    """Numbers of the experts of a mixture that are in this process."""
    if ranks is None:
        return range(experts)
    return range(experts * ranks.rank // ranks.size, experts * (ranks.rank + 1) // ranks.size)


def leave(tensor: torch.Tensor | StoredMatrix) -> None:
    """Load nothing: another process has it."""


def gather_experts(
    ranks: Ranks, make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], x: torch.Tensor,
    chosen: torch.Tensor, weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The sum [rows, width] of what the experts `chosen` [rows, k] make of x, times `weights` alike, in the order in
    which the compiled kernel adds. `make(x, experts [pairs], made [pairs, width])` fills in what experts here make."""
    count, width = chosen.shape[1], x.shape[1]
    most, out = ranks.rows_at_once(count * width * x.itemsize), torch.empty_like(x)
    for first in range(0, len(x), most):
        rows = slice(first, first + most)
        pairs = chosen[rows].flatten()
        made = ranks.place(len(pairs), width, x.dtype)
        make(x[rows], pairs, made)
        ranks.meet()
        shares, values = weights[rows, :, None], made.view(-1, count, width)
        total = values[:, 0].float() * shares[:, 0]
        for place in range(1, count):
            total += values[:, place].float() * shares[:, place]
        out[rows] = total
    return out

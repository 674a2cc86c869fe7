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
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch

from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.layers.stored import RowRange, StoredForm, StoredMatrix
from asyncengine.execution.layers.weight_forms import QuantizedWeight, WeightForm

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
    stage: int
    """The stage of a pipeline that they compute, of `stages`, each of which has as many processes."""
    stages: int
    exact: bool
    """Whether results must have the bits of one process, so that only what keeps them is divided; on GPUs, everything
    is."""

    def rows_at_once(self, row_bytes: int) -> int:
        """Number of rows of `row_bytes` each that can be exchanged at once."""

    def buffer(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns] into which all ranks write before the next `meet`, and from which they read behind
        it until the one after. Each number is written by one rank."""

    def meet(self) -> None:
        """Wait until all ranks have come here. Raises `RuntimeError` if one of them is gone."""


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


def _exchanged(
    ranks: Ranks, rows: int, columns: int, dtype: torch.dtype, fill: Callable[[slice, torch.Tensor], object]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(some of so many rows, [those rows, columns] as all ranks have filled it), one part after the other. `fill(rows,
    place)` writes what this rank has of a part."""
    most = ranks.rows_at_once(columns * dtype.itemsize)
    for first in range(0, rows, most):
        some = slice(first, min(first + most, rows))
        place = ranks.buffer(some.stop - first, columns, dtype)
        fill(some, place)
        ranks.meet()
        yield some, place


class _HeldWeight(WeightForm):
    """The part of a `WeightForm` of some rows of a matrix that follows from `own`, the form of those rows."""

    def __init__(self, own: WeightForm, outputs: int, inputs: int, bounds: Sequence[int]) -> None:
        """`bounds`: of the whole matrix."""
        self.own, self.name, self.outputs, self.inputs = own, own.name, outputs, inputs
        self.bias_dtype, self.compiled = own.bias_dtype, own.compiled
        # which rows wait for each other is the same in every rank: an update is refused by the first or by none
        self.waiting: Any = own.waiting
        if self.waiting is None and isinstance(own, QuantizedWeight) and any(bound % _PANEL for bound in bounds):
            self.waiting = object()

    def _load(self, at: int, weight: torch.Tensor | StoredMatrix, rows: slice) -> None:
        """Take these rows of what is given, as those from `at` on of `own`: nothing else of them is read."""
        self.own.load(at, weight[rows] if isinstance(weight, torch.Tensor) else RowRange(weight, rows.start, rows.stop))


class ShardedWeight(_HeldWeight):
    """A `WeightForm` of which this rank holds some rows; what others hold comes by `Ranks`."""

    def __init__(
        self, ranks: Ranks, cuts: Sequence[int], inputs: int, bounds: Sequence[int], paths: Sequence[str],
        forms: Mapping[str, StoredForm], make: Make,
    ) -> None:  # fmt: skip
        """`cuts`: those of `cut_rows`. `bounds`, `paths` as in `LayerOptions.weight`; `forms`: stored forms of those
        paths that stay as they are stored."""
        self.first, self.last = cuts[ranks.rank : ranks.rank + 2]
        self._ranks, self._firsts = ranks, [0, *bounds]
        here = [a < self.last and b > self.first for a, b in pairwise([*self._firsts, cuts[-1]])]
        within = [bound - self.first for bound in bounds if self.first < bound < self.last]
        own = make(self.last - self.first, inputs, within, [p for p, kept in zip(paths, here, strict=False) if kept])
        super().__init__(own, cuts[-1], inputs, bounds)
        self._forms = [forms.get(path) for path in paths] or [None]
        self._memory = OutputBufferPool()

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        begin, end = max(first, self.first), min(first + weight.shape[0], self.last)
        if begin < end:
            self._load(begin - self.first, weight, slice(begin - first, end - first))

    def takes(self, first: int) -> StoredForm | None:
        return self._forms[min(bisect_right(self._firsts, first), len(self._forms)) - 1]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        found = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        rows, results = x.reshape(-1, self.inputs), found.view(-1, self.outputs)
        added = None if bias is None else bias[self.first : self.last]

        def fill(some: slice, place: torch.Tensor) -> None:
            self.own.multiply(rows[some], added, place[:, self.first : self.last])

        for some, place in _exchanged(self._ranks, len(rows), self.outputs, x.dtype, fill):
            results[some].copy_(place)
        return found

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        """Logits in rank 0; elsewhere the result is arbitrary and is not read."""
        shape = len(x), self.outputs
        found = memory.take(shape) if x.device.type == "cpu" else x.new_empty(shape, dtype=torch.float32)
        added = None if bias is None else bias[self.first : self.last]

        def fill(some: slice, place: torch.Tensor) -> None:
            place[:, self.first : self.last] = self.own.logits(x[some], added, self._memory)

        for some, place in _exchanged(self._ranks, len(x), self.outputs, found.dtype, fill):
            if self._ranks.rank == 0:
                found[some].copy_(place)
        return found

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        def fill(some: slice, place: torch.Tensor) -> None:
            part = ids[some]
            (here,) = ((part >= self.first) & (part < self.last)).nonzero(as_tuple=True)
            if len(here):
                rows = out.new_empty(len(here), self.inputs)
                self.own.read_rows((part[here] - self.first).contiguous(), rows)
                place[here] = rows

        for some, place in _exchanged(self._ranks, len(ids), self.inputs, out.dtype, fill):
            out[some].copy_(place)


class Share(NamedTuple):
    """This rank's part of a layer that computes alone with what its first product gives, up to its last: some heads of
    attention or of a recurrence, or some numbers of a feed-forward part."""

    ranks: Ranks
    every: Sequence[Spans]
    """Rows of the first product that each rank has."""
    cuts: Sequence[int]
    """Columns at which the ranks' parts of what the last product reads begin, and their end."""
    heads: Sequence[int]
    """Heads, or single numbers, at which the ranks' parts begin, and their end."""

    @property
    def spans(self) -> Spans:
        """Rows of the first product that this one has."""
        return self.every[self.ranks.rank]

    def rows(self, each: Sequence[int]) -> Spans:
        """This one's of blocks side by side in which each head has so many."""
        return _spans(self.heads, each, self.ranks.rank)

    def part(self, count: int) -> slice:
        """This rank's of so many heads, which the ranks share evenly."""
        held = held_by(self.ranks, count)
        return slice(held.start, held.stop)

    def columns(self, whole: torch.Tensor) -> torch.Tensor:
        """The columns of a first product [rows, all its rows] that this rank goes on with."""
        return torch.cat([whole[:, first:last] for first, last in self.spans], dim=1)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """[rows, all columns] of what each rank has [rows, its columns] of."""
        columns, (first, last) = self.cuts[-1], self.cuts[self.ranks.rank :][:2]
        found = own.new_empty(len(own), columns)

        def fill(some: slice, place: torch.Tensor) -> None:
            place[:, first:last] = own[some]

        for some, place in _exchanged(self.ranks, len(own), columns, own.dtype, fill):
            found[some] = place
        return found


def share_of(
    ranks: Ranks | None, cuts: Sequence[int] | None, rows: Sequence[int], columns: int, copied: int = 0
) -> Share | None:
    """This rank's part of a layer of heads, or of single numbers, which the ranks have from one of `cuts` to the next.
    The first product has `rows` rows for each, in as many blocks, and behind them `copied` ones that every rank has;
    the last reads `columns` numbers of each. None: one process has all, as `cuts` are None."""
    if ranks is None or cuts is None:
        return None
    end = cuts[-1] * sum(rows)
    beside = [(end, end + copied)] if copied else []
    every = [[*_spans(cuts, rows, rank), *beside] for rank in range(ranks.size)]
    return Share(ranks, every, [cut * columns for cut in cuts], cuts)


def _spans(cuts: Sequence[int], rows: Sequence[int], rank: int) -> Spans:
    first, last = cuts[rank : rank + 2]
    begins = accumulate((cuts[-1] * each for each in rows), initial=0)
    return [(begin + first * each, begin + last * each) for begin, each in zip(begins, rows, strict=False)]


def gathered(share: Share | None, own: torch.Tensor) -> torch.Tensor:
    """[rows, all columns] of what this rank has; None: it has all."""
    return own if share is None else share.gather(own)


def part_of(share: Share | None, count: int) -> slice:
    """This rank's part of `count` heads, or of numbers of which each head has as many."""
    return slice(0, count) if share is None else share.part(count)


def own_rows(spans: Spans, first: int, count: int) -> list[tuple[slice, slice]]:
    """(which of `count` rows from `first` on, their places where `spans` lie side by side) of what these have."""
    found, place = [], 0
    for begin, end in spans:
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            found.append((slice(low - first, high - first), slice(place + low - begin, place + high - begin)))
        place += end - begin
    return found


def even_cuts(ranks: Ranks | None, count: int) -> list[int] | None:
    """Heads of `count` at which the ranks' parts begin and the last one ends; None: they cannot be even."""
    if ranks is None or count % ranks.size:
        return None
    return list(range(0, count + 1, count // ranks.size))


def paths_of(spans: Spans, bounds: Sequence[int], paths: Sequence[str]) -> list[str]:
    """The matrix of each span, if the matrices have names."""
    return [paths[bisect_right(bounds, first)] for first, _ in spans] if paths else []


class LocalWeight(_HeldWeight):
    """A `WeightForm` of some rows of a matrix. What they give stays in this rank."""

    def __init__(self, spans: Spans, inputs: int, bounds: Sequence[int], paths: Sequence[str], make: Make) -> None:
        """`bounds`, `paths` as in `LayerOptions.weight`, of the whole matrix."""
        ends = [*accumulate(last - first for first, last in spans)]
        self.spans, self._firsts = spans, [0, *ends]
        super().__init__(make(ends[-1], inputs, ends[:-1], paths_of(spans, bounds, paths)), ends[-1], inputs, bounds)

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        for given, own in own_rows(self.spans, first, weight.shape[0]):
            self._load(own.start, weight, given)

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
    count, width, out = chosen.shape[1], x.shape[1], torch.empty_like(x)

    def fill(some: slice, place: torch.Tensor) -> None:
        make(x[some], chosen[some].flatten(), place.view(-1, width))

    for some, made in _exchanged(ranks, len(x), count * width, x.dtype, fill):
        shares, values = weights[some, :, None], made.view(-1, count, width)
        total = values[:, 0].float() * shares[:, 0]
        for place in range(1, count):
            total += values[:, place].float() * shares[:, place]
        out[some] = total
    return out

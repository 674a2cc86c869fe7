"""Weights that are sharded over several processes, the ranks of one model (tensor parallelism).

A matrix [outputs, inputs] is split by outputs only, and the ranks' results are gathered: each number is one whole dot
product, computed by one rank with the kernel and in the order that one process would use. So its bits are the same at
any number of ranks, for every weight form whose rows do not depend on their neighbours. Megatron-LM (Shoeybi et al.
2019) splits every second matrix by inputs instead and adds up partial sums, which halves the exchanges but rounds
differently; between processes of one machine an exchange costs a barrier and a copy in shared memory. As there, the
work between a layer's two products stays in a rank where it can be divided: heads of attention with their keys and
values, and the inner numbers of a feed-forward network (`Share`). The first product is not gathered then.
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
"""Rows of which a shard has a multiple: whole panels of every packed and quantized form."""
_PANEL = 16
"""Rows of a panel of a quantized form."""
Make = Callable[[int, int, Sequence[int], Sequence[str]], WeightForm]
"""(outputs, inputs, bounds, paths) -> an empty weight, as `LayerOptions.weight` makes it."""


Spans = Sequence[tuple[int, int]]
"""(first, end) of rows of a merged matrix, ascending; each span lies in one matrix of the checkpoint."""


class Ranks(Protocol):
    """One process's exchange of results with the other ranks of its model."""

    rank: int
    """This process's number within its stage; rank 0 of stage 0 is the engine's process."""
    size: int
    stage: int
    """The pipeline stage of these ranks, of `stages`, each of which has `size` ranks."""
    stages: int
    exact: bool
    """Whether results must have the bits of one process, so that only matrices that keep them are divided. Not on GPUs,
    where all are."""

    def rows_at_once(self, row_bytes: int) -> int:
        """Number of rows of `row_bytes` each that can be exchanged at once."""

    def buffer(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns] that all ranks write before the next `meet`, each number by one rank, and read
        after it until the `meet` after that."""

    def meet(self) -> None:
        """Wait until all ranks have called this. Raises `RuntimeError` if one of them is gone."""


def cut_rows(outputs: int, size: int, firsts: Sequence[int]) -> tuple[int, ...] | None:
    """[size + 1] bounds of the ranks' shards of a matrix, as even as possible; None: there are too few rows. `firsts`:
    first rows of matrices side by side, ascending from 0; shards are multiples of `UNIT` rows from there."""
    cuts = [0]
    for rank in range(1, size):
        wanted = outputs * rank // size
        index = bisect_right(firsts, wanted) - 1
        end = firsts[index + 1] if index + 1 < len(firsts) else outputs
        cuts.append(min(firsts[index] + -(-(wanted - firsts[index]) // UNIT) * UNIT, end))
    cuts.append(outputs)
    return tuple(cuts) if all(one < other for one, other in pairwise(cuts)) else None


def _exchanged(
    ranks: Ranks, rows: int, columns: int, dtype: torch.dtype, fill: Callable[[slice, torch.Tensor], object]
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Exchange a matrix [rows, columns] in chunks of rows that fit the buffer: yields (chunk, buffer [chunk, columns]
    that all ranks have filled). `fill(chunk, buffer)` writes this rank's numbers."""
    most = ranks.rows_at_once(columns * dtype.itemsize)
    for first in range(0, rows, most):
        chunk = slice(first, min(first + most, rows))
        buffer = ranks.buffer(chunk.stop - first, columns, dtype)
        fill(chunk, buffer)
        ranks.meet()
        yield chunk, buffer


class _RowsWeight(WeightForm):
    """Base of `WeightForm`s whose `local` form has this rank's rows of a matrix."""

    def __init__(self, own: WeightForm, outputs: int, inputs: int, bounds: Sequence[int]) -> None:
        """`bounds`: of the whole matrix."""
        self.local, self.name, self.outputs, self.inputs = own, own.name, outputs, inputs
        self.bias_dtype, self.compiled = own.bias_dtype, own.compiled
        # which rows wait for each other is the same in every rank: an update is refused by the first or by none
        self.waiting: Any = own.waiting
        if self.waiting is None and isinstance(own, QuantizedWeight) and any(bound % _PANEL for bound in bounds):
            self.waiting = object()

    def _load(self, at: int, weight: torch.Tensor | StoredMatrix, rows: slice) -> None:
        """Load these rows of a checkpoint's matrix as rows from `at` on of the local form; no other rows are read."""
        local = weight[rows] if isinstance(weight, torch.Tensor) else RowRange(weight, rows.start, rows.stop)
        self.local.load(at, local)


class ShardedWeight(_RowsWeight):
    """A `WeightForm` of which this rank holds some rows; results are gathered from all ranks."""

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
        result = x.new_empty((*x.shape[:-1], self.outputs)) if out is None else out
        rows, results = x.reshape(-1, self.inputs), result.view(-1, self.outputs)
        added = None if bias is None else bias[self.first : self.last]

        def fill(chunk: slice, buffer: torch.Tensor) -> None:
            self.local.multiply(rows[chunk], added, buffer[:, self.first : self.last])

        for chunk, buffer in _exchanged(self._ranks, len(rows), self.outputs, x.dtype, fill):
            results[chunk].copy_(buffer)
        return result

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        """Logits in rank 0; elsewhere the result is arbitrary and is not read."""
        shape = len(x), self.outputs
        result = memory.take(shape) if x.device.type == "cpu" else x.new_empty(shape, dtype=torch.float32)
        added = None if bias is None else bias[self.first : self.last]

        def fill(chunk: slice, buffer: torch.Tensor) -> None:
            buffer[:, self.first : self.last] = self.local.logits(x[chunk], added, self._memory)

        for chunk, buffer in _exchanged(self._ranks, len(x), self.outputs, result.dtype, fill):
            if self._ranks.rank == 0:
                result[chunk].copy_(buffer)
        return result

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        def fill(chunk: slice, buffer: torch.Tensor) -> None:
            chunk_ids = ids[chunk]
            (local,) = ((chunk_ids >= self.first) & (chunk_ids < self.last)).nonzero(as_tuple=True)
            if len(local):
                rows = out.new_empty(len(local), self.inputs)
                self.local.read_rows((chunk_ids[local] - self.first).contiguous(), rows)
                buffer[local] = rows

        for chunk, buffer in _exchanged(self._ranks, len(ids), self.inputs, out.dtype, fill):
            out[chunk].copy_(buffer)


class Share(NamedTuple):
    """This rank's shard of a layer whose work between its first and its last product is divided: some heads of
    attention or of a recurrence, or some inner numbers of a feed-forward network."""

    ranks: Ranks
    every: Sequence[Spans]
    """For each rank, its rows of the first product."""
    cuts: Sequence[int]
    """[size + 1] bounds of the ranks' columns of the last product's input."""
    heads: Sequence[int]
    """[size + 1] bounds of the ranks' heads, or single numbers."""

    @property
    def spans(self) -> Spans:
        """This rank's rows of the first product."""
        return self.every[self.ranks.rank]

    def rows(self, each: Sequence[int]) -> Spans:
        """This rank's rows of blocks side by side, in which each head has `each[block]` rows."""
        return _spans(self.heads, each, self.ranks.rank)

    def local_slice(self, count: int) -> slice:
        """This rank's slice of `count` heads, which the ranks divide evenly."""
        local = local_range(self.ranks, count)
        return slice(local.start, local.stop)

    def columns(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's columns of the whole first product [rows, all outputs]."""
        return torch.cat([whole[:, first:last] for first, last in self.spans], dim=1)

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """[rows, all columns], gathered from each rank's `local` [rows, its columns]."""
        columns, (first, last) = self.cuts[-1], self.cuts[self.ranks.rank :][:2]
        result = local.new_empty(len(local), columns)

        def fill(chunk: slice, buffer: torch.Tensor) -> None:
            buffer[:, first:last] = local[chunk]

        for chunk, buffer in _exchanged(self.ranks, len(local), columns, local.dtype, fill):
            result[chunk] = buffer
        return result


def share_of(
    ranks: Ranks | None, cuts: Sequence[int] | None, rows: Sequence[int], columns: int, copied: int = 0
) -> Share | None:
    """This rank's share of a layer of heads, or of single numbers; rank r has those from cuts[r] to cuts[r + 1]. The
    first product has rows[b] rows of each head in block b, and after all blocks `copied` rows that every rank has; the
    last product reads `columns` numbers of each head. None if one process has all heads, or `cuts` is None."""
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
    """[rows, all columns] of this rank's `own` [rows, its columns]; without a share these are all."""
    return own if share is None else share.gather(own)


def local_slice(share: Share | None, count: int) -> slice:
    """This rank's slice of `count` heads, or of `count` numbers of which each head has equally many."""
    return slice(0, count) if share is None else share.local_slice(count)


def own_rows(spans: Spans, first: int, count: int) -> list[tuple[slice, slice]]:
    """Overlaps of the `count` rows from `first` on with `spans`: (slice of these rows, slice of the concatenated spans)
    of each."""
    ranges, offset = [], 0
    for begin, end in spans:
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            ranges.append((slice(low - first, high - first), slice(offset + low - begin, offset + high - begin)))
        offset += end - begin
    return ranges


def even_cuts(ranks: Ranks | None, count: int) -> list[int] | None:
    """[size + 1] bounds that divide `count` heads evenly among the ranks; None: they cannot be divided evenly."""
    if ranks is None or count % ranks.size:
        return None
    return list(range(0, count + 1, count // ranks.size))


def paths_of(spans: Spans, bounds: Sequence[int], paths: Sequence[str]) -> list[str]:
    """Path of each span's matrix; empty if matrices have no names."""
    return [paths[bisect_right(bounds, first)] for first, _ in spans] if paths else []


class LocalWeight(_RowsWeight):
    """A `WeightForm` of this rank's rows of a matrix, whose outputs are not gathered."""

    def __init__(self, spans: Spans, inputs: int, bounds: Sequence[int], paths: Sequence[str], make: Make) -> None:
        """`bounds`, `paths` as in `LayerOptions.weight`, of the whole matrix."""
        ends = [*accumulate(last - first for first, last in spans)]
        self.spans, self._firsts = spans, [0, *ends]
        super().__init__(make(ends[-1], inputs, ends[:-1], paths_of(spans, bounds, paths)), ends[-1], inputs, bounds)

    def load(self, first: int, weight: torch.Tensor | StoredMatrix) -> None:
        for rows, local in own_rows(self.spans, first, weight.shape[0]):
            self._load(local.start, weight, rows)

    def takes(self, first: int) -> StoredForm | None:
        span = next(index for index, (_, last) in enumerate(self.spans) if first < last)
        return self.local.takes(self._firsts[span])

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.local.multiply(x, bias, out)

    def logits(self, x: torch.Tensor, bias: torch.Tensor | None, memory: OutputBufferPool) -> torch.Tensor:
        return self.local.logits(x, bias, memory)

    def read_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        raise RuntimeError("rows of a weight of which other ranks have some cannot be read")


def local_range(ranks: Ranks | None, experts: int) -> range:
    """Numbers of this process's experts of a mixture, or of its heads."""
    if ranks is None:
        return range(experts)
    return range(experts * ranks.rank // ranks.size, experts * (ranks.rank + 1) // ranks.size)


def leave(tensor: torch.Tensor | StoredMatrix) -> None:
    """Load nothing: the tensor belongs to another process."""


def gather_experts(
    ranks: Ranks, make: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], x: torch.Tensor,
    chosen: torch.Tensor, weights: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[rows, width]: the sum over the experts `chosen` [rows, k] of their outputs for x times `weights` [rows, k], in
    the compiled kernel's order. `make(x, experts [pairs], made [pairs, width])` computes this rank's experts."""
    count, width, out = chosen.shape[1], x.shape[1], torch.empty_like(x)

    def fill(chunk: slice, buffer: torch.Tensor) -> None:
        make(x[chunk], chosen[chunk].flatten(), buffer.view(-1, width))

    for chunk, made in _exchanged(ranks, len(x), count * width, x.dtype, fill):
        shares, values = weights[chunk, :, None], made.view(-1, count, width)
        total = values[:, 0].float() * shares[:, 0]
        for buffer in range(1, count):
            total += values[:, buffer].float() * shares[:, buffer]
        out[chunk] = total
    return out

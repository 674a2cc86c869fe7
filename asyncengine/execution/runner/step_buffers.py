"""Turning a `Batch` into the flat arrays one step needs.

Page tables are persistent: one row per slot, into which only pages that are new since the last step are copied. That
rests on the batch's sharing rule: a request's page list is appended to or replaced by a new list, never changed in
place, so the same list object means the same leading pages.

On a CPU a short step is written into the arrays of one of the same sizes before it: there a step has been computed when
the next one is built, however many are in flight, and nothing that outlives a launch may be kept of a `Step`. On other
devices every step has arrays of its own, which are still being copied.

The rest is counted row by row and token by token: of a short step, twenty calls of numpy that do the same take longer,
and a long one takes a hundred times as long to compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch

from asyncengine.execution.attention.base import StepView
from asyncengine.execution.device.transfer import Int32Array, Int64Array, upload
from asyncengine.execution.layers.states import StateSegments
from asyncengine.execution.pooling.pool import Span
from asyncengine.step import Batch, Row, first_scored

_FEW, _SHAPES = 64, 64
"""Tokens of a short step, and sizes of such whose arrays are kept: a few KiB each."""
_Arrays = tuple[Int64Array, Sequence[Int64Array], Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step, flattened. T tokens, N rows of logits, S sampling rows."""

    view: StepView
    input_ids: torch.Tensor
    """Device, int64 [T]."""
    positions: torch.Tensor
    """Device, int64 [T]."""
    logit_rows: torch.Tensor
    """Device, int64 [N]: tokens whose logits are wanted, ascending."""
    sampling: list[int]
    """[S] batch index of the row of each sampled token: a row with drafts samples several."""
    sample_logits: Int64Array
    """[S] which row of the logits each of them samples from."""
    prompt_spans: list[tuple[int, int, int]]
    """(batch index, first, last): rows [first, last) of the logits predict this row's prompt tokens from start + 1."""
    pool_spans: list[Span]
    """Rows of the logits, which are hidden states then, that are pooled."""
    segments: StateSegments | None = None
    """The rows' recurrent states: read from and written to which slots; None: they have none."""


class FlatStep(NamedTuple):
    """A step on the host. R rows, T tokens."""

    numbers: Int64Array
    """All numbers of the step."""
    parts: Sequence[torch.Tensor]
    """Parts of them: tokens, positions, KV slots, those in the pool of layers with windows, `wanted`, and others."""
    starts: Int64Array
    """[R] position of each row's first token."""
    counts: Int64Array
    """[R]"""
    indptr: Int64Array
    """[R + 1] where each row's tokens begin."""
    tables: Int32Array
    """[R, most pages of a row]"""
    window_tables: Int32Array | None
    """[R, most pages of a row], in the pool of layers with windows; None: all layers have one pool."""
    tokens: Int64Array
    """[T]; arbitrary where it is in flight."""
    positions: Int64Array
    """[T]"""
    kv_slots: Int64Array
    """[T]"""
    in_flight: Int64Array
    """[2, F] which tokens are the last tokens of their slots, and those slots."""
    wanted: list[int]
    """Tokens whose logits are wanted, ascending."""
    sampling: list[int]
    """The same as in `Step`, like what follows."""
    sample_logits: Int64Array
    prompt_spans: list[tuple[int, int, int]]
    pool_spans: list[Span]
    adapters: tuple[int, ...]
    """[R] adapter slot or 0."""

    def view(self, kv_slots: torch.Tensor, window_slots: torch.Tensor | None = None) -> StepView:
        """The same for an attention backend, with slots on the device."""
        return StepView(
            self.starts, self.counts, self.indptr, self.tables, kv_slots, self.window_tables, window_slots
        )  # fmt: skip


SLOT, POSITION, KV_SLOT, NEXT, ADAPTER, GIVEN, SOURCE, STATE_SOURCE, STATE_TARGET = range(9)
"""Numbers of a decode step's row: its slot, its token's position, where key and value go, the position after, its
adapter's slot counted from 0 or -1, the token if it is known here or -1, one for whoever knows where tokens lie, and
where its recurrent state lies and goes."""
GROWING = slice(POSITION, NEXT + 1)
"""The numbers that grow by one with each step, as long as a row stays on its page."""
NUMBERS = 10
"""Count of these, with one to spare: what follows them in memory begins at a multiple of 16 bytes."""


class DecodeStep(NamedTuple):
    """A step of one token in each row, and of one sampled token."""

    numbers: Int64Array
    """[NUMBERS, rows]. The next step may be written here."""
    tables: Int32Array
    """[slots and one more that has page 0 only, pages] page tables."""
    adapters: tuple[int, ...]
    """[rows] adapter slot or 0."""
    order: int = 0
    """The number of such steps that were flattened up to this one."""
    follows: bool = False
    """Whether its rows are those of the step before in this order, each one position further on the same page."""


class _SlotTables:
    """Page tables of one pool, a row for each slot, and one for padding rows."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows = np.zeros((max_num_seqs + 1, 16), dtype=np.int32)
        self._lists: list[list[int] | None] = [None] * max_num_seqs
        self._copied = [0] * max_num_seqs

    def update(self, slot: int, pages: list[int], first: int, need: int) -> None:
        """`pages` are the slot's from its page `first` on; those before `need` are wanted."""
        if self._lists[slot] is pages and self._copied[slot] >= need:
            return
        if len(pages) < need - first:
            raise ValueError(f"row of slot {slot}: {len(pages)} pages do not cover {need - first}")
        if need > self.rows.shape[1]:
            grown = np.zeros((len(self.rows), max(need, 2 * self.rows.shape[1])), dtype=np.int32)
            grown[:, : self.rows.shape[1]] = self.rows
            self.rows = grown
        if self._lists[slot] is not pages:
            self._lists[slot] = pages
            self._copied[slot] = first
        copied = self._copied[slot]
        self.rows[slot, copied:need] = pages[copied - first : need - first]
        self._copied[slot] = max(copied, need)


class StepBuffers:
    """Builds steps for one runner. Keeps page tables per slot."""

    def __init__(self, max_num_seqs: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device, self._on_host = device, device.type == "cpu"
        self._tables = _SlotTables(max_num_seqs)
        self._window_tables = _SlotTables(max_num_seqs)
        self._short: dict[tuple[int, ...], _Arrays] = {}
        self._decodes = 0
        self._known: tuple[object, ...] | None = None
        """Slots, adapters, page tables and states of the last decode step's rows; None: not all had a token in flight.
        """
        self._numbers: Int64Array = np.empty((NUMBERS, 0), dtype=np.int64)
        """The numbers of that step."""

    def build(self, batch: Batch, last_token: torch.Tensor) -> Step:
        """Flatten `batch`; tokens in flight come from `last_token` [max_num_seqs] on the device.

        Raises `ValueError` if a row does not carry the tokens or pages its positions need.
        """
        self._known = None
        flat = self.flatten(batch.rows)
        parts = flat.parts
        if not self._on_host:
            parts = torch.split(upload(flat.numbers, self._device), list(map(len, parts)))
        input_ids, positions, targets, near, keep, *_ = parts
        if flat.in_flight.size and self._on_host:
            flat.tokens[flat.in_flight[0]] = last_token.numpy()[flat.in_flight[1]]
        elif flat.in_flight.size:
            into, source = upload(flat.in_flight, self._device)
            input_ids = input_ids.index_copy(0, into, last_token[source])
        return Step(
            flat.view(targets, None if flat.window_tables is None else near), input_ids, positions, keep, flat.sampling,
            flat.sample_logits, flat.prompt_spans, flat.pool_spans, _segments(batch.rows, flat.indptr.tolist()),
        )  # fmt: skip

    def decodes(self, rows: tuple[Row, ...]) -> DecodeStep | None:
        """Flatten a step in which each row computes one token and samples one; None: it is another kind.

        Raises `ValueError` as `build`.
        """
        _, own, first, counts, _, in_flight, pages, samples, adapters, _, uses, *_ = zip(*rows, strict=True)
        if counts.count(1) < len(rows) or not all(samples):
            self._known = None  # a request may come back with other pages
            return None
        self._decodes += 1
        known = (own, adapters, pages, uses) if all(in_flight) else None
        if known is not None and known == self._known and list(first) == self._numbers[NEXT].tolist():
            return DecodeStep(self._numbers, self._tables.rows, adapters, self._decodes, self._move_on(own, pages))
        self._known = None
        self._numbers = numbers = np.empty((NUMBERS, len(rows)), dtype=np.int64)
        numbers[SLOT], numbers[POSITION], numbers[ADAPTER], numbers[GIVEN] = own, first, adapters, -1
        if uses[0] is not None:
            if any(use.saves for use in uses):
                return None
            numbers[STATE_SOURCE], numbers[STATE_TARGET] = [use.source for use in uses], [use.slot for use in uses]
        page = numbers[POSITION] // self._page_size
        for slot, held, need in zip(own, pages, (page + 1).tolist(), strict=True):
            self._tables.update(slot, held, 0, need)
        first_of_page = self._tables.rows[numbers[SLOT], page].astype(np.int64) * self._page_size
        numbers[KV_SLOT] = first_of_page + numbers[POSITION] % self._page_size
        numbers[ADAPTER] -= 1
        numbers[NEXT] = numbers[POSITION] + 1
        if known is None:
            for place, row in enumerate(rows):
                if not row.in_flight:
                    (numbers[GIVEN, place],) = self._input_tokens(row)
        self._known = known
        return DecodeStep(numbers, self._tables.rows, adapters, self._decodes)

    def _move_on(self, own: tuple[int, ...], pages: tuple[list[int], ...]) -> bool:
        """Let each row of the last decode step be one position further. Returns whether all stay on their pages."""
        numbers = self._numbers
        numbers[GROWING] += 1
        (entered,) = (numbers[POSITION] % self._page_size == 0).nonzero()  # flatnonzero costs as much again
        for place in entered.tolist():
            page = int(numbers[POSITION, place]) // self._page_size
            self._tables.update(own[place], pages[place], 0, page + 1)
            numbers[KV_SLOT, place] = pages[place][page] * self._page_size
        return not entered.size

    def flatten(self, rows: tuple[Row, ...]) -> FlatStep:
        """Gather what the host knows of a step. Raises `ValueError` as `build`."""
        size = self._page_size
        ids: list[int] = []
        positions: list[int] = []
        targets: list[int] = []
        near: list[int] = []
        flying: list[int] = []
        bounds, most = [0], 0
        for row in rows:
            start, end, pages = row.start, row.start + row.num_scheduled, row.pages
            need = -(-end // size)
            most = max(most, need)
            self._tables.update(row.slot, pages, 0, need)
            ids += self._input_tokens(row)
            if row.in_flight:
                flying.append(len(ids) - 1)
            positions += range(start, end)
            targets += [pages[place // size] * size + place % size for place in range(start, end)]
            if row.window is not None:
                first, pages = row.window
                self._window_tables.update(row.slot, pages, first, need)
                near += [pages[place // size - first] * size + place % size for place in range(start, end)]
            bounds.append(len(ids))
        wanted, sampling, sample_logits, spans, pooled = _wanted_logits(rows, bounds)
        _, slots, starts, counts, _, in_flight, _, _, adapters, *_ = zip(*rows, strict=True)
        own = [slot for slot, flies in zip(slots, in_flight, strict=True) if flies]
        columns = (ids, positions, targets, near, wanted, starts, counts, bounds, sample_logits, flying, own)
        sizes = tuple(map(len, columns))
        numbers, arrays, tensors = self._short.get(sizes) or self._arrays(sizes)
        numbers[:] = [*chain(*columns)]
        # of one row no copy, where nothing is in flight that reads it
        rows_of = slice(slots[0], slots[0] + 1) if len(rows) == 1 and self._on_host else list(slots)
        return FlatStep(
            numbers, tensors, arrays[5], arrays[6], arrays[7], self._tables.rows[rows_of, :most],
            self._window_tables.rows[rows_of, :most] if near else None, arrays[0], arrays[1], arrays[2],
            numbers[len(numbers) - 2 * len(own) :].reshape(2, -1), wanted, sampling, arrays[8], spans, pooled, adapters,
        )  # fmt: skip

    def _arrays(self, sizes: tuple[int, ...]) -> _Arrays:
        """Memory of the numbers of a step, and parts of so many as arrays and as tensors. On a CPU the next short step
        of these sizes is written there."""
        numbers = np.empty(sum(sizes), dtype=np.int64)
        arrays = np.split(numbers, [*accumulate(sizes)][:-1])
        made = numbers, arrays, torch.split(torch.from_numpy(numbers), list(sizes))
        if self._on_host and sizes[0] <= _FEW:
            if len(self._short) == _SHAPES:
                self._short.clear()
            self._short[sizes] = made
        return made

    def _input_tokens(self, row: Row) -> list[int]:
        end = row.start + row.num_scheduled
        known = end - row.in_flight - len(row.drafts)
        tokens = row.tokens[row.start : known]
        if row.spec.images and row.start < row.spec.prompt_len:  # pictures: their hidden states take these places
            tokens = [max(token, 0) for token in tokens]
        if len(tokens) != known - row.start or row.num_scheduled < 1:
            raise ValueError(f"row of slot {row.slot}: {len(row.tokens)} tokens do not cover [{row.start}, {end})")
        if row.drafts:
            tokens += row.drafts
        if row.in_flight:
            tokens.append(0)
        return tokens


def _segments(rows: tuple[Row, ...], indptr: Iterable[int]) -> StateSegments | None:
    """Each row from the state it starts from over the snapshots it takes and the states between guesses to its own."""
    if not rows or rows[0].state is None:
        return None
    bounds, parts = [0], []
    for row, first in zip(rows, indptr, strict=False):
        use = row.state
        assert use is not None
        begin, source = first, use.source
        for position, slot in use.saves:
            end = first + position - row.start
            parts.append((begin, end, source, slot))
            begin, source = end, slot
        ends = first + row.num_scheduled
        for end, slot in zip(range(ends - len(row.drafts), ends), use.guesses, strict=False):
            parts.append((begin, end, source, slot))
            begin, source = end, slot
        parts.append((begin, ends, source, use.slot))
        bounds.append(len(parts))
    begins, ends, sources, targets = np.array(parts, dtype=np.int64).T.copy()
    return StateSegments(np.array(bounds, dtype=np.int64), begins, ends, sources, targets)


def _wanted_logits(
    rows: tuple[Row, ...], indptr: list[int]
) -> tuple[list[int], list[int], list[int], list[tuple[int, int, int]], list[Span]]:
    """Tokens whose logits are wanted, and for what; of requests for vectors, their hidden states."""
    wanted: list[int] = []
    sampling: list[int] = []
    sample_logits: list[int] = []
    spans: list[tuple[int, int, int]] = []
    pooled: list[Span] = []
    for index, row in enumerate(rows):
        begin, end = indptr[index], indptr[index + 1]
        if row.spec.pooled is not None:
            first = begin if row.spec.pooled.every else end - 1
            if row.samples or row.spec.pooled.every:
                pooled.append(Span(index, len(wanted), len(wanted) + end - first))
                wanted += range(first, end)
            continue
        if row.spec.params.prompt_logprobs:
            unscored = first_scored(row) - 1 - row.start
            predicting = min(row.num_scheduled, row.spec.prompt_len - 1 - row.start) - unscored
            if predicting > 0:
                spans.append((index, len(wanted), len(wanted) + predicting))
                wanted += range(begin + unscored, begin + unscored + predicting)
        if row.samples:
            for last in range(end - 1 - len(row.drafts), end):
                if not wanted or wanted[-1] != last:
                    wanted.append(last)
                sampling.append(index)
                sample_logits.append(len(wanted) - 1)
    return wanted, sampling, sample_logits, spans, pooled

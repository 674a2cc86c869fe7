"""Turning a `Batch` into the flat arrays one step needs.

Page tables are persistent: one row per slot, into which only pages that are new since the last step are copied. That
rests on the batch's sharing rule: a request's page list is appended to or replaced by a new list, never changed in
place, so the same list object means the same leading pages.

On a CPU a short step reuses the arrays of an earlier step of the same sizes: there a step has been computed before the
next one is built, however many are in flight, so no code may keep arrays of a `Step` after its launch. On other devices
every step has arrays of its own, which may still be being copied.

Flattening loops over rows and tokens in Python: for a short step the twenty numpy calls that would do the same take
longer, and a long step takes a hundred times as long to compute anyway.
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
"""Most tokens of a short step, and number of shapes whose arrays are kept: a few KiB each."""
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
    """Rows of the logits that are pooled; the model's forward returns hidden states as logits then."""
    segments: StateSegments | None = None
    """Segments by which the rows' recurrent states advance from slot to slot; None: the model has none."""


class FlatStep(NamedTuple):
    """A step on the host. R rows, T tokens."""

    numbers: Int64Array
    """All numbers of the step."""
    tensors: Sequence[torch.Tensor]
    """Views of `numbers`: tokens, positions, KV slots, KV slots in the window pool, `wanted`, and others."""
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
    """[T] token ids; arbitrary for a token in flight."""
    positions: Int64Array
    """[T]"""
    kv_slots: Int64Array
    """[T]"""
    in_flight: Int64Array
    """[2, F] which tokens are the last tokens of their slots, and those slots."""
    wanted: list[int]
    """Tokens whose logits are wanted, ascending."""
    sampling: list[int]
    """[S] as in `Step`; so are the next three fields."""
    sample_logits: Int64Array
    prompt_spans: list[tuple[int, int, int]]
    pool_spans: list[Span]
    adapters: tuple[int, ...]
    """[R] adapter slot or 0."""

    def view(self, kv_slots: torch.Tensor, window_slots: torch.Tensor | None = None) -> StepView:
        """The step as an attention backend takes it, with KV slots on the device."""
        tables, window = self.tables, (self.window_tables, window_slots)
        return StepView(self.starts, self.counts, self.indptr, tables, kv_slots, *window)


SLOT, POSITION, KV_SLOT, NEXT, ADAPTER, GIVEN, SOURCE, STATE_SOURCE, STATE_TARGET = range(9)
"""Numbers of a decode step's row: its slot, its token's position, the token's KV slot, the next position, its adapter's
slot counted from 0 or -1, the token id if the host knows it or -1, the index from which a graph gathers the token
(`graphs`), and the slots that its recurrent state is read from and written to."""
GROWING = slice(POSITION, NEXT + 1)
"""The numbers that grow by one with each step, as long as a row stays on its page."""
NUMBERS = 10
"""Count of these plus one of padding, so that what follows them in memory begins at a multiple of 16 bytes."""


class DecodeStep(NamedTuple):
    """A step in which each row computes one token and samples one."""

    numbers: Int64Array
    """[NUMBERS, rows]. The next step may overwrite them."""
    tables: Int32Array
    """[slots + 1, pages] page tables; the last is for padding rows, and has page 0 only."""
    adapters: tuple[int, ...]
    """[rows] adapter slot or 0."""
    order: int = 0
    """Its number among the decode steps that were flattened."""
    follows: bool = False
    """Whether its rows are those of the decode step before it, each one position further on the same page."""


class _SlotTables:
    """Page tables of one pool, a row for each slot, and one for padding rows."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows = np.zeros((max_num_seqs + 1, 16), dtype=np.int32)
        self._lists: list[list[int] | None] = [None] * max_num_seqs
        self._copied = [0] * max_num_seqs

    def update(self, slot: int, pages: list[int], first: int, need: int) -> None:
        """Copy pages [first, need) of the slot from `pages`, whose first entry is page number `first`. Raises
        `ValueError` if there are fewer."""
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
        self._key: tuple[object, ...] | None = None
        """Slots, adapters, page lists and states of the last decode step's rows; None: some token was not in flight."""
        self._numbers: Int64Array = np.empty((NUMBERS, 0), dtype=np.int64)
        """The last decode step's numbers."""

    def build(self, batch: Batch, last_token: torch.Tensor) -> Step:
        """Flatten `batch`; tokens in flight come from `last_token` [max_num_seqs] on the device.

        Raises `ValueError` if a row does not carry the tokens or pages its positions need.
        """
        self._key = None
        flat = self.flatten(batch.rows)
        tensors = flat.tensors
        if not self._on_host:
            tensors = torch.split(upload(flat.numbers, self._device), list(map(len, tensors)))
        input_ids, positions, kv_slots, window_slots, logit_rows, *_ = tensors
        if flat.in_flight.size and self._on_host:
            flat.tokens[flat.in_flight[0]] = last_token.numpy()[flat.in_flight[1]]
        elif flat.in_flight.size:
            indices, source = upload(flat.in_flight, self._device)
            input_ids = input_ids.index_copy(0, indices, last_token[source])
        view = flat.view(kv_slots, None if flat.window_tables is None else window_slots)
        return Step(
            view, input_ids, positions, logit_rows, flat.sampling, flat.sample_logits, flat.prompt_spans,
            flat.pool_spans, _segments(batch.rows, flat.indptr.tolist()),
        )  # fmt: skip

    def decodes(self, rows: tuple[Row, ...]) -> DecodeStep | None:
        """Flatten a step in which each row computes one token and samples one; None if this step is not of that form.

        Raises `ValueError` as `build`.
        """
        _, slots, starts, counts, _, in_flight, pages, samples, adapters, _, uses, *_ = zip(*rows, strict=True)
        if counts.count(1) < len(rows) or not all(samples):
            self._key = None  # after another step a request may come back with other pages
            return None
        self._decodes += 1
        key = (slots, adapters, pages, uses) if all(in_flight) else None
        if key is not None and key == self._key and list(starts) == self._numbers[NEXT].tolist():
            return DecodeStep(self._numbers, self._tables.rows, adapters, self._decodes, self._move_on(slots, pages))
        self._key = None
        self._numbers = numbers = np.empty((NUMBERS, len(rows)), dtype=np.int64)
        numbers[SLOT], numbers[POSITION], numbers[ADAPTER], numbers[GIVEN] = slots, starts, adapters, -1
        if uses[0] is not None:
            if any(use.saves for use in uses):
                return None
            numbers[STATE_SOURCE], numbers[STATE_TARGET] = [use.source for use in uses], [use.slot for use in uses]
        page = numbers[POSITION] // self._page_size
        for slot, page_list, need in zip(slots, pages, (page + 1).tolist(), strict=True):
            self._tables.update(slot, page_list, 0, need)
        first_of_page = self._tables.rows[numbers[SLOT], page].astype(np.int64) * self._page_size
        numbers[KV_SLOT] = first_of_page + numbers[POSITION] % self._page_size
        numbers[ADAPTER] -= 1
        numbers[NEXT] = numbers[POSITION] + 1
        if key is None:
            for index, row in enumerate(rows):
                if not row.in_flight:
                    (numbers[GIVEN, index],) = self._input_tokens(row)
        self._key = key
        return DecodeStep(numbers, self._tables.rows, adapters, self._decodes)

    def _move_on(self, slots: tuple[int, ...], pages: tuple[list[int], ...]) -> bool:
        """Advance each row of the last decode step by one position. Returns whether all stay on their pages."""
        numbers = self._numbers
        numbers[GROWING] += 1
        (entered,) = (numbers[POSITION] % self._page_size == 0).nonzero()  # flatnonzero costs as much again
        for index in entered.tolist():
            page = int(numbers[POSITION, index]) // self._page_size
            self._tables.update(slots[index], pages[index], 0, page + 1)
            numbers[KV_SLOT, index] = pages[index][page] * self._page_size
        return not entered.size

    def flatten(self, rows: tuple[Row, ...]) -> FlatStep:
        """Flatten a step on the host; ids of tokens in flight are left out. Raises `ValueError` as `build`."""
        size = self._page_size
        ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        window_slots: list[int] = []
        in_flight_tokens: list[int] = []
        bounds, most = [0], 0
        for row in rows:
            start, end, pages = row.start, row.start + row.num_scheduled, row.pages
            need = -(-end // size)
            most = max(most, need)
            self._tables.update(row.slot, pages, 0, need)
            ids += self._input_tokens(row)
            if row.in_flight:
                in_flight_tokens.append(len(ids) - 1)
            positions += range(start, end)
            kv_slots += [pages[at // size] * size + at % size for at in range(start, end)]
            if row.window is not None:
                first, pages = row.window
                self._window_tables.update(row.slot, pages, first, need)
                window_slots += [pages[at // size - first] * size + at % size for at in range(start, end)]
            bounds.append(len(ids))
        wanted, sampling, sample_logits, spans, pooled = _wanted_logits(rows, bounds)
        _, slots, starts, counts, _, in_flight, _, _, adapters, *_ = zip(*rows, strict=True)
        in_flight_slots = [slot for slot, flies in zip(slots, in_flight, strict=True) if flies]
        columns = (
            ids, positions, kv_slots, window_slots, wanted, starts, counts, bounds, sample_logits, in_flight_tokens,
            in_flight_slots,
        )  # fmt: skip
        sizes = tuple(map(len, columns))
        numbers, arrays, tensors = self._short.get(sizes) or self._arrays(sizes)
        numbers[:] = [*chain(*columns)]
        # a slice copies nothing; on a CPU no launched step still reads the table when the next one changes it
        rows_of = slice(slots[0], slots[0] + 1) if len(rows) == 1 and self._on_host else list(slots)
        in_flight_pairs = numbers[len(numbers) - 2 * len(in_flight_slots) :].reshape(2, -1)
        return FlatStep(
            numbers, tensors, arrays[5], arrays[6], arrays[7], self._tables.rows[rows_of, :most],
            self._window_tables.rows[rows_of, :most] if window_slots else None, arrays[0], arrays[1], arrays[2],
            in_flight_pairs, wanted, sampling, arrays[8], spans, pooled, adapters,
        )  # fmt: skip

    def _arrays(self, sizes: tuple[int, ...]) -> _Arrays:
        """Memory for a step's numbers, and views of it of these sizes, as arrays and as tensors. On a CPU it is kept
        for the next short step of these sizes."""
        numbers = np.empty(sum(sizes), dtype=np.int64)
        views = np.split(numbers, [*accumulate(sizes)][:-1])
        arrays = numbers, views, torch.split(torch.from_numpy(numbers), list(sizes))
        if self._on_host and sizes[0] <= _FEW:
            if len(self._short) == _SHAPES:
                self._short.clear()
            self._short[sizes] = arrays
        return arrays

    def _input_tokens(self, row: Row) -> list[int]:
        end = row.start + row.num_scheduled
        known_end = end - row.in_flight - len(row.drafts)
        tokens = row.tokens[row.start : known_end]
        if row.spec.images and row.start < row.spec.prompt_len:  # negative ids stand for pictures' hidden states
            tokens = [max(token, 0) for token in tokens]
        if len(tokens) != known_end - row.start or row.num_scheduled < 1:
            raise ValueError(f"row of slot {row.slot}: {len(row.tokens)} tokens do not cover [{row.start}, {end})")
        if row.drafts:
            tokens += row.drafts
        if row.in_flight:
            tokens.append(0)
        return tokens


def _segments(rows: tuple[Row, ...], indptr: Iterable[int]) -> StateSegments | None:
    """The state segments of all rows; None: the model has no states. A row goes from the state it starts from, over its
    snapshots and the states after each of its drafts, to the state of its own slot."""
    if not rows or rows[0].state is None:
        return None
    bounds, segments = [0], []
    for row, first in zip(rows, indptr, strict=False):
        use = row.state
        assert use is not None
        begin, source = first, use.source
        for position, slot in use.saves:
            end = first + position - row.start
            segments.append((begin, end, source, slot))
            begin, source = end, slot
        ends = first + row.num_scheduled
        for end, slot in zip(range(ends - len(row.drafts), ends), use.guesses, strict=False):
            segments.append((begin, end, source, slot))
            begin, source = end, slot
        segments.append((begin, ends, source, use.slot))
        bounds.append(len(segments))
    begins, ends, sources, targets = np.array(segments, dtype=np.int64).T.copy()
    return StateSegments(np.array(bounds, dtype=np.int64), begins, ends, sources, targets)


def _wanted_logits(
    rows: tuple[Row, ...], indptr: list[int]
) -> tuple[list[int], list[int], list[int], list[tuple[int, int, int]], list[Span]]:
    """(tokens whose logits are wanted, `sampling`, `sample_logits`, `prompt_spans`, `pool_spans`), as in `Step`."""
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

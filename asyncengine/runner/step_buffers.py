"""Turning a `Batch` into the flat arrays one step needs.

Page tables are persistent: one row per slot, into which only pages that are new since the last step are copied. That
rests on the batch's sharing rule: a request's page list is appended to or replaced by a new list, never changed in
place, so the same list object means the same leading pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from asyncengine.attention.base import StepView
from asyncengine.device.pinned import Int64Array
from asyncengine.device.transfer import upload
from asyncengine.layers.states import StateSegments
from asyncengine.pooling.pool import Span
from asyncengine.step import Batch, Row


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
    """What is done with the rows' states; None: they have none."""


class _SlotTables:
    """Page tables of one pool, a row for each slot."""

    def __init__(self, max_num_seqs: int) -> None:
        self.rows = np.zeros((max_num_seqs, 16), dtype=np.int32)
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
    """Builds steps for one runner. Keeps page tables per slot; everything else is made anew."""

    def __init__(self, max_num_seqs: int, page_size: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._tables = _SlotTables(max_num_seqs)
        self._window_tables = _SlotTables(max_num_seqs)

    def build(self, batch: Batch, last_token: torch.Tensor) -> Step:
        """Flatten `batch`; tokens in flight come from `last_token` [max_num_seqs] on the device.

        Raises `ValueError` if a row does not carry the tokens or pages its positions need.
        """
        rows = batch.rows
        tokens: list[int] = []
        in_flight: list[tuple[int, int]] = []
        windows = bool(rows) and rows[0].window is not None
        for row in rows:
            need = -(-(row.start + row.num_scheduled) // self._page_size)
            self._tables.update(row.slot, row.pages, 0, need)
            if row.window is not None:
                self._window_tables.update(row.slot, row.window.pages, row.window.first, need)
            tokens += self._input_tokens(row)
            if row.in_flight:
                in_flight.append((len(tokens) - 1, row.slot))
        starts = np.array([row.start for row in rows], dtype=np.int64)
        counts = np.array([row.num_scheduled for row in rows], dtype=np.int64)
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        indptr = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts, out=indptr[1:])
        row_of_token = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(indptr[-1]) + (starts - indptr[:-1])[row_of_token]
        places = (slots[row_of_token], positions // self._page_size)
        offsets = positions % self._page_size
        kv_slots = self._tables.rows[places].astype(np.int64) * self._page_size + offsets
        logit_rows, sampling, sample_logits, prompt_spans, pooled = _wanted_logits(rows, indptr)
        width = int(-(-(starts + counts).max() // self._page_size))

        packed = [np.array(tokens, dtype=np.int64), positions, kv_slots, logit_rows]
        if windows:
            packed.append(self._window_tables.rows[places].astype(np.int64) * self._page_size + offsets)
        on_device = upload(np.concatenate(packed), self._device)
        input_ids, where, targets, keep, *near = torch.split(on_device, [len(part) for part in packed])
        if in_flight:
            index = upload(np.array(in_flight, dtype=np.int64), self._device)
            input_ids = input_ids.index_copy(0, index[:, 0], last_token[index[:, 1]])
        view = StepView(starts, counts, indptr, self._tables.rows[slots, :width], targets)
        if windows:
            view = replace(view, window_tables=self._window_tables.rows[slots, :width], window_slots=near[0])
        segments = _segments(rows, indptr)
        return Step(view, input_ids, where, keep, sampling, sample_logits, prompt_spans, pooled, segments)

    def _input_tokens(self, row: Row) -> list[int]:
        end = row.start + row.num_scheduled
        known = end - row.in_flight - len(row.drafts)
        tokens = row.tokens[row.start : known]
        if len(tokens) != known - row.start or row.num_scheduled < 1:
            raise ValueError(f"row of slot {row.slot}: {len(row.tokens)} tokens do not cover [{row.start}, {end})")
        if row.drafts:
            tokens += row.drafts
        if row.in_flight:
            tokens.append(0)
        return tokens


def _segments(rows: tuple[Row, ...], indptr: Int64Array) -> StateSegments | None:
    """Each row from the state it starts from over the snapshots it takes to its own."""
    if not rows or rows[0].state is None:
        return None
    bounds, parts = [0], []
    for row, first in zip(rows, indptr.tolist(), strict=False):
        use = row.state
        assert use is not None
        begin, source = first, use.source
        for position, slot in use.saves:
            end = first + position - row.start
            parts.append((begin, end, source, slot))
            begin, source = end, slot
        parts.append((begin, first + row.num_scheduled, source, use.slot))
        bounds.append(len(parts))
    begins, ends, sources, targets = np.array(parts, dtype=np.int64).T.copy()
    return StateSegments(np.array(bounds, dtype=np.int64), begins, ends, sources, targets)


def _wanted_logits(
    rows: tuple[Row, ...], indptr: Int64Array
) -> tuple[Int64Array, list[int], Int64Array, list[tuple[int, int, int]], list[Span]]:
    """Which tokens' logits are wanted, and for what; of requests for vectors, which hidden states."""
    wanted: list[int] = []
    sampling: list[int] = []
    sample_logits: list[int] = []
    spans: list[tuple[int, int, int]] = []
    pooled: list[Span] = []
    for index, row in enumerate(rows):
        begin, end = int(indptr[index]), int(indptr[index + 1])
        if row.spec.pooled is not None:
            first = begin if row.spec.pooled.every else end - 1
            if row.samples or row.spec.pooled.every:
                pooled.append(Span(index, len(wanted), len(wanted) + end - first))
                wanted += range(first, end)
            continue
        if row.spec.params.prompt_logprobs:
            predicting = min(row.start + row.num_scheduled, row.spec.prompt_len - 1) - row.start
            if predicting > 0:
                spans.append((index, len(wanted), len(wanted) + predicting))
                wanted += range(begin, begin + predicting)
        if row.samples:
            for last in range(end - 1 - len(row.drafts), end):
                if not wanted or wanted[-1] != last:
                    wanted.append(last)
                sampling.append(index)
                sample_logits.append(len(wanted) - 1)
    return np.array(wanted, dtype=np.int64), sampling, np.array(sample_logits, dtype=np.int64), spans, pooled

"""Logit processors: penalties, bias, grammars' masks and `min_tokens`, applied before anything is chosen.

Rows without any stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncengine.device.pinned import Int64Array
from asyncengine.device.transfer import send, upload
from asyncengine.kernels.cuda import triton_missing
from asyncengine.sampling.masks import FilledMasks, apply_masks
from asyncengine.sampling.penalties import PenaltyTable
from asyncengine.sampling.slot_params import SlotParams
from asyncengine.step import Row


class LogitProcessors:
    """All logit processors of one step's rows."""

    def __init__(
        self,
        rows: Sequence[Row],
        params: SlotParams,
        slots: Int64Array | list[int],
        masks: FilledMasks,
        vocab_size: int,
    ) -> None:
        self._params = params
        self._vocab_size = vocab_size
        penalized = params.penalized[slots]
        masked = dict.fromkeys(masks.places)
        self.places = [
            place
            for place, row in enumerate(rows)
            if penalized[place] or place in masked or row.spec.params.logit_bias or _held_open(row)
        ]
        """Rows that have any, ascending."""
        self._rows = [rows[place] for place in self.places]
        self._masks = masks.among(self.places)

    def apply(self, logits: torch.Tensor, table: PenaltyTable, last_token: torch.Tensor) -> torch.Tensor:
        """A float32 copy of `logits` [len(places), vocab], those of the rows concerned, with all of theirs applied."""
        logits = logits.to(torch.float32, copy=True)
        if triton_missing(logits.device) is None:
            self._by_kernel(logits, table, last_token)
            self._bias(logits)
        else:
            for index, row in enumerate(self._rows):
                if self._params.penalized[row.slot]:
                    self._penalize(logits[index], row, table, last_token)
            self._bias(logits)
            if self._masks.places:
                apply_masks(logits, self._masks)
        self._hold_open(logits)
        return logits

    def _by_kernel(self, logits: torch.Tensor, table: PenaltyTable, last_token: torch.Tensor) -> None:
        """Penalties, then masks. A bias added behind these changes nothing that is masked."""
        from asyncengine.kernels.cuda.logit_processors import penalize_and_mask

        params, masks, device = self._params, self._masks, logits.device
        sources = np.zeros((len(self._rows), 6), dtype=np.int64)
        sources[:, 5] = -1
        sources[masks.places, 5] = np.arange(len(masks.places))
        seen = []
        for place, row in enumerate(self._rows):
            if params.penalized[row.slot]:
                seen.append(table.seen(row, last_token))
                sources[place, :2] = [tensor.data_ptr() for tensor in seen[-1]]
                penalties = params.repetition[row.slot], params.frequency[row.slot], params.presence[row.slot]
                sources[place, 2:5].view(np.float64)[:] = penalties
        if seen or masks.places:
            penalize_and_mask(logits, upload(sources, device), send(masks.packed, device))

    def _bias(self, logits: torch.Tensor) -> None:
        entries = [
            (index, token, value)
            for index, row in enumerate(self._rows)
            for token, value in row.spec.params.logit_bias.items()
            if token < self._vocab_size
        ]
        if entries:
            where, ids, values = zip(*entries, strict=True)
            places = upload(np.array((where, ids), dtype=np.int64), logits.device)
            added = upload(np.array(values, dtype=np.float32), logits.device)
            logits.index_put_((places[0], places[1]), added, accumulate=True)

    def _penalize(self, logits: torch.Tensor, row: Row, table: PenaltyTable, last_token: torch.Tensor) -> None:
        params, slot = self._params, row.slot
        prompt_seen, output_counts = table.seen(row, last_token)
        repetition = float(params.repetition[slot])
        if repetition != 1.0:
            penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(prompt_seen | (output_counts > 0), penalized, logits))
        if params.frequency[slot]:
            logits.sub_(output_counts * float(params.frequency[slot]))
        if params.presence[slot]:
            logits.sub_((output_counts > 0) * float(params.presence[slot]))

    def _hold_open(self, logits: torch.Tensor) -> None:
        """Mask the stop ids, unless nothing else is left (a grammar that allows only the end wins)."""
        held_open = [index for index, row in enumerate(self._rows) if _held_open(row)]
        stops = [
            (place, token)
            for place, index in enumerate(held_open)
            for token in self._rows[index].spec.stop_ids
            if token < self._vocab_size
        ]
        if not stops:
            return
        index = upload(np.array(held_open, dtype=np.int64), logits.device)
        places = upload(np.array(stops, dtype=np.int64), logits.device)
        before = logits[index]
        kept = before.index_put((places[:, 0], places[:, 1]), before.new_full((), float("-inf")))
        nothing = torch.isneginf(kept).all(dim=-1, keepdim=True)
        logits.index_copy_(0, index, torch.where(nothing, before, kept))


def _held_open(row: Row) -> bool:
    """Must the row's output go on, because it is shorter than `min_tokens`?"""
    length = row.start + row.num_scheduled - row.spec.prompt_len
    return bool(row.spec.stop_ids) and length < row.spec.params.min_tokens

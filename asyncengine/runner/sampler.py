"""From logits to tokens: penalties, bias, masks, temperature, truncation and a draw, for all rows of a step at once.

Order (SGLang's): penalties on the model's logits, logit bias, grammar and minimum-length masks, temperature, top-k,
top-p over what top-k left, min-p. What happens to a row depends on its own parameters only, and its random numbers on
(seed, position, token id) only (`noise`), so neighbours never change its token. Steps that no row asks for are left
out: a greedy batch without extras is one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from asyncengine.attention.base import Int64Array
from asyncengine.batch import Row
from asyncengine.runner.masks import FilledMasks, apply_masks
from asyncengine.runner.noise import BLOCK_FLAG, gumbel
from asyncengine.runner.nucleus import smallest_kept
from asyncengine.runner.penalties import PenaltyTable
from asyncengine.runner.slot_params import SlotParams
from asyncengine.runner.transfer import Readback, upload

_BLOCK = 512
NON_FINITE = "the model produced non-finite logits"
NOTHING_ALLOWED = "no token is allowed: grammar, logit_bias and min_tokens exclude all"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Tokens of the sampling rows. Some may be void: that is known when it is here, not when it is computed."""

    tokens: torch.Tensor
    """int64 [rows]; 0 where void."""
    best: torch.Tensor
    """[rows] the largest logit of each row; not finite: the row has no token."""
    edited: Collection[int]
    """Rows whose logits were changed before anything was chosen."""

    def fetch(self, readback: Readback) -> Sampled:
        """The same on the host, once `readback` has arrived."""
        return Sampled(readback.fetch(self.tokens), readback.fetch(self.best), self.edited)

    @property
    def errors(self) -> dict[int, str]:
        """For host tensors: row -> why it has no token."""
        if bool(torch.isfinite(self.best).all()):
            return {}
        return {
            row: NOTHING_ALLOWED if row in self.edited and value == float("-inf") else NON_FINITE
            for row, value in enumerate(self.best.tolist())
            if not math.isfinite(value)
        }


class Sampler:
    """Samples one token per row. Holds per-slot state; one step at a time."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._params = SlotParams(max_num_seqs, vocab_size)
        self._penalties = PenaltyTable(vocab_size, device)

    def sample(
        self,
        rows: Sequence[Row],
        logits: torch.Tensor,
        masks: FilledMasks,
        last_token: torch.Tensor,
    ) -> Sampled:
        """One token for each row from its logits [rows, vocab] (not modified), among those its mask allows."""
        slots = self._params.update(rows)
        edits = _Edits(rows, self._params, slots, masks, self._vocab_size)
        if edits.any:
            logits = edits.apply(logits, rows, self._penalties, last_token)
        for row in rows:
            if not self._params.penalized[row.slot]:
                self._penalties.forget(row.slot)
        best, tokens = logits.max(dim=-1)
        random_rows = np.flatnonzero(self._params.temperature[slots] > 0)
        if random_rows.size:
            tokens = self._draw(rows, slots, random_rows, logits, tokens)
        return Sampled(torch.where(torch.isfinite(best), tokens, 0), best, edits.edited)

    def forget(self, slot: int) -> None:
        """What was counted for the slot's request is wrong: its next row counts anew."""
        self._penalties.forget(slot)

    def _draw(
        self, rows: Sequence[Row], slots: Int64Array, chosen: Int64Array, logits: torch.Tensor, greedy: torch.Tensor
    ) -> torch.Tensor:
        """The greedy tokens with those of the rows `chosen` replaced by draws."""
        params, owned = self._params, slots[chosen]
        index = self._to_device(chosen)
        scaled = logits if len(chosen) == len(rows) else logits[index]
        scaled = scaled.float() / self._to_device(params.temperature[owned])[:, None]
        top_k, top_p, min_p = params.top_k[owned], params.top_p[owned], params.min_p[owned]
        least = scaled.amax(dim=-1) + torch.log(self._to_device(min_p))
        truncated = np.flatnonzero((top_k > 0) | (top_p < 1))
        if truncated.size:
            where = self._to_device(truncated)
            part = scaled if len(truncated) == len(chosen) else scaled[where]
            limits = smallest_kept(part, top_k[truncated], self._to_device(top_p[truncated]))
            least = least.index_copy(0, where, torch.maximum(least[where], limits))
        positions = np.array([rows[place].start + rows[place].num_scheduled for place in chosen], dtype=np.int64)
        key = [self._to_device(column) for column in (params.seed_low[owned], params.seed_high[owned], positions)]
        return greedy.index_copy(0, index, draw(scaled, least, key[0], key[1], key[2]))

    def _to_device(self, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return upload(array, self._device)


def draw(
    logits: torch.Tensor,
    least: torch.Tensor,
    seed_low: torch.Tensor,
    seed_high: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """One draw per row from softmax(logits) over the tokens with logits >= least: int64 [rows].

    logits float32 [rows, vocab]; least float32, the rest int64, [rows]. Gumbel-max over blocks of tokens by their
    total probability, then over the tokens of the winning block: the same distribution as over all tokens at once for
    about sqrt(vocab) random numbers. Hashing a vocabulary of 150,000 would cost a millisecond per row.
    """
    rows, vocab = logits.shape
    logits = logits.masked_fill(logits < least[:, None], float("-inf"))
    num_blocks = -(-vocab // _BLOCK)
    padded = torch.nn.functional.pad(logits, (0, num_blocks * _BLOCK - vocab), value=float("-inf"))
    blocks = padded.view(rows, num_blocks, _BLOCK)
    block_ids = torch.arange(num_blocks, device=logits.device).expand(rows, -1) | BLOCK_FLAG
    totals = torch.logsumexp(blocks, dim=-1)
    winner = (totals + gumbel(seed_low, seed_high, positions, block_ids)).argmax(dim=-1)
    inside = blocks[torch.arange(rows, device=logits.device), winner]
    ids = winner[:, None] * _BLOCK + torch.arange(_BLOCK, device=logits.device)
    chosen = (inside + gumbel(seed_low, seed_high, positions, ids)).argmax(dim=-1)
    return (winner * _BLOCK + chosen).clamp_(max=vocab - 1)


class _Edits:
    """What changes a step's logits before anything is chosen: penalties, bias, masks."""

    def __init__(
        self,
        rows: Sequence[Row],
        params: SlotParams,
        slots: Int64Array,
        masks: FilledMasks,
        vocab_size: int,
    ) -> None:
        self._params = params
        self._masks = masks
        self._vocab_size = vocab_size
        self._penalized = np.flatnonzero(params.penalized[slots]).tolist()
        self._biased = [index for index, row in enumerate(rows) if row.spec.params.logit_bias]
        self._held_open = [
            index
            for index, row in enumerate(rows)
            if row.spec.stop_ids and row.start + row.num_scheduled - row.spec.prompt_len < row.spec.params.min_tokens
        ]
        self.edited = {*self._penalized, *self._biased, *self._held_open, *masks.places}
        self.any = bool(self.edited)

    def apply(
        self, logits: torch.Tensor, rows: Sequence[Row], table: PenaltyTable, last_token: torch.Tensor
    ) -> torch.Tensor:
        """A float32 copy of `logits` with every edit made."""
        logits = logits.to(torch.float32, copy=True)
        for index in self._penalized:
            self._penalize(logits[index], rows[index], table, last_token)
        if self._biased:
            self._bias(logits, rows)
        if self._masks.places:
            apply_masks(logits, self._masks)
        if self._held_open:
            self._hold_open(logits, rows)
        return logits

    def _bias(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        entries = [
            (index, token, value)
            for index in self._biased
            for token, value in rows[index].spec.params.logit_bias.items()
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

    def _hold_open(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Mask the stop ids, unless nothing else is left (a grammar that allows only the end wins)."""
        stops = [
            (place, token)
            for place, index in enumerate(self._held_open)
            for token in rows[index].spec.stop_ids
            if token < self._vocab_size
        ]
        if not stops:
            return
        index = upload(np.array(self._held_open, dtype=np.int64), logits.device)
        places = upload(np.array(stops, dtype=np.int64), logits.device)
        before = logits[index]
        kept = before.index_put((places[:, 0], places[:, 1]), before.new_tensor(float("-inf")))
        nothing = torch.isneginf(kept).all(dim=-1, keepdim=True)
        logits.index_copy_(0, index, torch.where(nothing, before, kept))

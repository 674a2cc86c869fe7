"""Sampling parameters of every slot as arrays, written once when a slot changes hands."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from asyncengine.execution.device.transfer import Int64Array
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Row


class SlotParams:
    """Per-slot columns, read by fancy-indexing with the slots of a step."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.version = 0
        """Changes with every slot that changes hands."""
        self._specs: list[ref[RequestSpec] | None] = [None] * max_num_seqs
        """Owners of the numbers that slots hold. Weak references: an unused slot keeps no prompt in memory."""
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        """0: all."""
        self.truncated = np.zeros(max_num_seqs, dtype=np.bool_)
        """Whether some logits may be left out of the draw."""
        self.seed_low = np.zeros(max_num_seqs, dtype=np.int64)
        self.seed_high = np.zeros(max_num_seqs, dtype=np.int64)
        self.repetition = np.ones(max_num_seqs, dtype=np.float32)
        self.presence = np.zeros(max_num_seqs, dtype=np.float32)
        self.frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self.penalized = np.zeros(max_num_seqs, dtype=np.bool_)
        self.processed = [False] * max_num_seqs
        """Whether the slot's logits may go through a processor before anything is chosen, grammars' masks aside."""
        self.scored = np.zeros(max_num_seqs, dtype=np.bool_)
        """Whether log-probabilities are asked for."""
        self.biased = np.zeros(max_num_seqs, dtype=np.bool_)
        self.prompt_len = np.zeros(max_num_seqs, dtype=np.int64)
        self.held_until = np.zeros(max_num_seqs, dtype=np.int64)
        """Position of the first token that may be a stop id, where some are masked before."""
        self.renewed: list[int] = []
        """Slots that changed hands at the last update."""
        self._few = [((1.0, 1.0, 0.0), (0, 0, 0))] * max_num_seqs
        """Columns of each slot, but for the position."""

    def update(self, rows: Sequence[Row]) -> list[int]:
        """Bring the slots of `rows` up to date; returns the slots."""
        if self.renewed:
            self.renewed = []
        for row in rows:
            known = self._specs[row.slot]
            if known is None or known() is not row.spec:
                self._write(row.slot, row.spec)
                self.renewed.append(row.slot)
        return [row.slot for row in rows]

    def few_columns(self, rows: Sequence[Row]) -> tuple[list[float], list[int]]:
        """Columns of `rows`, which are up to date, one behind the other, as Python numbers."""
        floats: list[float] = []
        whole: list[int] = []
        for row in rows:
            own, keys = self._few[row.slot]
            floats += own
            whole += keys
            whole.append(row.start + row.num_scheduled)
        return floats, whole

    def columns(self, slots: Int64Array, positions: Int64Array) -> tuple[NDArray[np.float32], Int64Array]:
        """Arguments of a compiled sampler: float32 [rows, 3] temperature, top-p, min-p; int64 [rows, 4] top-k, the
        halves of the seed, position."""
        floats = np.stack((self.temperature[slots], self.top_p[slots], self.min_p[slots]), axis=1)
        whole = (self.top_k[slots], self.seed_low[slots], self.seed_high[slots], positions)
        return floats, np.stack(whole, axis=1)

    def processed_at(self, slots: Int64Array, positions: Int64Array) -> NDArray[np.bool_]:
        """[rows] whether the logits of a row's next token, which is at `positions`, go through a processor, grammars'
        masks aside."""
        return self.penalized[slots] | self.biased[slots] | (positions < self.held_until[slots])

    def packed(self) -> NDArray[np.int32]:
        """Parameters as a sampler on a device takes them: int32 [slots, 8], bits of temperature, top-p and min-p, then
        top-k and the halves of the seed."""
        packed = np.zeros((len(self.temperature), 8), dtype=np.int32)
        packed.view(np.float32)[:, :3] = np.stack((self.temperature, self.top_p, self.min_p), axis=1)
        packed.view(np.uint32)[:, 3:6] = np.stack((self.top_k, self.seed_low, self.seed_high), axis=1)
        return packed

    def _write(self, slot: int, spec: RequestSpec) -> None:
        self.version += 1
        params = spec.params
        top_k = params.top_k or 0
        self.temperature[slot] = 1.0 if params.temperature is None else params.temperature
        self.top_p[slot] = 1.0 if params.top_p is None else params.top_p
        self.min_p[slot] = params.min_p or 0.0
        self.top_k[slot] = top_k if 0 < top_k < self._vocab_size else 0
        self.truncated[slot] = self.top_k[slot] > 0 or self.top_p[slot] < 1 or self.min_p[slot] > 0
        self.seed_low[slot] = spec.seed & 0xFFFFFFFF
        self.seed_high[slot] = (spec.seed >> 32) & 0xFFFFFFFF
        self.repetition[slot] = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.penalized[slot] = self.repetition[slot] != 1.0 or self.presence[slot] != 0.0 or self.frequency[slot] != 0.0
        held_open = bool(spec.stop_ids) and params.min_tokens > 0
        self.biased[slot], self.prompt_len[slot] = bool(params.logit_bias), spec.prompt_len
        self.held_until[slot] = spec.prompt_len + params.min_tokens if held_open else 0
        self.processed[slot] = bool(self.penalized[slot] or params.logit_bias or held_open)
        self.scored[slot] = bool(params.logprobs)
        floats, whole = self.columns(np.array([slot]), np.zeros(1, dtype=np.int64))
        self._few[slot] = tuple(floats[0].tolist()), tuple(whole[0, :3].tolist())
        self._specs[slot] = ref(spec)

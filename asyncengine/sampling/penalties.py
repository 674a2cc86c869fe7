"""Tokens that each penalized request has seen, kept on the device between steps.

Memory is taken only for slots whose request asks for a penalty: two vocabulary-wide rows each. The state of a slot
counts a prefix of the request's tokens; it is extended by the tokens that are new, and rebuilt when the slot has a new
owner or the request has fewer tokens than were counted (it was preempted with a token in flight). Where a kernel reads
the counts it adds the one token that a decode step's row begins with, and nothing is done here for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch

from asyncengine.device.pinned import Int64Array
from asyncengine.device.transfer import upload
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Row


@dataclass(slots=True)
class _SlotState:
    spec: ref[RequestSpec]
    prompt_seen: torch.Tensor
    """bool [vocab]."""
    output_counts: torch.Tensor
    """int32 [vocab]."""


class PenaltyTable:
    """Token counts per slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self.states: dict[int, _SlotState] = {}
        """Counts by slot."""
        self._counted = np.full(max_num_seqs, -1, dtype=np.int64)
        """Tokens of each slot's request that are in its tables, the one in flight included; -1: there are none."""
        self._addresses = np.zeros((2, max_num_seqs), dtype=np.int64)
        """Addresses of each slot's `prompt_seen` and `output_counts`."""

    def forget(self, slot: int) -> None:
        """The slot's request asks for no penalty. Idempotent."""
        self.states.pop(slot, None)
        self._counted[slot] = -1

    def counting(self, slots: Int64Array, positions: Int64Array, prompts: Int64Array) -> tuple[Int64Array, Int64Array]:
        """(int64 [2, rows] addresses of prompt_seen and output_counts, int64 [rows] 1 or 0) for a kernel and rows of
        one token each, which precedes `positions` and is part of the output: 1, and the kernel is to count the token;
        0, and the row's tokens are to be counted by `seen` first.

        The slots' owners are those that were last counted for; `forget` is told of others. `prompts`: their lengths.
        """
        ready = (self._counted[slots] == positions - 1) & (positions > prompts)
        self._counted[slots[ready]] += 1
        return self._addresses[:, slots], ready.astype(np.int64)

    def seen(self, row: Row, last_token: torch.Tensor, place: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(prompt_seen, output_counts) of `row` over all its positions below start + count.

        `last_token` holds the token in flight, if the row has one, at `place`; None: at its slot. Its drafts count in
        what is returned and nowhere else: nobody knows yet whether they stand.
        """
        total = row.start + row.num_scheduled - len(row.drafts)
        state = self.states.get(row.slot)
        if state is None or state.spec() is not row.spec or self._counted[row.slot] > total:
            state = _SlotState(
                ref(row.spec),
                torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device),
                torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device),
            )
            self.states[row.slot] = state
            self._counted[row.slot] = 0
            self._addresses[:, row.slot] = state.prompt_seen.data_ptr(), state.output_counts.data_ptr()
        if self._counted[row.slot] < total:
            self._extend(state, row, total, last_token[row.slot if place is None else place :][:1])
        if not row.drafts:
            return state.prompt_seen, state.output_counts
        guessed = self._ids(row.drafts)
        return state.prompt_seen, state.output_counts.index_add(0, guessed, self._one.expand(len(guessed)))

    def _extend(self, state: _SlotState, row: Row, total: int, in_flight: torch.Tensor) -> None:
        """Each part is marked as counted once it is: a step that runs out of memory between two is launched again."""
        known = total - row.in_flight
        prompt_len = row.spec.prompt_len
        counted = int(self._counted[row.slot])
        prompt = row.tokens[counted : min(known, prompt_len)]
        if prompt:
            seen = [token for token in prompt if token >= 0] if row.spec.images else prompt
            state.prompt_seen.index_fill_(0, self._ids(seen), True)
            self._counted[row.slot] = counted = counted + len(prompt)
        output = row.tokens[max(counted, prompt_len) : known]
        if output:
            self._count(state, self._ids(output))
            self._counted[row.slot] = counted = counted + len(output)
        if row.in_flight and counted <= known:
            self._count(state, in_flight)
        self._counted[row.slot] = total

    def _count(self, state: _SlotState, tokens: torch.Tensor) -> None:
        state.output_counts.index_add_(0, tokens, self._one.expand(len(tokens)))

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return upload(np.array(tokens, dtype=np.int64), self._device)

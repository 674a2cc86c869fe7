"""Which tokens each penalized request has seen, kept on the device between steps.

Memory is taken only for slots whose request asks for a penalty: two vocabulary-wide rows each. The state of a slot
counts a prefix of the request's tokens; it is extended by the tokens that are new, and rebuilt when the slot has a new
owner or the request has fewer tokens than were counted (it was preempted with a token in flight).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import numpy as np
import torch

from asyncengine.device.transfer import upload
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Row


@dataclass(slots=True)
class _SlotState:
    spec: ref[RequestSpec]
    counted: int
    """Tokens of the request already in the tables, the one in flight included."""
    prompt_seen: torch.Tensor
    """bool [vocab]."""
    output_counts: torch.Tensor
    """int32 [vocab]."""


class PenaltyTable:
    """Token counts per slot."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._states: dict[int, _SlotState] = {}

    @property
    def empty(self) -> bool:
        """True: nobody has asked for a penalty."""
        return not self._states

    def forget(self, slot: int) -> None:
        """The slot's request asks for no penalty. Idempotent."""
        self._states.pop(slot, None)

    def seen(self, row: Row, last_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(prompt_seen, output_counts) of `row` over all its positions below start + count.

        `last_token` [max_num_seqs] holds the token in flight, if the row has one. Its drafts count in what is returned
        and nowhere else: nobody knows yet whether they stand.
        """
        total = row.start + row.num_scheduled - len(row.drafts)
        state = self._states.get(row.slot)
        if state is None or state.spec() is not row.spec or state.counted > total:
            state = _SlotState(
                ref(row.spec),
                0,
                torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device),
                torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device),
            )
            self._states[row.slot] = state
        if state.counted < total:
            self._extend(state, row, total, last_token)
        if not row.drafts:
            return state.prompt_seen, state.output_counts
        guessed = self._ids(row.drafts)
        return state.prompt_seen, state.output_counts.index_add(0, guessed, self._one.expand(len(guessed)))

    def _extend(self, state: _SlotState, row: Row, total: int, last_token: torch.Tensor) -> None:
        """Each part is marked as counted once it is: a step that runs out of memory between two is launched again."""
        known = total - row.in_flight
        prompt_len = row.spec.prompt_len
        prompt = row.tokens[state.counted : min(known, prompt_len)]
        if prompt:
            seen = [token for token in prompt if token >= 0] if row.spec.images else prompt
            state.prompt_seen.index_fill_(0, self._ids(seen), True)
            state.counted += len(prompt)
        output = row.tokens[max(state.counted, prompt_len) : known]
        if output:
            self._count(state, self._ids(output))
            state.counted += len(output)
        if row.in_flight and state.counted <= known:
            self._count(state, last_token[row.slot : row.slot + 1])
        state.counted = total

    def _count(self, state: _SlotState, tokens: torch.Tensor) -> None:
        state.output_counts.index_add_(0, tokens, self._one.expand(len(tokens)))

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        return upload(np.array(tokens, dtype=np.int64), self._device)

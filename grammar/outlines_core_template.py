"""A compiled pattern as tables over tokens, and the states and closings that walk them. Only lookups.

The tables are exact: a token is listed only where the text so far plus its bytes can still become a match.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from asyncengine.grammar.backend import Mask
from asyncengine.grammar.outlines_core_worker import LENGTH, SIZES

MASK_CACHE_BYTES = 8 << 20
"""Packed masks kept per template: making one takes up to a quarter of a millisecond, copying it a microsecond."""
MAX_FORCED = 64


class OutlinesCoreTemplate:
    """An automaton over tokens. Immutable but for the masks it keeps; any number of threads may share it.

    `cost[s]` tokens lead from state s to the nearest end, the first of them `first[s]` (-1 at an end). The tokens
    allowed in s are `tokens[starts[s]:starts[s + 1]]`, ascending, and lead to `targets` at the same places. Behind the
    states is one more, `ended`: an end of sequence was consumed.
    """

    def __init__(self, data: bytes, eos_ids: Sequence[int], vocab_size: int) -> None:
        """`data`: a TABLES answer of the worker, with the arrays cost, first, starts, tokens, targets."""
        states, edges = SIZES.unpack_from(data, LENGTH.size)
        sizes = np.cumsum([states, states, states + 1, edges])
        body = np.frombuffer(data, np.int32, offset=LENGTH.size + SIZES.size)
        cost, first, starts, tokens, targets = np.split(body, sizes)
        assert len(targets) == edges
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = vocab_size
        self.ended = int(states)
        # memoryviews: an element costs a third of what one of an array does
        self.cost = np.append(cost, np.int32(0)).data
        self.first = np.append(first, np.int32(-1)).data
        self.starts = np.append(starts, starts[-1]).data
        self.targets = targets.data
        self._tokens = tokens
        self.tokens = tokens.data
        self._masks: dict[int, Mask] = {}
        self._room = MASK_CACHE_BYTES // max(1, self._mask_bytes)

    @property
    def _mask_bytes(self) -> int:
        return 4 * -(-self.vocab_size // 32)

    @property
    def nbytes(self) -> int:
        masks = min(self._room, self.ended + 1) * self._mask_bytes
        return 8 * len(self.tokens) + 12 * (self.ended + 1) + masks

    @property
    def min_tokens(self) -> int:
        return self.cost[0]

    @property
    def refined(self) -> bool:
        return True  # exact from the beginning

    def refine(self) -> None:
        """Nothing to find."""

    def new_state(self) -> OutlinesCoreState:
        return OutlinesCoreState(self)

    def new_closing(self) -> OutlinesCoreClosing:
        return OutlinesCoreClosing(self)

    def step(self, state: int, token: int) -> int | None:
        """The state `token` leads to, None if it is not allowed. Ends of sequence lead to `ended`, also from there."""
        if token in self.eos_ids:
            return self.ended if self.cost[state] == 0 else None
        begin, end = self.starts[state], self.starts[state + 1]
        place = bisect_left(self.tokens, token, begin, end)
        return self.targets[place] if place < end and self.tokens[place] == token else None

    def mask(self, state: int) -> Mask:
        """Not to be written to."""
        mask = self._masks.get(state)
        if mask is None:
            allowed = np.zeros(8 * self._mask_bytes, bool)
            allowed[self._tokens[self.starts[state] : self.starts[state + 1]]] = True
            if self.cost[state] == 0:
                allowed[list(self.eos_ids)] = True
            mask = np.packbits(allowed, bitorder="little").view("<i4")
            if len(self._masks) < self._room:
                self._masks[state] = mask
        return mask


class OutlinesCoreState:
    """A `State`: the states gone through, the last one current."""

    joint_fill = None

    def __init__(self, template: OutlinesCoreTemplate) -> None:
        self._template = template
        self._trail = [0]

    def fill(self, mask: Mask) -> None:
        mask[:] = self._template.mask(self._trail[-1])

    def consume(self, token: int) -> bool:
        state = self._template.step(self._trail[-1], token)
        if state is None:
            return False
        self._trail.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        consumed = len(self._trail) - 1
        if not 0 <= num_tokens <= consumed:
            raise ValueError(f"cannot roll back {num_tokens} tokens, only {consumed} were consumed")
        del self._trail[consumed + 1 - num_tokens :]

    def forced(self) -> list[int]:
        template = self._template
        state = self._trail[-1]
        chain: list[int] = []
        while len(chain) < MAX_FORCED and template.cost[state] > 0:
            begin = template.starts[state]
            if template.starts[state + 1] - begin != 1:
                break
            chain.append(template.tokens[begin])
            state = template.targets[begin]
        return chain

    def is_accepting(self) -> bool:
        return self._template.cost[self._trail[-1]] == 0

    def is_terminated(self) -> bool:
        state = self._trail[-1]
        starts = self._template.starts
        return self._template.cost[state] == 0 and starts[state] == starts[state + 1]


class OutlinesCoreClosing:
    """A `Closing` whose costs are the true minimum."""

    def __init__(self, template: OutlinesCoreTemplate) -> None:
        self._template = template
        self._state = 0

    @property
    def cost(self) -> int:
        return self._template.cost[self._state]

    def first(self) -> int:
        return self._template.first[self._state]

    def advance(self, token: int, at_most: int) -> bool:
        state = self._template.step(self._state, token)
        if state is None or self._template.cost[state] > at_most:
            return False
        self._state = state
        return True

"""Vectors of the fake runner: pure functions of a text's tokens, as its pages or its steps really had them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncengine.request_spec import Pooled
from asyncengine.step import Row


def fake_vector(tokens: Sequence[int], pooled: Pooled, width: int = 1) -> NDArray[np.float32]:
    """The one right vector of a text: whole numbers that float32 holds, which depend on all that `pooled` says."""
    state = len(tokens) * 31 + pooled.skip * 7 + pooled.second
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return np.array([(state >> (7 * place)) % 2**20 for place in range(width)], dtype=np.float32)


class FakePooling:
    """Pools rows. Checks what a model would not: that a whole text comes at once and has no pages, and that of one
    whose every position counts none was taken from the cache. A violation raises."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._seen: dict[int, list[int]] = {}
        """Slot -> tokens computed so far, of texts whose every position counts."""

    def pool(self, row: Row, context: Callable[[Row], list[int]]) -> NDArray[np.float32] | None:
        """None: more of the text is to come. `context`: the tokens that a row's pages hold."""
        pooled = row.spec.pooled
        assert pooled is not None
        if pooled.whole:
            if row.start or row.num_scheduled != row.spec.prompt_len or row.pages:
                raise AssertionError(
                    f"row {row.spec.ticket}: a text that is computed whole came in parts or with pages"
                )
            return fake_vector(row.tokens, pooled, self.width)
        tokens = context(row)
        if pooled.every:
            if row.start == 0:
                self._seen[row.slot] = []
            seen = self._seen.setdefault(row.slot, [])
            if len(seen) != row.start:
                raise AssertionError(f"row {row.spec.ticket}: position {len(seen)} was not computed, and counts")
            seen += tokens[row.start :]
            tokens = seen
        return fake_vector(tokens, pooled, self.width) if row.samples else None

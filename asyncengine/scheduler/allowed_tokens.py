"""A matcher of requests that may only write some tokens (`SamplingParams.allowed_token_ids`, as in vLLM)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class AllowedTokens:
    """The same tokens are allowed at every position. Nothing is compiled, so its request waits for no one."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = frozenset(token_ids)
        self._mask: NDArray[np.int32] | None = None
        """The mask, once it has been filled."""
        self.steered_from: int | None = None

    def fill_mask(self, mask: NDArray[np.int32]) -> None:
        if self._mask is None:
            filled = mask.copy()
            words = filled.view("uint32")
            words[:] = 0
            for token in self.token_ids:
                words[token >> 5] |= 1 << (token & 31)
            self._mask = filled
        mask[:] = self._mask

    def fill_along(self, masks: NDArray[np.int32], drafts: Sequence[int]) -> int:
        for mask in masks:
            self.fill_mask(mask)
        refused = (index for index, token in enumerate(drafts) if token not in self.token_ids)
        return 1 + next(refused, len(drafts))

    def accept(self, token_id: int, jump: bool = True, others: Callable[[], Sequence[int]] | None = None) -> list[int]:
        return [token_id]

    def may_refuse(self, ahead: int) -> bool:
        return False

    def is_terminated(self) -> bool:
        return False

    def fresh(self) -> Self:
        return self

    def overrun(self) -> str | None:
        return None

"""The retire rule: a page or slot that a launched step may name is handed out again only when that step has retired.

With one step in flight everything returns at once; overlap scheduling needs no other code (mini-sglang #89 and
vLLM-Ascend #16315 are what happens without the rule).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Retiring(Generic[Item]):
    """Queue of items given up that launched steps may still name, in order of the last such step: their *fence*."""

    def __init__(self, give_back: Callable[[Item], None]) -> None:
        """`give_back` is called with each item as soon as its fence has retired."""
        self._give_back = give_back
        self._queue: list[tuple[int, Item]] = []
        self.retired = 0
        """Number of the last step that has retired."""

    def add(self, item: Item, fence: int) -> None:
        """Give `item` up; it returns at once if step `fence` has retired."""
        if fence <= self.retired:
            self._give_back(item)
        else:
            insort(self._queue, (fence, item), key=itemgetter(0))

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads or writes what only they named."""
        self.retired = step
        while self._queue and self._queue[0][0] <= step:
            self._give_back(self._queue.pop(0)[1])

    def __iter__(self) -> Iterator[Item]:
        return (item for _, item in self._queue)

    def __len__(self) -> int:
        return len(self._queue)

"""The retire rule: what a launched step may name is handed out again only when that step has retired.

With one step in flight everything returns at once; overlap scheduling needs no other code (mini-sglang #89 and
vLLM-Ascend #16315 are what happens without the rule).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Retiring(Generic[Thing]):
    """Queue of things given up that launched steps may still name, in order of the last such step: their *fence*."""

    def __init__(self, give_back: Callable[[Thing], None]) -> None:
        """`give_back` is called with each thing as soon as its fence has retired."""
        self._give_back = give_back
        self._queue: list[tuple[int, Thing]] = []
        self.retired = 0
        """Number of the last step that has retired."""

    def add(self, thing: Thing, fence: int) -> None:
        """Give `thing` up; it returns at once if step `fence` has retired."""
        if fence <= self.retired:
            self._give_back(thing)
        else:
            insort(self._queue, (fence, thing), key=itemgetter(0))

    def retire(self, step: int) -> None:
        """Steps up to `step` have finished: nothing reads or writes what only they named."""
        self.retired = step
        while self._queue and self._queue[0][0] <= step:
            self._give_back(self._queue.pop(0)[1])

    def __iter__(self) -> Iterator[Thing]:
        return (thing for _, thing in self._queue)

    def __len__(self) -> int:
        return len(self._queue)

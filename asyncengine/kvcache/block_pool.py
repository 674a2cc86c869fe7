"""The free list of KV pages: plain page ids, no tensors.

Page 0 is padding: steps of fixed size write their unused rows there, so it is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncengine.errors import InvariantViolation


class BlockPool:
    """Pages 1 .. num_pages-1, each either free or taken.

    Taking and giving are O(1) per page. A page given back twice, or never taken, raises `InvariantViolation` at once:
    the two bugs that otherwise surface as wrong tokens of another request.
    """

    def __init__(self, num_pages: int, noun: str = "page") -> None:
        """`noun` names the pages in errors: slots of recurrent states are handed out alike."""
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 {noun}s (number 0 is never handed out), got {num_pages}")
        self.noun = noun
        self.capacity = num_pages - 1
        """Pages that can be handed out."""
        self._free = list(range(num_pages - 1, 0, -1))  # a stack: low ids first, recently used (cache-warm) pages next
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages. The caller has checked `num_free`."""
        if count > len(self._free):
            raise InvariantViolation(f"asked for {count} {self.noun}s, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._taken[page] = 1
        return pages

    def give(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._taken[page]:
                raise InvariantViolation(f"{self.noun} {page} given back while free")
            self._taken[page] = 0
            self._free.append(page)

    def check(self, owned: Iterable[tuple[str, Iterable[int]]]) -> None:
        """Prove conservation: each page is free, or `owned` names its one owner.

        Raises `InvariantViolation` naming the first page that has two owners, or none.
        """
        owner: dict[int, str] = {}
        for who, pages in [("free", self._free), *owned]:
            for page in pages:
                if page in owner:
                    raise InvariantViolation(f"{self.noun} {page} is {owner[page]} and {who}")
                owner[page] = who
        for page in range(1, self.capacity + 1):
            if page not in owner:
                raise InvariantViolation(f"{self.noun} {page} leaked: it is not free, and has no owner")

"""Bookkeeping of encoded pictures for the scheduler: which are in memory, and which is encoded next.

The hidden states themselves are the runner's (`runner/step_inputs.py`), which does what a batch says: encode this, drop
those. A step encodes at most one picture, so that streams go on, and a prompt is computed up to the first picture that
is not encoded yet. Positions in the prefix cache need no picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncengine.images import PromptImage
from asyncengine.scheduler.request import Request
from asyncengine.step import Encode


class EncodedImages:
    """Encoded pictures in order of their last use, within a budget of bytes."""

    def __init__(self, budget: int, running: Mapping[int, Request]) -> None:
        """`budget`: bytes. `running`: the live dictionary of running requests."""
        self._budget = budget
        self._running = running
        self.sizes: dict[bytes, int] = {}
        """Digest -> bytes, least recently used first."""
        self.used: dict[bytes, None] = {}
        """Digests that the step needs which is being planned."""
        self._next: Encode | None = None
        self._forgotten: dict[bytes, None] = {}
        """Digests that the runner may still have, and that are to be dropped."""
        self.encoded = self.reused = 0
        """Pictures that were encoded, and uses of one that was in memory already."""

    def fit(self, request: Request, count: int) -> int:
        """Number of the next `count` positions of `request` that may be computed in this step.

        None is cut within tokens that attend to each other both ways: if such a picture is next, all of it, even where
        that is more than `count`.
        """
        start, end = request.num_launched, request.num_launched + count
        for span in request.spec.images if count else ():
            if span.end <= start:
                continue
            if span.whole and span.first < end < span.end:
                end = span.first if span.first > start else span.end
            if span.first >= end:
                break
            if not self._have(span.image):
                end = max(span.first, start)
                break
        return end - start

    def _have(self, image: PromptImage) -> bool:
        """Whether the picture is encoded when the planned step runs: already, or by that step, which is noted then."""
        digest = image.digest
        if digest in self.sizes:
            self.sizes[digest] = self.sizes.pop(digest)
            self.reused += digest not in self.used
        elif self._next is not None or (dropped := self._make_room(image.nbytes)) is None:
            return False
        else:
            self._forgotten.pop(digest, None)
            self._next = Encode(image, (*dropped, *self._forgotten))
            self._forgotten.clear()
            self.sizes[digest] = image.nbytes
            self.encoded += 1
        self.used[digest] = None
        return True

    def _make_room(self, nbytes: int) -> list[bytes] | None:
        """Drop pictures for one of `nbytes`. Returns their digests, least recently used first; None: those in use leave
        no room. A picture that is larger than the budget is kept alone."""
        kept = dict.fromkeys((*self.used, *self.cut()))
        free = self._budget - nbytes - sum(self.sizes.values())
        dropped = []
        for digest, size in self.sizes.items():
            if free >= 0:
                break
            if digest not in kept:
                dropped.append(digest)
                free += size
        if free < 0 and kept:
            return None
        for digest in dropped:
            del self.sizes[digest]
        return dropped

    def cut(self) -> Iterable[bytes]:
        """Pictures of which a running request has computed a part: it goes on with them in its next step."""
        for request in self._running.values():
            for span in request.spec.images:
                if span.first < request.num_launched < span.end:
                    yield span.image.digest

    def take(self) -> Encode | None:
        """The picture that the step encodes which is launched now."""
        self.used.clear()
        taken, self._next = self._next, None
        return taken

    def forget(self, request: Request) -> None:
        """`request` has failed, perhaps for want of a picture that could not be encoded: its pictures are encoded again
        for the next request that has them."""
        for span in request.spec.images:
            if self.sizes.pop(span.image.digest, None) is not None:
                self._forgotten[span.image.digest] = None

    @property
    def nbytes(self) -> int:
        """Bytes of all that are in memory."""
        return sum(list(self.sizes.values()))  # a copy: statistics are read on other threads

"""Masks that outputs at the same position of a grammar share, as long as memory for them lasts.

What may come next depends on the position alone (`closing.Closing.position`), not on how an output got there. So
of many requests under one grammar few need a mask of their own: in a string of a vocabulary of 150,000 a mask takes a
tenth of a millisecond, a copy of it a fiftieth of that. Where text is forced, the library allows one token, as the
tokenizer itself would cut the text: that depends on the token before, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncengine.grammar.closing.recognizer import Position

Mask = NDArray[np.int32]
"""Packed bitmask of allowed tokens, shape [ceil(vocab / 32)], lowest bit first."""
JointFill = Callable[[Mask, Mapping[int, Any]], set[int]]
"""(masks [masks, words], mask -> state) -> those that were filled. `fill` of a state says what is wrong with others."""


Key = tuple[Position, int | None]
"""A position, and where text is forced, the token before."""
KEY_BYTES, READING_BYTES = 300, 40
"""Memory of a key beside its mask, and of each reading in it."""


class SharedMasks:
    """The masks of one vocabulary by position, those used last kept longest. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes` of masks and keys at most."""
        self._room = nbytes
        self._known: OrderedDict[Key, Mask | None] = OrderedDict()
        """None: text is forced there."""
        self._lock = threading.Lock()

    def find(self, position: Position, before: int) -> tuple[Key, Mask | None]:
        """(what to keep the mask under, the mask; None: not known so far). `before`: the token before."""
        key: Key = (position, None)
        with self._lock:
            mask = self._known.get(key)
            if mask is None and key in self._known:
                self._known.move_to_end(key)
                mask = self._known.get(key := (position, before))
            if mask is not None:
                self._known.move_to_end(key)
        return key, mask

    def keep(self, key: Key, mask: Mask) -> bool:
        """Remember `mask`. False: it is of forced text, and the position was not known to be so."""
        words = mask[mask != 0].view(np.uint32)
        forced = key[1] is None and len(words) == 1 and int(words[0]).bit_count() == 1
        with self._lock:
            if key in self._known:
                self._room += _size(key, self._known[key])
            self._known[key] = kept = None if forced else mask.copy()
            self._room -= _size(key, kept)
            while self._room < 0:
                self._room += _size(*self._known.popitem(last=False))
        return not forced


def _size(key: Key, mask: Mask | None) -> int:
    return KEY_BYTES + READING_BYTES * len(key[0]) + (0 if mask is None else mask.nbytes)

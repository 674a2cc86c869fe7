"""A cache of masks by the position of an output in its grammar, bounded in bytes.

The allowed tokens depend on the position alone (`closing.Closing.position`), not on how an output got there. So of many
requests with one grammar few compute a mask: inside a string, with a vocabulary of 150,000, that takes a tenth of a
millisecond, a copy a fiftieth of it. Where text is forced the library allows one token, by which the tokenizer would
continue it: that depends on the token before, too.
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
"""(masks [rows, words], row -> state) -> rows that were filled. `fill` of the state of another row raises its error."""
Key = tuple[Position, int | None]
"""A position, and where text is forced the token before."""
KEY_BYTES, READING_BYTES = 300, 40
"""Memory of a key, and of each reading in it."""


class SharedMasks:
    """Least-recently-used cache of one vocabulary's masks by position. Thread-safe."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: most memory of masks and keys."""
        self._room = nbytes
        self._known: OrderedDict[Key, Mask | None] = OrderedDict()
        """None marks a position where text is forced: its masks have keys with the token before."""
        self._lock = threading.Lock()

    def find(self, position: Position, before: int) -> tuple[Key, Mask | None]:
        """(key to `keep` the mask under, the mask or None if it is not cached). `before`: the token before."""
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
        """Add `mask`. False if it shows that text is forced at a position that was not marked so: then it holds for
        outputs with the same token before only, and was not kept."""
        nonzero = mask[mask != 0].view(np.uint32)
        forced = key[1] is None and len(nonzero) == 1 and int(nonzero[0]).bit_count() == 1
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

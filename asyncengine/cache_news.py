"""News of the pages that a prefix cache has: their hashes, and the changes of these.

The hash of a page covers its tokens and, through its parent's hash, all tokens before it and the namespace: equal
hashes mean equal prefixes, so a flat set of them says as much as the tree. They are no more than hints
for routing: a collision sends a request to a cache that does not help it, for the cache itself compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


def root_hash(namespace: tuple[Hashable, ...]) -> int:
    """Hash of a namespace, the same in every process (Python's own hash of a str is not)."""
    return int.from_bytes(hashlib.blake2b(repr(namespace).encode(), digest_size=8).digest()) >> 1


def page_hash(parent: int, tokens: tuple[int, ...]) -> int:
    """Hash of a page of `tokens` behind the page (or namespace) of hash `parent`, the same in every process."""
    return hash((parent, tokens))


def page_hashes(namespace: tuple[Hashable, ...], tokens: Sequence[int], page_size: int) -> list[int]:
    """Hashes of all full pages of `tokens`, in order."""
    parent, hashes = root_hash(namespace), []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = page_hash(parent, tuple(tokens[start : start + page_size]))
        hashes.append(parent)
    return hashes


@dataclass(frozen=True, slots=True)
class CacheNews:
    """Changes since the last news."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()
    whole: bool = False
    """True: too much happened to tell it; `added` is all there is now."""

    def __bool__(self) -> bool:
        return self.whole or bool(self.added or self.removed)


class PrefixCacheReset(NamedTuple):
    """Pages that a reset of a prefix cache dropped, and pages that stayed: requests use them, or a `pin` holds them."""

    dropped: int
    in_use: int

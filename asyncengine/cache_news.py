"""News of the pages that a prefix cache has, for fleets and for any router: their hashes, and the changes of these.

The hash of a page covers its tokens and, through its parent's hash, all tokens before it and the namespace: equal
hashes mean equal prefixes, so a flat set of them says as much as the tree. They are no more than hints
for routing: a collision sends a request to a cache that does not help it, for the cache itself compares tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Full pages, each behind the one before, from which requests can start now. This and what follows have the names
    and fields of vLLM's `distributed.kv_events`, so that its clients read `ts` and `asdict` of each event."""

    block_hashes: tuple[int, ...]
    """Hash of each, of 64 bits: of its tokens, all tokens before, the adapter and the cache salt."""
    parent_block_hash: int | None
    """The block before the first; None: the first begins a prompt."""
    token_ids: tuple[int, ...]
    """Tokens of all of them. Negative ones stand for pictures and for activated adapters."""
    block_size: int
    medium: str
    """"GPU" or "CPU"."""
    lora_name: str | None = None
    """Name of the adapter; its digest where it has been unloaded."""
    extra_keys: tuple[tuple[str] | None, ...] | None = None
    """For each block what its hash covers besides: the first of a prompt has the cache salt, if there is one."""
    lora_id: None = None
    type: str = field(default="BlockStored", init=False)


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that have left the cache."""

    block_hashes: tuple[int, ...]
    medium: str
    type: str = field(default="BlockRemoved", init=False)


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was emptied; the blocks that it holds again are stored by later events of the same batch."""

    type: str = field(default="AllBlocksCleared", init=False)


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """Changes of a prefix cache since the batch before."""

    ts: float
    """Seconds since the epoch."""
    events: tuple[CacheEvent, ...]
    seq: int
    """Number of the batch in its stream, from 0."""
    lost: int = 0
    """Batches before this one that were dropped, as they were not read in time; `events` tells all there is anew."""
    data_parallel_rank: int | None = None

"""Which cached page goes first. One small object per rule; the tree keeps leaves before parents whatever the rule."""

from __future__ import annotations

from asyncengine.errors import InvalidParameter
from asyncengine.kvcache.radix_tree import EvictionStrategy, Node


class LRU:
    """Least recently used first."""

    name = "lru"

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.last_used,)


class LFU:
    """Least often matched first, then least recently used."""

    name = "lfu"

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.hits, node.last_used)


class FIFO:
    """Oldest first, used or not."""

    name = "fifo"

    def key(self, node: Node) -> tuple[int, ...]:
        return (node.created,)


class ByPriority:
    """Pages of the least important request first (a request's larger `priority` number is less important), then LRU."""

    name = "priority"

    def key(self, node: Node) -> tuple[int, ...]:
        return (-node.priority, node.last_used)


_ALL: tuple[type[EvictionStrategy], ...] = (LRU, LFU, FIFO, ByPriority)
STRATEGIES = {rule.name: rule for rule in _ALL}
"""Strategies by name, the setting's choices."""


def eviction_strategy(name: str) -> EvictionStrategy:
    if name not in STRATEGIES:
        raise InvalidParameter("eviction", "must be one of " + ", ".join(STRATEGIES), name)
    return STRATEGIES[name]()

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


_STRATEGIES: tuple[type[LRU | LFU | FIFO | ByPriority], ...] = (LRU, LFU, FIFO, ByPriority)


def eviction_strategy(name: str) -> EvictionStrategy:
    for strategy in _STRATEGIES:
        if strategy.name == name:
            return strategy()
    raise InvalidParameter("eviction", "must be one of " + ", ".join(s.name for s in _STRATEGIES), name)

"""The order in which cached pages go: one key by rule; the tree keeps leaves before parents whatever the rule."""

from __future__ import annotations

from asyncengine.kvcache.radix_tree import EvictionKey

STRATEGIES: dict[str, EvictionKey] = {
    "lru": lambda node, last_used: (last_used,),
    "lfu": lambda node, last_used: (node.hits, last_used),  # least often matched
    "fifo": lambda node, last_used: (node.created,),  # oldest, used or not
    "priority": lambda node, last_used: (-node.priority, last_used),  # a larger number is a less important request
}
"""Keys by name. `MemorySettings.eviction` has the same names, so that settings need no cache."""

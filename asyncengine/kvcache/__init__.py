"""Pages, states, the radix prefix cache, and who owns what. Pure: no await, no torch."""

from asyncengine.kvcache.kv_cache import KVCache
from asyncengine.kvcache.page_group import PageCounts
from asyncengine.kvcache.page_table import PageTable
from asyncengine.kvcache.states import StateCounts

__all__ = ["KVCache", "PageCounts", "PageTable", "StateCounts"]

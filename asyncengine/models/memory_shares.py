"""Sharing one budget of memory among several models: weights and steps come first, caches get what is left.

Max-min fair (progressive filling, as links of a network are shared): all caches grow alike until one has what it can
use, and the others share what it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncengine.attention.factory import MODEST_TOKENS
from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.models.needs import ModelNeeds


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """What one model of several wants, in bytes. Caches as (least, most): below the first no modest request could run,
    more than the second could not be used; (0, 0) where there is none, or where its size was told."""

    name: str
    fixed: int
    """Weights, what a step takes beside them, and caches of a size that was told."""
    kv: tuple[int, int] = (0, 0)
    """Keys and values."""
    states: tuple[int, int] = (0, 0)
    """Recurrent states."""

    @property
    def least(self) -> int:
        return self.kv[0] + self.states[0]

    @property
    def most(self) -> int:
        return self.kv[1] + self.states[1]

    def settings(self, share: int) -> dict[str, int]:
        """The fields of its configuration that give its caches `share` bytes together: each its least, and of the rest
        as much as it could use of it."""
        room = self.most - self.least
        states = self.states[0]
        if room:
            states += (share - self.least) * (self.states[1] - self.states[0]) // room
        sizes = {"kv_cache_memory": share - states, "state_memory": states}
        return {name: size for name, size in sizes.items() if size}


def claim_of(name: str, needs: ModelNeeds, config: EngineConfig) -> MemoryClaim:
    """At least a modest request, at most `max_num_seqs` of full length; what it was told to take, if it was."""
    fixed = needs.weight_bytes + needs.step_bytes
    kv = states = (0, 0)
    if isinstance(config.kv_cache_memory, int):
        fixed += config.kv_cache_memory
    else:
        page = config.page_size * needs.kv_bytes_per_token
        per_request = -(-needs.max_model_len // config.page_size)
        least = -(-min(MODEST_TOKENS, needs.max_model_len) // config.page_size) + 1
        kv = (least * page, (config.max_num_seqs * per_request + 1) * page)
    if isinstance(config.state_memory, int):
        fixed += config.state_memory
    else:
        states = (2 * needs.state_bytes, (2 * config.max_num_seqs + 1) * needs.state_bytes)
    return MemoryClaim(name, fixed, kv, states)


def share_memory(budget: int, claims: Sequence[MemoryClaim]) -> list[int]:
    """Bytes of cache for each claim, in order: between its `least` and its `most`, together with everything that is
    fixed at most `budget`.

    Raises `InvalidParameter` naming `memory` and what would be enough, if not even the least fits.
    """
    needed = sum(claim.fixed + claim.least for claim in claims)
    if needed > budget:
        parts = ", ".join(f"{claim.name} {_mib(claim.fixed + claim.least)}" for claim in claims)
        raise InvalidParameter("memory", f"must be at least {_mib(needed)} for these models ({parts})", _mib(budget))
    shares = [claim.least for claim in claims]
    left = budget - needed
    growing = [index for index, claim in enumerate(claims) if claim.most > claim.least]
    # by what each can still take: whoever needs little has it, and the rest is divided among the others
    for place, index in enumerate(sorted(growing, key=lambda index: claims[index].most - claims[index].least)):
        extra = min(claims[index].most - claims[index].least, left // (len(growing) - place))
        shares[index] += extra
        left -= extra
    return shares


def _mib(count: int) -> str:
    return f"{-(-count // 2**20)} MiB"

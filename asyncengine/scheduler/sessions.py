"""Sessions of one engine: what each has in the prefix cache, and when it will be back."""

from __future__ import annotations

import math

from asyncengine.kvcache import KVCache
from asyncengine.kvcache.radix_tree import Branches, tick_of
from asyncengine.kvcache.sessions import close_branches
from asyncengine.request_spec import RequestSpec
from asyncengine.scheduler.messages import SessionEvent

MOST_SESSIONS = 4096
"""Sessions that are known; the one longest unused is closed where there are more."""


class Sessions:
    """Sessions by name, the one longest unused first."""

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv
        self._branches: dict[str, Branches] = {}
        self._next_expiry = math.inf

    def arrive(self, spec: RequestSpec) -> Branches | None:
        """A request has come: its session is back. None: it belongs to none."""
        name = spec.options.session
        if name is None:
            return None
        branches = self._use(name, spec.arrival)
        branches.back = tick_of(spec.arrival)
        return branches

    def tell(self, event: SessionEvent) -> None:
        """Take note of what a session's owner says."""
        if event.what == "close":
            self._close(event.name)
        elif event.what == "open":
            self._use(event.name, event.at, event.seconds)
        elif (branches := self._branches.get(event.name)) is not None:
            branches.back = tick_of(event.at + event.seconds)
            self._kv.tree.rank_anew(branches.tips)

    def expire(self, now: float) -> None:
        """Close sessions that have not been used for as long as they said."""
        self._kv.tree.advance(now)
        if now >= self._next_expiry:
            for name in [name for name, each in self._branches.items() if each.expiry <= now]:
                self._close(name)
            self._next_expiry = min((each.expiry for each in self._branches.values()), default=math.inf)

    def _use(self, name: str, at: float, patience: float | None = None) -> Branches:
        branches = self._branches[name] = self._branches.pop(name) if name in self._branches else Branches()
        branches.patience = branches.patience if patience is None else patience
        branches.expiry = at + branches.patience
        self._next_expiry = min(self._next_expiry, branches.expiry)
        if len(self._branches) > MOST_SESSIONS:
            self._close(next(iter(self._branches)))
        return branches

    def _close(self, name: str) -> None:
        branches = self._branches.pop(name, None)
        if branches is not None:
            close_branches(self._kv.tree, branches)

"""Updates of the weights under fuzz: each token is of the weights of its moment, each request of those it may meet.

`ASYNCENGINE_LONG=34` for 20,000 requests.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.long import TIMES
from worlds.update_fuzz import UpdateLife

from asyncengine.kvcache import KVCache
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.roster import Roster, WeightUpdates

LIVES = 8 * TIMES


def live(lives: int = LIVES) -> list[UpdateLife]:
    found = [UpdateLife(seed, states=seed % 4 == 3) for seed in range(lives)]
    for life in found:
        life.run()
    return found


def test_random_requests_with_updates() -> None:
    lives = live()
    assert sum(len(life.expected) for life in lives) >= LIVES * 40
    # and it was worth it:
    assert sum(len(life.happened) for life in lives) >= LIVES * 3
    assert sum(life.recomputed for life in lives) >= LIVES // 2
    assert sum(len(set(weights)) > 1 for life in lives for weights in life.seen.values()) >= LIVES // 2


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the cache is kept": lambda patch: patch.setattr(KVCache, "clear", lambda self: None),
    "nobody computes again": lambda patch: patch.setattr(Roster, "preempt", lambda self, request: None),
    "newcomers are not held": lambda patch: patch.setattr(WeightUpdates, "is_before", lambda self, request: False),
    "nobody is freed": lambda patch: patch.setattr(WeightUpdates, "remove", lambda self, number: []),
    "steps in flight are not waited for": lambda patch: patch.setattr(
        Scheduler, "due_update", property(lambda self: self.roster.weights.due(self.requests))
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 - a check of the books, an assertion or a missing entry
        live(12)

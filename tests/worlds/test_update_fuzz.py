"""Updates of the weights under fuzz: each token is of the weights of its moment, each request of those it may meet.

`ASYNCENGINE_LONG=34` for 20,000 requests.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from worlds.update_fuzz import UpdateLife

from asyncengine.kvcache import KVCache
from asyncengine.scheduler import Scheduler
from asyncengine.scheduler.roster import Roster, WeightUpdates


def live(lives: int) -> None:
    for seed in range(lives):
        UpdateLife(seed, states=seed % 4 == 3).run()


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

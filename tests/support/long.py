"""The long form of tests, by `ASYNCENGINE_LONG=20`: so many times the random cases, and every case where the suite
takes some of each kind."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

TIMES = int(os.environ.get("ASYNCENGINE_LONG", "1"))
LONG = TIMES > 1


def by_turns(cases: Iterable[Any], kinds: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Each case with one of the kinds, in turn; in the long form with every one of them."""
    turns = range(len(kinds) if LONG else 1)
    return [(case, kinds[(place + turn) % len(kinds)]) for turn in turns for place, case in enumerate(cases)]

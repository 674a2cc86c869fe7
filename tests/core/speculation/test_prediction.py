"""A caller's prediction is found again where the output left it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from asyncengine.speculation.acceptance import AMBIGUOUS, LONG, Draft, Source
from asyncengine.speculation.planner import Prediction

TEXT = list(range(100, 140))


def steps(predicted: Sequence[int], output: Sequence[int], most: int = 15) -> int:
    """Passes that `output` takes."""
    follower, done, count = Prediction(predicted, 0), 0, 0
    while done < len(output):
        draft = follower.propose(output[:done], most).tokens
        pairs = zip(draft, output[done:], strict=False)
        done += 1 + next((place for place, (guess, right) in enumerate(pairs) if guess != right), len(draft))
        count += 1
    return count


def test_it_is_followed() -> None:
    assert Prediction(TEXT, 3).propose([1, 2, 3], 4) == Draft((100, 101, 102, 103), Source.PREDICTION, LONG)
    assert steps(TEXT, TEXT) == 3


def test_a_changed_token_costs_one_pass() -> None:
    follower = Prediction(TEXT, 0)
    output = [*TEXT[:9], 7, *TEXT[10:]]
    assert follower.propose(output[:10], 3) == Draft((110, 111, 112), Source.PREDICTION, AMBIGUOUS)
    assert follower.propose(output[:11], 3) == Draft((111, 112, 113), Source.PREDICTION, 1)
    assert follower.propose(output[:13], 3).agreed == LONG
    assert steps(TEXT, output) <= 4


def test_tokens_that_were_left_out_or_put_in() -> None:
    assert steps(TEXT, [*TEXT[:9], *TEXT[12:]]) <= 4
    assert steps(TEXT, [*TEXT[:9], 7, 8, *TEXT[9:]]) <= 6
    assert steps(TEXT, [*TEXT[:9], 7, 8, 6, *TEXT[10:]]) <= 7
    assert steps(TEXT, [7, 8, 9]) == 3


def test_it_is_found_again_near_by() -> None:
    """The same two tokens stand in a hundred other places."""
    rng = random.Random(1)
    lines = [[rng.randrange(200, 10_000) for _ in range(6)] + [1, 2] for _ in range(100)]
    text = [token for line in lines for token in line]
    changed = [token for number, line in enumerate(lines) for token in (line if number % 9 else [3, 4, 5, 6, 1, 2])]
    assert steps(text, changed) < len(changed) / 7


def test_it_is_no_use() -> None:
    assert steps(TEXT, list(range(300, 320))) == 20
    assert steps([5], [5, 6, 7]) == 2
    assert Prediction([5], 0).propose([5, 6], 3).tokens == ()

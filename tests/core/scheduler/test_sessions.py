"""Sessions own their branches in the prefix cache: what is superseded or closed goes first, what waits in due order."""

from __future__ import annotations

import pytest
from support.fake_engine import Steps

from asyncengine.kvcache.sessions import MOST_TIPS
from asyncengine.scheduler import roster
from asyncengine.scheduler.messages import SessionEvent

SYSTEM = list(range(2, 18))
"""Four pages."""


def turn(steps: Steps, prompt: list[int], session: str | None, max_tokens: int = 8, **more: object) -> list[int]:
    """Prompt and answer of one request, run to its end."""
    ticket = steps.add(prompt, max_tokens, session=session, **more)
    steps.run()
    return [*prompt, *steps.tokens[ticket]]


def cached(steps: Steps, tokens: list[int]) -> int:
    """Tokens of `tokens` that are in the cache."""
    return steps.kv.peek(("", ""), tokens, len(tokens))


def passed(steps: Steps) -> int:
    """Pages that no request is expected to start from."""
    return steps.kv.tree.num_passed


def close(steps: Steps, name: str) -> None:
    steps.apply(SessionEvent(name, "close"))


def test_a_chat_that_goes_on_supersedes_nothing():
    steps = Steps()
    history = turn(steps, SYSTEM, "a")
    for word in range(20, 24):
        history = turn(steps, [*history, word], "a")
    assert passed(steps) == 0
    steps.assert_right()


def test_an_edited_message_supersedes_the_branch_it_parts_from():
    steps = Steps()
    history = turn(steps, SYSTEM, "a")
    old = turn(steps, [*history, *range(30, 42)], "a")
    assert passed(steps) == 0
    new = turn(steps, [*history, *range(50, 62)], "a")
    assert passed(steps) == (len(old) - 1) // 4 - len(history) // 4
    assert cached(steps, old) > len(history)  # it is still there, until its pages are needed
    for word in range(64, 90):
        turn(steps, [word] * 8, None, 2)
        if cached(steps, old) == len(history):
            break
        assert cached(steps, new) == (len(new) - 1) // 4 * 4
    assert cached(steps, old) == len(history)


def test_a_superseded_branch_that_is_used_again_lives_on():
    steps = Steps()
    first = turn(steps, [*SYSTEM, 20, 21, 22, 23], "a")
    second = turn(steps, [*SYSTEM, 24, 25, 26, 27], "a")  # of one session, with a system prompt in common
    assert passed(steps) > 0
    turn(steps, [*first, 28], "a")
    assert passed(steps) == 0
    turn(steps, [*second, 29], "a")
    assert passed(steps) == 0


def test_parallel_branches_with_a_short_common_beginning_stay():
    steps = Steps(pages=256)
    for word in range(20, 25):
        steps.add([*SYSTEM, *[word] * 32], 8, session="a")
    steps.run()
    turn(steps, [*SYSTEM, *[26] * 32], "a")
    assert passed(steps) == 0


def test_samples_that_are_not_gone_on_with_are_superseded():
    steps = Steps()
    tickets = steps.add_group(SYSTEM, 3, 9, session="a")
    steps.run()
    assert passed(steps) == 0
    turn(steps, [*SYSTEM, *steps.tokens[tickets[1]], 40], "a")
    assert passed(steps) == 2 * 2


def test_closing_passes_what_only_the_session_wanted():
    steps = Steps()
    shared = turn(steps, [*SYSTEM, 30, 31, 32, 33], None)
    turn(steps, [*SYSTEM, *range(40, 56)], "a")
    turn(steps, [*SYSTEM, *range(40, 48), *range(60, 72)], "b")
    close(steps, "a")
    assert passed(steps) == (16 + 16 + 7) // 4 - (16 + 8) // 4
    close(steps, "b")
    assert steps.kv.tree.num_pages - passed(steps) == (len(shared) - 1) // 4


def test_pages_that_others_use_outlive_the_session():
    steps = Steps()
    history = turn(steps, SYSTEM, "a")
    turn(steps, [*history, 40], None)
    close(steps, "a")
    assert passed(steps) == 0


def test_a_request_that_runs_when_its_session_is_closed_leaves_nothing():
    steps = Steps()
    steps.add(SYSTEM, 8, session="a")
    steps.step()
    steps.step()
    close(steps, "a")
    steps.run()
    steps.assert_right()
    assert passed(steps) == steps.kv.tree.num_pages > 0


def test_who_will_be_back_later_goes_first():
    steps = Steps(pages=64)
    chats = {name: turn(steps, [*[word] * 16], name) for word, name in enumerate("abc", 20)}
    steps.now = 1.0
    for name, seconds in (("a", 0.5), ("b", 60.0), ("c", 5.0)):
        steps.apply(SessionEvent(name, "waiting", steps.now, seconds))
    steps.add([90] * (4 * (steps.kv.num_available - 8) - 4), 2)
    steps.run()
    left = {name: cached(steps, tokens) for name, tokens in chats.items()}
    assert left["a"] == 20 > left["c"] >= left["b"] == 0


def test_who_waits_long_ranks_below_who_was_used_as_long_ago():
    steps = Steps(pages=64)
    steps.now = 100.0
    plain = turn(steps, [20] * 16, None)
    steps.now = 110.0
    soon, late = turn(steps, [21] * 16, "soon"), turn(steps, [22] * 16, "late")
    steps.apply(SessionEvent("soon", "waiting", steps.now, 2.0))
    steps.apply(SessionEvent("late", "waiting", steps.now, 30.0))

    chats, order = {"plain": plain, "soon": soon, "late": late}, []
    while steps.kv.tree.num_pages:
        steps.kv.pool.give(steps.kv.tree.evict(1))
        order += [name for name, each in chats.items() if name not in order and not cached(steps, each[:4])]
    assert order == ["late", "plain", "soon"]


def test_a_session_expires_after_its_patience(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(roster, "MOST_SESSIONS", 2)
    steps = Steps()
    steps.apply(SessionEvent("a", "open", 0.0, 10.0))
    history = turn(steps, SYSTEM, "a")
    steps.now = 9.0
    history = turn(steps, [*history, 40], "a")
    steps.now = 18.0
    turn(steps, [90] * 4, None)
    assert passed(steps) == 0
    steps.now = 19.5
    turn(steps, [91] * 4, None)
    assert passed(steps) == (len(history) - 1) // 4
    for name in "xyz":
        turn(steps, [92, 93, ord(name), 94, 95], name)
    assert len(steps.scheduler.roster.sessions._branches) == 2


def test_a_session_has_a_limit_of_branches():
    steps = Steps(pages=2000)
    for word in range(MOST_TIPS + 5):
        steps.add([word % 7 + 2, word // 7 + 2] * 8, 2, session="a")
    steps.run()
    (branches,) = steps.scheduler.roster.sessions._branches.values()
    assert len(branches.tips) == MOST_TIPS
    assert passed(steps) == 5 * 4
    newest = [(MOST_TIPS + 4) % 7 + 2, (MOST_TIPS + 4) // 7 + 2] * 8
    turn(steps, [*newest, 90, 91, 92, 93], "a", 2)  # it goes on with one, which takes no place of its own
    assert len(branches.tips) == MOST_TIPS
    assert passed(steps) == 5 * 4

"""A request changes state only along its table, and the scheduler's own books are proven too."""

import itertools
from collections.abc import Callable

import pytest
from support.fake_engine import Steps

from asyncengine.errors import InvariantViolation
from asyncengine.scheduler.request import LEGAL_TRANSITIONS, RequestState


@pytest.mark.parametrize(("old", "new"), list(itertools.product(RequestState, RequestState)))
def test_only_the_transitions_of_the_table_are_possible(old: RequestState, new: RequestState):
    steps = Steps()
    request = steps.request(steps.add([2, 3]))
    request.state = old
    if new in LEGAL_TRANSITIONS[old]:
        request.move(new)
        assert request.state is new
    else:
        with pytest.raises(InvariantViolation, match="is not legal"):
            request.move(new)


def test_messages_about_unknown_and_ended_tickets_change_nothing():
    steps = Steps()
    ticket = steps.add([2, 3], 2)
    steps.run()
    steps.abort(ticket)
    steps.abort(12345)
    assert steps.ended == {ticket: "length"}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda steps: steps.scheduler.waiting.remove(steps.request(3)), "exactly one place"),
        (lambda steps: setattr(steps.request(1), "slot", -1), "slots out of balance"),
        (lambda steps: setattr(steps.request(1), "slot", steps.request(2).slot), "slots out of balance"),
        (lambda steps: setattr(steps.request(1), "num_computed", 7), "progress counters"),
    ],
    ids=["a lost request", "a lost slot", "a slot used twice", "progress out of order"],
)
def test_the_check_finds(spoil: Callable[[Steps], object], said: str):
    steps = Steps(max_num_seqs=2)
    for first in (2, 4, 6):
        steps.add([first, first + 1])
    steps.step()
    steps.scheduler.check()
    spoil(steps)
    with pytest.raises(InvariantViolation, match=said):
        steps.scheduler.check()


def test_a_scheduler_that_could_start_nobody_says_so_rather_than_wait_for_ever():
    class Never:
        def fits(self, digest):
            return False

        def admit(self, digest, running):
            return None

        def release(self, digest):
            raise AssertionError

    steps = Steps(adapters=Never())
    steps.add([2, 3], adapter="A")
    with pytest.raises(InvariantViolation, match="none could be admitted"):
        steps.step()


def test_end_all_ends_everybody_wherever_they_are():
    steps = Steps(max_num_seqs=2)
    for i in range(5):
        steps.add([2 + i, 3], needs_grammar=i == 4)
    steps.launch()
    steps.scheduler.end_all("abort")
    steps.commit()
    assert steps.ended == dict.fromkeys(range(1, 6), "abort")
    steps.assert_empty()

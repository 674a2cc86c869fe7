"""Updates of the weights as the scheduler sees them: who is answered by which, and that nothing old is read."""

from __future__ import annotations

import pytest
from support.fake_engine import Steps, rows
from support.plug_points import Letters

from asyncengine.scheduler.messages import GrammarReady, UpdateWeights, WithdrawUpdate
from asyncengine.testing.fake_runner import FakeModel


def ask(steps: Steps, number: int, mode: str = "wait") -> None:
    steps.apply(UpdateWeights(number, mode))  # type: ignore[arg-type]


def run(steps: Steps) -> list[int]:
    """To the end, with each update when it is due: it makes the weights those of its number. Returns their order."""
    done: list[int] = []
    while steps.scheduler.requests or steps.launched or steps.scheduler.due_update is not None:
        if (due := steps.scheduler.due_update) is not None:
            steps.scheduler.start_anew(due)
            steps.scheduler.check()
            steps.executor.update(due)
            done.append(due)
        steps.step()
    steps.assert_empty()
    return done


def answer(prompt: list[int], count: int, weights: int) -> list[int]:
    model = FakeModel()
    model.weights = weights
    return model.oracle(prompt, count)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("pages", [64, 12])
def test_those_before_end_on_the_old_weights_and_those_after_have_the_new_ones(depth: int, pages: int):
    """Whether they run already or wait; with memory short, so that they preempt each other, too."""
    steps = Steps(pages, max_steps_in_flight=depth, max_num_seqs=3)
    before = [steps.add([2, 3, 4 + i], 9) for i in range(5)]
    for _ in range(3):
        steps.step()
    ask(steps, 7)
    after = [steps.add([2, 3, 4 + i], 9, priority=-1) for i in range(5)]
    assert run(steps) == [7]
    steps.assert_right(before)
    assert [steps.tokens[ticket] for ticket in after] == [answer([2, 3, 4 + i], 9, 7) for i in range(5)]


@pytest.mark.parametrize("depth", [1, 2])
def test_recompute_goes_on_with_the_new_weights_where_it_stands(depth: int):
    steps = Steps(max_steps_in_flight=depth)
    running = steps.add([2, 3, 4], 12)
    while len(steps.tokens[running]) < 5:
        steps.step()
    ask(steps, 9, "recompute")
    later = steps.add([5, 6], 4)
    run(steps)
    old = answer([2, 3, 4], 5 + (depth - 1), 0)  # one more came out of the step that was in flight
    assert steps.tokens[running] == old + answer([2, 3, 4, *old], 12 - len(old), 9)
    assert steps.tokens[later] == answer([5, 6], 4, 9)


def test_no_step_is_launched_between_a_recompute_and_its_update():
    steps = Steps()
    steps.add([2, 3, 4], 12)
    steps.step()
    ask(steps, 1, "recompute")
    assert steps.step() is None
    assert steps.scheduler.due_update == 1


def test_an_idle_engine_updates_at_once():
    steps = Steps()
    steps.add([2, 3, 4, 5, 6, 7], 3)
    steps.run()
    assert steps.kv.counts([]).cached
    ask(steps, 1)
    assert run(steps) == [1]
    assert not steps.kv.counts([]).cached


def test_a_request_in_another_queue_comes_before_its_update():
    """Its grammar compiles: the update waits for it, and so do those that came later, of whom one compiles, too."""
    steps = Steps()
    compiling = steps.add([2, 3], 2, needs_grammar=True)
    ask(steps, 1)
    later, other = steps.add([2, 3], 2, needs_grammar=True), steps.add([6, 7], 4)
    steps.apply(GrammarReady(later, Letters([5, 6], 2)))
    assert steps.step() is None
    assert steps.scheduler.num_waiting == 2
    assert steps.scheduler.due_update is None
    steps.apply(GrammarReady(compiling, Letters([5, 6], 2)))
    run(steps)
    assert steps.tokens[other] == answer([6, 7], 4, 1)
    assert {compiling, later} <= set(steps.ended)


def test_updates_happen_in_order_and_each_has_its_requests():
    steps = Steps()
    tickets = [steps.add([2, 3], 5)]
    for number, mode in ((4, "wait"), (3, "recompute"), (8, "wait")):
        ask(steps, number, mode)
        tickets.append(steps.add([2, 3], 5))
    assert run(steps) == [4, 3, 8]
    found = [steps.tokens[ticket] for ticket in tickets]
    assert found[0] == answer([2, 3], 5, 0)
    assert found[3] == answer([2, 3], 5, 8)
    assert found[1] == found[2] == answer([2, 3], 5, 3), "the second update takes whoever there is along"


def test_a_withdrawn_update_frees_those_who_waited_for_it():
    steps = Steps()
    steps.add([2, 3], 9)
    steps.step()
    ask(steps, 1)
    later = steps.add([4, 5], 3)
    assert later not in rows(steps.step())
    ask(steps, 2)
    last = steps.add([4, 5], 3)
    for number in (1, 1, 99):
        steps.apply(WithdrawUpdate(number))
    assert later in rows(steps.step())
    assert run(steps) == [2]
    assert steps.tokens[last] == answer([4, 5], 3, 2) != steps.tokens[later]


def test_who_leaves_while_it_is_held_leaves_nothing():
    steps = Steps()
    first = steps.add([2, 3], 9)
    steps.step()
    ask(steps, 1)
    gone = steps.add([4, 5], 3, deadline=steps.now + 1.0)
    left = steps.add([4, 5], 3)
    steps.abort(left)
    steps.now += 2.0
    steps.step()
    assert (steps.ended[gone], steps.ended[left]) == ("timeout", "abort")
    steps.abort(first)
    assert steps.scheduler.due_update == 1
    assert run(steps) == [1]

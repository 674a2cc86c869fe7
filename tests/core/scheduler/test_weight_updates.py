"""Updates of the weights as the scheduler sees them: when they are due (tests/worlds has who is answered by which)."""

from __future__ import annotations

from support.fake_engine import Steps
from support.plug_points import Letters

from asyncengine.scheduler.messages import GrammarReady, UpdateWeights
from asyncengine.testing.fake_runner import FakeModel


def ask(steps: Steps, number: int, mode: str = "wait") -> None:
    steps.apply(UpdateWeights(number, mode))  # type: ignore[arg-type]


def run(steps: Steps) -> list[int]:
    """Run to the end, with each update when it is due: weights become those of its number. Returns their order."""
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

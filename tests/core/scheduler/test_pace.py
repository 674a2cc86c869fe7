"""Steps by time: how long a step takes that computes prompts beside running streams, on machines of known speed."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import Steps, greedy, rows

from asyncengine.request_spec import Pooled
from asyncengine.testing.fake_runner import FakeExecutor
from asyncengine.testing.replay import Recording, replay

TARGET = 0.05
PROMPT = [place * 7 % 90 + 2 for place in range(2340)]


class Machine(Steps):
    """A scheduler on a machine where a step takes 15 ms, and 12 ms for each 16 tokens or part of them: that of a model
    of 135 million weights on two cores."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(pages=1600, check_every=100, page_size=16, **settings)
        self.busy = 1.0
        """Factor over the idle machine's times."""
        self.recording = Recording(self.config, 1600)

    def add(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> int:
        ticket = super().add(prompt, max_tokens, **fields)
        self.recording.record("apply", self.request(ticket).spec)
        return ticket

    def step(self) -> Any:
        self.recording.record("schedule", self.now)
        batch = self.launch()
        assert batch is not None
        self.now += self.busy * (0.015 + 0.012 * -(-batch.num_tokens // 16))
        self.recording.record("commit", self.now)
        self.commit()
        return batch

    def streams(self, count: int, steps: int = 10) -> None:
        """Let `count` requests generate."""
        for first in range(2, 2 + count):
            self.add(range(first, first + 20), 400)
        for _ in range(steps):
            self.step()

    def gaps(self, ticket: int) -> list[float]:
        """Seconds of the steps until `ticket` has its first token."""
        found = []
        while not self.tokens[ticket]:
            before = self.now
            self.step()
            found.append(self.now - before)
        return found


def test_a_long_prompt_beside_streams_takes_steps_of_the_time_aimed_at():
    machine = Machine(step_time_target=TARGET)
    machine.streams(8)
    started, steps = machine.now, len(machine.batches)
    gaps = machine.gaps(machine.add(PROMPT, 1))
    assert max(gaps[1:]) <= 1.3 * TARGET
    assert gaps[0] <= 2 * TARGET  # all it had seen of prompts was one step without any decode
    assert sum(gaps) / len(gaps) >= 0.8 * TARGET
    assert all(len(rows(batch)) == 9 for batch in machine.batches[steps:])
    assert machine.now - started < 2 * (0.045 + 0.00075 * len(PROMPT))  # twice what the prompt takes by itself
    machine.run()
    machine.assert_right()


def test_without_a_target_it_takes_all_that_a_step_may_have():
    machine = Machine(step_time_target=None)
    machine.streams(8)
    machine.gaps(machine.add(PROMPT, 1))
    assert [batch.num_tokens for batch in machine.batches[-3:]] == [1024, 1024, 8 + 2340 - 2 * 1016]


def test_a_lone_prompt_takes_whole_steps():
    machine = Machine(step_time_target=TARGET)
    machine.streams(8)
    for ticket in list(machine.scheduler.requests):
        machine.abort(ticket)
    machine.gaps(machine.add(PROMPT, 1))
    assert [batch.num_tokens for batch in machine.batches[-3:]] == [1024, 1024, 292]


def test_a_machine_that_becomes_busy_gets_shorter_chunks_and_longer_ones_when_it_is_idle_again():
    machine = Machine(step_time_target=TARGET)
    machine.streams(8)
    ticket = machine.add(PROMPT, 1)
    for _ in range(12):
        machine.step()
    idle = rows(machine.batches[-1])[ticket]
    machine.busy = 4.0
    gaps = []
    for _ in range(12):
        before = machine.now
        machine.step()
        gaps.append(machine.now - before)
    busy = rows(machine.batches[-1])[ticket]
    assert busy < idle
    assert max(gaps) <= 4.1 * 1.3 * TARGET  # the steps that begin before it is known
    assert max(gaps[3:]) <= 2.1 * 4 * 0.027  # a step of decodes takes four times 27 ms
    machine.busy = 1.0
    assert max(machine.gaps(ticket)) <= 1.3 * TARGET
    assert max(rows(batch).get(ticket, 0) for batch in machine.batches[-20:]) >= idle
    # in the pause the machine is busy again, and only steps of decodes tell of it
    machine.busy = 4.0
    for _ in range(20):
        machine.step()
    assert max(machine.gaps(machine.add(PROMPT[::-1], 1))) <= 2.1 * 4 * 0.027


def test_decodes_slower_than_the_target_leave_prompts_half_of_the_time():
    machine = Machine(step_time_target=0.001)
    machine.busy = 10.0
    machine.streams(8)
    gaps = machine.gaps(machine.add(PROMPT, 1))
    assert 0.35 < sum(gaps) / len(gaps) <= 0.6  # 0.27 without prompts, 0.39 with the fewest tokens of one


def test_prompts_that_wait_together_have_the_time_of_several():
    machine = Machine(step_time_target=TARGET)
    machine.streams(8)
    tickets = [machine.add([first, *PROMPT[:700]], 1) for first in range(20, 26)]
    gaps = machine.gaps(tickets[2])
    assert 3 * TARGET < max(gaps[2:]) <= 1.2 * 4 * TARGET
    assert max(machine.gaps(tickets[-1])[-3:]) <= 1.3 * TARGET


def test_a_pause_of_the_program_is_not_taken_for_a_slow_machine():
    machine = Machine(step_time_target=TARGET)
    machine.streams(8)
    ticket = machine.add(PROMPT, 1)
    for _ in range(10):
        machine.step()
    before = rows(machine.batches[-1])[ticket]
    machine.busy = 40.0
    machine.step()
    machine.busy = 1.0
    for _ in range(6):
        machine.step()
    assert rows(machine.batches[-1])[ticket] >= before
    assert machine.batches[-1].num_tokens < 100


@pytest.mark.parametrize("kind", ["vectors", "last tokens"])
def test_results_that_nobody_waits_to_continue_are_no_streams(kind):
    """With steps in flight their last row is still running when the next texts are planned."""
    machine = Machine(step_time_target=TARGET, max_steps_in_flight=2)
    machine.streams(1)
    machine.abort(1)
    while machine.launched:
        machine.commit()
    fields = {"pooled": Pooled(), "params": greedy(1)} if kind == "vectors" else {}
    for first in range(2, 6):
        ticket = machine.add([first, *PROMPT[:900]], 0 if fields else 1, **fields)
        machine.launch()
        assert rows(machine.batches[-1]) == {ticket: 901}
    while machine.launched:
        machine.commit()
    assert len(machine.ended) == 5


def test_a_recording_has_the_times_that_steps_were_planned_by(tmp_path):
    machine = Machine(step_time_target=TARGET)
    machine.streams(4)
    ticket = machine.add(PROMPT, 3)
    while ticket not in machine.ended:
        machine.busy = 1.0 + len(machine.batches) % 7 / 2
        machine.step()
    recording = Recording.load(machine.recording.save(tmp_path / "recording.jsonl"))
    executor = FakeExecutor(1600, 16)
    executor.keep_batches = True
    replay(recording, executor)
    assert [rows(batch) for batch in executor.executed] == [rows(batch) for batch in machine.batches]
    recording.entries = [(kind, 0.0 if kind == "commit" else value) for kind, value in recording.entries]
    executor = FakeExecutor(1600, 16)
    executor.keep_batches = True
    replay(recording, executor)
    assert [rows(batch) for batch in executor.executed] != [rows(batch) for batch in machine.batches]

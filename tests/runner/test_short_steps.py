"""Short steps fill the arrays of those before them: no step may see what another left there."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
from support.checkpoints import MakeRunner
from support.tiny_models import VOCAB

from asyncengine.attention import cpu as compiled_attention
from asyncengine.request_spec import RequestSpec
from asyncengine.runner import step_buffers
from asyncengine.runner.model_runner import ModelRunner
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Batch, Row, StepHandle, StepResult

PAGES = 14
"""Of each slot, of 4 tokens."""


class Life(NamedTuple):
    spec: RequestSpec
    tokens: list[int]
    pages: list[int]


class Company:
    """Requests that come, are computed in chunks or with guesses, give way and go; slots and pages are used again."""

    def __init__(self, runner: ModelRunner, seed: int) -> None:
        self.runner, self.random = runner, random.Random(seed)
        self.alive: dict[int, Life] = {}
        self.computed: dict[int, int] = {}
        self.tickets = 0
        self.seen: list[Any] = []

    def join(self, slot: int) -> None:
        draw = self.random
        self.tickets += 1
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randrange(2, 30))]
        params = SamplingParams(temperature=draw.choice([0.0, 1.0]), seed=slot, logprobs=draw.random() < 0.5, top_p=1.0)
        spec = RequestSpec(self.tickets, tuple(prompt), params, 4 * PAGES, seed=self.tickets)
        self.alive[slot], self.computed[slot] = Life(spec, prompt, self.pages(slot)), 0

    def pages(self, slot: int) -> list[int]:
        """In another order each time."""
        found = list(range(1 + PAGES * slot, 1 + PAGES * (slot + 1)))
        self.random.shuffle(found)
        return found

    def row(self, slot: int) -> Row:
        draw, (spec, tokens, pages), start = self.random, self.alive[slot], self.computed[slot]
        behind = len(tokens) - start
        count = behind if behind == 1 else draw.randrange(1, behind + 1)
        samples, drafts = count == behind, ()
        if samples and draw.random() < 0.5:
            most = 4 * PAGES - len(tokens) - 1
            drafts = tuple(draw.randrange(VOCAB) for _ in range(min(most, draw.randrange(1, 9))))
        return Row(spec, slot, start, count + len(drafts), tokens, False, pages, samples, drafts=drafts)

    def step(self, number: int) -> StepHandle:
        draw = self.random
        for slot in list(self.alive):
            if draw.random() < 0.05 or len(self.alive[slot].tokens) >= 4 * PAGES - 2:
                del self.alive[slot]
            elif draw.random() < 0.05:  # it gives way, and is computed again in other pages
                self.alive[slot] = self.alive[slot]._replace(pages=self.pages(slot))
                self.computed[slot] = 0
        while not self.alive or (len(self.alive) < 4 and draw.random() < 0.3):
            self.join(draw.choice([slot for slot in range(4) if slot not in self.alive]))
        slots = draw.sample(list(self.alive), draw.randrange(1, len(self.alive) + 1))
        self.rows = [self.row(slot) for slot in slots]
        return self.runner.launch(Batch(number, tuple(self.rows)))

    def apply(self, result: StepResult) -> None:
        self.seen.append((result.tokens, result.further, result.accepted, result.logprobs, result.errors))
        for index, row in enumerate(self.rows):
            self.computed[row.slot] = row.start + row.num_scheduled - len(row.drafts) + result.accepted.get(index, 0)
            if row.samples:
                self.alive[row.slot].tokens.extend((result.tokens[index], *result.further.get(index, ())))

    def run(self, steps: int) -> list[Any]:
        for number in range(1, steps + 1):
            self.apply(self.step(number).wait())
        return self.seen


@pytest.mark.parametrize(
    ("name", "quantization"), [("llama", "int8"), ("qwen3", None), ("mistral", "int8"), ("gemma3", "int8")]
)
def test_rows_that_join_leave_and_are_guessed_for_get_what_steps_in_new_arrays_give(
    name: str, quantization: str | None, make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, tokens and log-probabilities, by one runner whose arrays have been used by all steps before."""
    runner = make_runner(name, quantization=quantization)
    short = Company(runner, 3).run(120)
    monkeypatch.setattr(step_buffers, "_FEW", 0)
    monkeypatch.setattr(compiled_attention, "FEW", 0)
    assert Company(runner, 3).run(120) == short
    assert any(any(one) for _, _, *one in short)
    assert not any(errors for *_, errors in short)


def test_a_result_is_not_touched_by_the_steps_launched_behind_it(make_runner: MakeRunner) -> None:
    """With several steps in flight a result is read when others have been launched since."""
    runner = make_runner("llama", quantization="int8")
    at_once = Company(runner, 5)
    wanted = at_once.run(1)
    company = Company(runner, 5)
    first, rows = company.step(1), company.rows
    other = Company(runner, 6)
    for number in range(2, 5):
        other.step(number)
    company.rows = rows
    company.apply(first.wait())
    assert company.seen == wanted

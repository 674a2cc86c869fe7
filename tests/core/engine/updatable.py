"""A fake executor whose weights are a number that updates change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.fake_engine import SteppedExecutor

from asyncengine.errors import ModelNotFound
from asyncengine.testing import Recording, replay
from asyncengine.testing.fake_runner import FakeExecutor, FakeModel


class Updatable(SteppedExecutor):
    """Its weights are a number."""

    def prepare_update(self, weights: Any, config: Any, partial: bool) -> Callable[[], None]:
        if weights == "missing":
            raise ModelNotFound("the update lacks the tensor model.norm.weight")

        def write() -> None:
            if weights == "vanishes":
                raise OSError("the file is gone")
            self.update(weights)

        return write


def answer(prompt: list[int], count: int, weights: int = 0) -> list[int]:
    """The one right output of so many tokens."""
    model = FakeModel()
    model.weights = weights
    return model.oracle(prompt, count, 0, (1,))


def replayed(file: Path) -> list[list[int]]:
    """The tokens of each request of a recording, in which all weights but the first are the number 5."""
    executor = FakeExecutor(64, 4)
    outputs = replay(Recording.load(file), executor, update=lambda number: executor.update(5))
    tickets = sorted({output.ticket for output in outputs})
    return [[output.token for output in outputs if output.ticket == each and output.token >= 0] for each in tickets]


def prompt(number: int) -> list[int]:
    """One of several prompts."""
    return [2 + number, 3, 4, 5, 6]

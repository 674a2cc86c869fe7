"""A step that does not fit in memory is launched in parts, one after the other, and its results are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from asyncengine.device.memory import is_out_of_memory, release_cached
from asyncengine.step import Batch, FinishedStep, StepHandle, StepResult

logger = logging.getLogger("asyncengine")

OUT_OF_MEMORY = "the device has not enough memory for this request's step"
_BY_ROW = (
    "further", "accepted", "drafted", "constrained", "logprobs", "prompt_logprobs", "routed_experts", "vectors",
    "errors",
)  # fmt: skip
"""Fields of a result that are kept by row."""


def launch_in_parts(batch: Batch, launch: Callable[[Batch], StepHandle], device: torch.device) -> StepHandle:
    """`launch(batch)`; where that runs out of memory, the same of its halves, and of theirs.

    A row that does not fit alone ends with an error. One whose state was to be moved where it lies is `lost`: half the
    layers may have done so. Raises what `launch` raises for any other reason.
    """
    try:
        return launch(batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_cached(device)  # not above: the error's traceback would hold what the step had taken
    rows = batch.rows
    if len(rows) == 1:
        return FinishedStep(StepResult(batch.step, [-1], errors={0: OUT_OF_MEMORY}))
    intact = tuple(index for index, row in enumerate(rows) if not row.moves_state)
    if len(intact) < len(rows):
        logger.warning("step %d does not fit in memory: some of its rows start again", batch.step)
        if not intact:
            return FinishedStep(StepResult(batch.step, [-1] * len(rows), lost=list(range(len(rows)))))
        part = launch_in_parts(Batch(batch.step, tuple(rows[index] for index in intact)), launch, device)
        return PartialStep(batch, intact, part)
    half = len(rows) // 2
    logger.warning("step %d does not fit in memory: its %d rows are halved", batch.step, len(rows))
    first = launch_in_parts(Batch(batch.step, rows[:half]), launch, device)
    return SplitStep(batch.step, (first, launch_in_parts(Batch(batch.step, rows[half:]), launch, device)), half)


@dataclass(frozen=True, slots=True)
class SplitStep:
    """A `step.StepHandle` of a step that was launched in two parts, one after the other."""

    step: int
    parts: tuple[StepHandle, StepHandle]
    size: int
    """Rows of the first part."""

    @property
    def ready(self) -> bool:
        return all(part.ready for part in self.parts)

    def block(self) -> None:
        for part in self.parts:
            part.block()

    def wait(self) -> StepResult:
        first, second = (part.wait() for part in self.parts)
        joined = StepResult(self.step, [*first.tokens, *second.tokens], seconds=first.seconds + second.seconds)
        for name in _BY_ROW:
            moved = {self.size + index: value for index, value in getattr(second, name).items()}
            getattr(joined, name).update(getattr(first, name) | moved)
        joined.lost = first.lost + [self.size + index for index in second.lost]
        return joined


@dataclass(frozen=True, slots=True)
class PartialStep:
    """A `step.StepHandle` of a step of which only some rows could be launched."""

    batch: Batch
    rows: tuple[int, ...]
    """Rows of `batch` that `part` computes."""
    part: StepHandle

    @property
    def ready(self) -> bool:
        return self.part.ready

    def block(self) -> None:
        self.part.block()

    def wait(self) -> StepResult:
        part = self.part.wait()
        whole = StepResult(self.batch.step, [-1] * len(self.batch.rows), seconds=part.seconds)
        for place, index in enumerate(self.rows):
            whole.tokens[index] = part.tokens[place]
        for name in _BY_ROW:
            getattr(whole, name).update({self.rows[place]: value for place, value in getattr(part, name).items()})
        launched = {*self.rows} - {self.rows[place] for place in part.lost}
        whole.lost = [index for index in range(len(self.batch.rows)) if index not in launched]
        return whole

"""A step that does not fit in memory is launched in parts, one after the other, and its results are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from asyncengine.execution.device.memory import is_out_of_memory, release_cached
from asyncengine.seams import StepHandle
from asyncengine.step import Batch, FinishedStep, StepResult

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
    intact = [index for index, row in enumerate(rows) if not row.moves_state]
    if len(intact) < len(rows):
        logger.warning("step %d does not fit in memory: some of its rows start again", batch.step)
        places: list[Sequence[int]] = [intact] if intact else []
    else:
        logger.warning("step %d does not fit in memory: its %d rows are halved", batch.step, len(rows))
        places = [range(len(rows) // 2), range(len(rows) // 2, len(rows))]
    parts: list[tuple[Sequence[int], StepHandle]] = []
    for part in places:
        own = Batch(batch.step, tuple(rows[index] for index in part))
        parts.append((part, launch_in_parts(own, launch, device)))
    return JoinedStep(batch, parts)


@dataclass(frozen=True, slots=True)
class JoinedStep:
    """A `step.StepHandle` of a step that was launched in parts, one after the other."""

    batch: Batch
    parts: Sequence[tuple[Sequence[int], StepHandle]]
    """Each part, with the rows of `batch` that it computes. Rows of no part are lost."""

    @property
    def ready(self) -> bool:
        return all(part.ready for _, part in self.parts)

    def block(self) -> None:
        for _, part in self.parts:
            part.block()

    def wait(self) -> StepResult:
        whole = StepResult(self.batch.step, [-1] * len(self.batch.rows))
        lost = dict.fromkeys(range(len(whole.tokens)))
        for rows, part in self.parts:
            result = part.wait()
            whole.seconds += result.seconds
            for place, index in enumerate(rows):
                whole.tokens[index] = result.tokens[place]
                if place not in result.lost:
                    del lost[index]
            for name in _BY_ROW:
                getattr(whole, name).update({rows[place]: value for place, value in getattr(result, name).items()})
        whole.lost = list(lost)
        return whole

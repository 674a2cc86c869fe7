"""Graphs that choose again for rows of a decode step whose logits are processed: penalties, biases, grammars' masks.

They follow the step's own graph, which has left its logits in fixed memory. So a mask is wanted only when the forward
ends, and penalties cost what their kernels take. What they need of the rows, masks included, is one copy from a ring of
pinned memory, into which grammars write their masks (`take`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.execution.device.pinned import CudaMemory, FixedInputs, Int64Array
from asyncengine.execution.runner import step_buffers
from asyncengine.execution.sampling.masks import FilledMasks, StepMasks
from asyncengine.kernels.api import row_numbers
from asyncengine.step import Row

if TYPE_CHECKING:
    from asyncengine.execution.runner.graphs import Capture, Graph


class ProcessedRows:
    """Graphs for 1, 2, 4 ... rows that are processed, and the memory that they work with."""

    def __init__(
        self, memory: CudaMemory, logits: torch.Tensor, inputs: torch.Tensor,
        chosen: tuple[torch.Tensor, torch.Tensor], last_token: torch.Tensor, sampler: Any, tables: Any,
    ) -> None:  # fmt: skip
        """A step's graph leaves, with one place to spare, logits [most + 1, vocab], inputs int64 [most + 1], and
        (tokens, largest logits) [most + 1], of which those of processed rows are replaced, like `last_token`.
        `sampler`: a `DeviceSampler`; `tables`: `SlotTables`."""
        self._logits, self._inputs, self._chosen, self._last_token = logits, inputs, chosen, last_token
        self._sampler, self._tables = sampler, tables
        self._most, vocab = len(logits) - 1, logits.shape[1]
        self._words = -(-vocab // 32)
        self._memory = FixedInputs(memory, self._most * (2 * row_numbers.NUMBERS + self._words))
        with torch.inference_mode(False):
            self.changed = torch.empty((self._most, vocab), device=logits.device)
            """Logits of the rows of the last replay, in their order, as tokens were chosen from them."""
            self._tokens = torch.zeros(self._most, dtype=torch.int64, device=logits.device)
            self._best = torch.zeros(self._most, device=logits.device)
        self._padding = np.zeros((row_numbers.NUMBERS, 1), dtype=np.int64)
        self._padding[[row_numbers.SLOT, row_numbers.PLACE, row_numbers.MASK], 0] = len(last_token) - 1, self._most, -1
        self._graphs: dict[int, Graph] = {}
        self._taken: torch.Tensor | None = None

    def capture_all(self, capture: Capture) -> None:
        """Capture graphs for 1, 2, 4 ... rows, largest first."""
        sizes = [1 << place for place in range((self._most - 1).bit_length())] + [self._most]
        for size in reversed(sizes):
            self.take(size, 0)
            self._send(size, self._padding[:, :0], 0)
            self._graphs[size] = capture(partial(self._choose, size))

    def choose(self, rows: Sequence[Row], own: Int64Array, places: Int64Array, masks: StepMasks | None) -> FilledMasks:
        """Choose again for those at `places` of a decode step's rows, whose numbers are `own`. Returns the masks."""
        count, filled = 0, FilledMasks.none()
        packed = self.take(len(places), 0 if masks is None else masks.count)
        if masks is not None:
            count, filled = masks.count, masks.wait(range(len(rows)), packed)
        chosen, own = [rows[place] for place in places.tolist()], own[:, places]
        numbers, kept = self._tables.numbers(
            chosen, own[step_buffers.SLOT], own[step_buffers.NEXT], places, self._inputs, decodes=True
        )
        numbers[row_numbers.MASK, np.searchsorted(places, filled.places)] = filled.kept
        self.run(numbers, count)
        del kept  # not before the kernels are queued
        return filled

    def take(self, rows: int, masks: int) -> NDArray[np.int32]:
        """int32 [masks, ceil(vocab / 32)] that holds anything: `run` for so many rows sends masks from there."""
        self._taken = self._memory.take()
        begin = 2 * row_numbers.NUMBERS * self._size(rows)
        filled: NDArray[np.int32] = self._taken[begin : begin + masks * self._words].numpy()
        return filled.reshape(masks, self._words)

    def run(self, numbers: Int64Array, masks: int) -> None:
        """Replay for rows of these `kernels.cuda.row_numbers`, with so many of the masks that were taken."""
        size = self._size(numbers.shape[1])
        self._send(size, numbers, masks)
        self._graphs[size].replay()

    def close(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()

    def _size(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self._most) if rows else 1

    def _send(self, size: int, numbers: Int64Array, masks: int) -> None:
        assert self._taken is not None
        sent, rows = 2 * row_numbers.NUMBERS * size, numbers.shape[1]
        own: Int64Array = self._taken[:sent].view(torch.int64).numpy().reshape(row_numbers.NUMBERS, size)
        own[:, :rows], own[:, rows:] = numbers, self._padding
        self._memory.send(sent + masks * self._words)

    def _choose(self, size: int) -> torch.Tensor:
        from asyncengine.kernels.api import gpu

        sent = 2 * row_numbers.NUMBERS * size
        numbers = self._memory.sent[:sent].view(torch.int64).view(row_numbers.NUMBERS, size)
        processed, tokens, best = self.changed[:size], self._tokens[:size], self._best[:size]
        masks = self._memory.sent[sent:]
        gpu.process_logits(self._logits, processed, numbers, masks, self._words, self._inputs)
        self._sampler.sample(processed, numbers[row_numbers.SLOT], numbers[row_numbers.POSITION], tokens, best)
        for into, source, where in (
            (self._chosen[0], tokens, row_numbers.PLACE),
            (self._chosen[1], best, row_numbers.PLACE),
            (self._last_token, tokens, row_numbers.SLOT),
        ):  # fmt: skip
            into.index_copy_(0, numbers[where], source)
        return tokens

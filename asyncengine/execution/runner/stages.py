"""The runner of a process that has some of a model's layers (pipeline parallelism): passes go through all stages.

The first stage, the engine's own process, begins a pass and ends it: it embeds and runs its layers, and when the last
stage has handed hidden rows on, it makes logits of them and samples. Meanwhile it begins the next pass, which is of
other requests, so that all stages have something to compute.
"""

from __future__ import annotations

import math
import threading
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from asyncengine.execution.attention.base import AttentionBackend
from asyncengine.execution.device.collective_gather import Gather
from asyncengine.execution.device.shared_gather import SharedGather, SharedPools
from asyncengine.execution.layers.step import StepContext, Traces
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import LoadedModel
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.pending import PendingStep
from asyncengine.execution.runner.step_buffers import Step
from asyncengine.execution.runner.step_inputs import StepInputs, inputs_of
from asyncengine.execution.sampling.masks import StepMasks
from asyncengine.seams import StepHandle
from asyncengine.step import Batch

# Hidden rows of passes on their way from stage to stage of a pipeline, through shared memory on a CPU. Stages on
# machines of their own have such memory each, for all stages alike; between machines the first ranks send the rows by
# connections, and write into their machine's memory what the stage before would have written there.


class StageRelay:
    """One stage's door to the one before it and the one behind it. All make it before anything else of `memory`."""

    def __init__(
        self, gather: SharedGather, memory: SharedPools, tokens: int, width: int, vectors: Sequence[int],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`tokens`: of a pass, at most. `width`: numbers of a token between two stages. `vectors`: shape of what each
        token has for all layers beside it; (): nothing."""
        self._gather, self._width = gather, width
        self._rows = memory.empty((gather.stages, tokens * width), dtype)
        self._vectors = memory.empty((gather.stages, tokens, *vectors), dtype) if vectors else None
        self._passed = self._collected = 0
        """Passes that this stage has handed on, and that the first has back."""
        self._regions: list[list[torch.Tensor]] = []
        """Bytes [stages, bytes] of the rows, and of the vectors, of each rank of this machine, where it has links."""
        if gather.links:
            sent = [self._rows] if self._vectors is None else [self._rows, self._vectors]
            self._regions = [[each.view(gather.stages, -1) for each in memory.of_all(own)] for own in sent]
        for index in range(len(gather.links) if gather.stage == 0 else 0):
            reader = threading.Thread(target=self._read, args=(index,), name="asyncengine-stage", daemon=True)
            gather.readers.append(reader)
            reader.start()

    @staticmethod
    def nbytes(size: int, tokens: int, width: int, vectors: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes that hold what `size` stages exchange."""
        return size * tokens * (width + math.prod(vectors) * bool(vectors)) * dtype.itemsize + 2**16

    def take(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(rows [count, width] that the stage before has made of the next pass, the pass's vectors), which are
        there until this stage hands on. Raises `RuntimeError` if a stage is gone."""
        if self._gather.links:
            self._receive(0, self._gather.stage - 1, self._passed, self._passed + 1 - self._gather.stages)
        self._gather.reach(self._gather.stage - 1, self._passed + 1)
        place = self._passed % self._gather.stages
        rows = self._rows[place, : count * self._width].view(count, self._width)
        return rows, None if self._vectors is None else self._vectors[place, :count]

    def hand_on(self, rows: torch.Tensor, vectors: torch.Tensor | None = None) -> None:
        """Let the next stage have what this one has made of the next pass; `vectors`: in the first stage."""
        place = self._passed % self._gather.stages
        self._rows[place, : rows.numel()].view(rows.shape).copy_(rows)
        if vectors is not None and self._vectors is not None:
            self._vectors[place, : len(vectors)] = vectors
        self._passed += 1
        self._gather.arrive()
        if self._gather.links:
            self._send(place, rows)

    def _send(self, place: int, rows: torch.Tensor) -> None:
        """Let the next stage, on another machine, have the rows that lie at a place, and the pass's vectors."""
        gather = self._gather
        counts = [rows.nbytes]
        if self._vectors is not None and gather.stage < gather.stages - 1:
            counts.append(self._vectors[place, : len(rows)].nbytes)
        gone = (OSError,) if gather.stage == 0 else ()
        with suppress(*gone):  # who watches the stages says which one is gone, and how
            for regions, count in zip(self._regions, counts, strict=False):
                gather.links[0].send_bytes(regions[gather.rank][place, :count].numpy().data)

    def _receive(self, link: int, sender: int, passed: int, read: int) -> None:
        """Write what a stage on another machine has made of the next pass where this machine's ranks look for it, once
        all of these have handed on `read` passes."""
        gather, place = self._gather, passed % self._gather.stages
        for rank in range(gather.size):
            gather.reach(gather.stage, read, rank)
        for regions in self._regions if gather.stage else self._regions[:1]:
            count = gather.links[link].recv_bytes_into(regions[0][place].numpy())
            for other in regions[1:]:
                other[place, :count] = regions[0][place, :count]
        for rank in range(gather.size):
            gather.arrive(sender, rank)

    def _read(self, link: int) -> None:
        """In the first stage: pass on what a stage makes, to the next one or, of the last one, to `collect`."""
        links, passed = self._gather.links, 0
        # a stage is gone, or all is over
        with torch.inference_mode(), suppress(OSError, EOFError, RuntimeError):
            while link + 1 < len(links):
                links[link + 1].send_bytes(links[link].recv_bytes())
            while True:
                self._receive(link, self._gather.stages - 1, passed, passed + 1)
                passed += 1

    def collect(self, count: int, width: int) -> torch.Tensor:
        """Hidden rows [count, width] that the last stage has made of the oldest pass that the first one, which this is,
        has not got back yet. They are there as long as that pass is. Raises `RuntimeError` if a stage is gone."""
        place = self._collected % self._gather.stages
        self._collected += 1
        self._gather.reach(self._gather.stages - 1, self._collected)
        return self._rows[place, : count * width].view(count, width)


class StagedRunner(ModelRunner):
    """A `ModelRunner` of one stage. Steps are launched by one thread and ended by one, which may be another."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend, *rest: Any, relay: StageRelay, **more: Any):
        super().__init__(model, backend, *rest, **more)
        assert isinstance(model.model, Decoder)
        self._decoder, self._relay = model.model, relay
        self._turn = threading.Lock()  # the cores compute one thing at a time
        self._begun: deque[tuple[StepContext, StepInputs]] = deque()
        """Passes that another rank of the first stage is to end."""

    def launch(self, batch: Batch) -> StepHandle:
        with self._turn:
            return super().launch(batch)

    def forward(self, inputs: StepInputs, traces: Traces | None = None) -> torch.Tensor:
        """The hidden rows that this stage has handed on."""
        context, made = self._begin(inputs)
        if self._decoder.plan.run.start == 0:
            self._begun.append((context, inputs))
        return made

    def end(self) -> None:
        """Make this rank's part of the logits of the oldest pass that it has begun."""
        if self._begun:
            context, inputs = self._begun.popleft()
            wanted = _wanted(inputs)
            count = len(inputs.ids) if wanted is None else len(wanted)
            self._logits(self._relay.collect(count, self._decoder.config.width), context, wanted is None)

    def _begin(self, inputs: StepInputs) -> tuple[StepContext, torch.Tensor]:
        """Run this stage's layers in a pass, and hand on what they give."""
        context, ids, rows = self.context_of(inputs), inputs.ids, _wanted(inputs)
        first = self._decoder.plan.run.start == 0
        h, vectors = self._decoder.embedded(ids, context) if first else self._relay.take(len(ids))
        made = self._decoder.run_layers(h, vectors, context, rows)
        self._relay.hand_on(made, vectors if first else None)
        return context, made

    def _run(self, pending: PendingStep, masks: StepMasks | None) -> None:
        """Begin the step's pass."""
        rows = pending.batch.rows
        self._write_adapters([row.adapter_slot for row in rows])
        step = self.buffers.build(pending.batch, self.last_token)
        step = replace(step, sample_logits=step.sample_logits.copy())  # the next step is made in the same memory
        pictured = any(row.spec.images for row in rows)
        inputs, pending.failed = inputs_of(step, rows, self.image_store if pictured else None)
        assert self.ranks is not None
        with self.ranks.computing(inputs):
            context, _ = self._begin(inputs)
        wanted = _wanted(inputs)
        count = len(inputs.ids) if wanted is None else len(wanted)
        pending.rest = partial(self._end, pending, step, masks, context, count, wanted is None)

    def _end(
        self, pending: PendingStep, step: Step, masks: StepMasks | None, context: StepContext, count: int, every: bool
    ) -> None:
        """End the step's pass, of which `count` rows are wanted, `every` one of its tokens or some."""
        try:
            x = self._relay.collect(count, self._decoder.config.width)
        except RuntimeError as error:  # whoever keeps it would keep shared memory
            traceback.clear_frames(error.__traceback__)
            del context
            raise
        with self._turn, torch.inference_mode(), self.cores.step(torch_alone=self._decoder.compiled, small=self.small):
            assert self.ranks is not None
            with self.ranks.computing(None):
                logits = self._logits(x, context, every)
            self._conclude(pending, step, logits, masks)

    def _logits(self, x: torch.Tensor, context: StepContext, every: bool) -> torch.Tensor:
        return self._decoder.logits(self._decoder.projected(x, context, None if every else context.positions), context)

    def _let_go(self) -> None:
        super()._let_go()
        del self._decoder, self._relay


def _wanted(inputs: StepInputs) -> torch.Tensor | None:
    """Rows whose logits are wanted; None: all."""
    return None if len(inputs.logit_rows) == len(inputs.ids) else inputs.logit_rows


def runner_of(
    model: LoadedModel, max_num_batched_tokens: int, gather: Gather | None, room: int
) -> tuple[Callable[..., ModelRunner], SharedPools | None]:
    """(`ModelRunner`, or what makes one of a stage in its place; the memory for its caches, of `room` bytes, where
    several processes of a CPU have a part of the model each). All of them call this once.

    Stages cut the same memory, each for all layers of the model: of the caches of others nothing is written to.
    """
    if gather is None:
        return ModelRunner, None
    if gather.stages == 1:
        return ModelRunner, gather.pools(room)
    assert isinstance(model.model, Decoder)
    assert isinstance(gather, SharedGather)
    sizes = max_num_batched_tokens, *model.model.carried, model.dtype
    memory = gather.pools(room + StageRelay.nbytes(gather.stages, *sizes))
    return partial(StagedRunner, relay=StageRelay(gather, memory, *sizes)), memory

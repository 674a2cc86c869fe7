"""The runner of one pipeline stage, a process that has some of a model's layers. Passes go through all stages.

The first stage, the engine's own process, begins and ends each pass: it embeds and runs its layers, and when the last
stage has handed on hidden states, it computes logits from them and samples. Meanwhile it begins the next pass, of other
requests, so that all stages are busy.
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

# Hidden states on their way from stage to stage, through shared memory on a CPU. It is a ring of as many buffers as
# there are stages: a stage writes pass n into buffer n % stages. Stages on different machines each have such memory, of
# the same layout; between machines the first ranks send the rows by connections, and the receiver writes them into its
# machine's memory as the stage before would have done.


class StageRelay:
    """One stage's exchange with its neighbours. Every process makes it before it allocates anything else of `memory`,
    so that it lies at the same address in all."""

    def __init__(
        self, gather: SharedGather, memory: SharedPools, tokens: int, width: int, vectors: Sequence[int],
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        """`tokens`: the most of a pass. `width`: numbers that one token has between two stages. `vectors`: shape of a
        token's layer inputs (Gemma 3n), which all stages read; (): the model has none."""
        self._gather, self._width = gather, width
        self._rows = memory.empty((gather.stages, tokens * width), dtype)
        self._vectors = memory.empty((gather.stages, tokens, *vectors), dtype) if vectors else None
        self._passed = self._collected = 0
        """Passes that this stage has handed on, and that the first stage has collected."""
        self._regions: list[list[torch.Tensor]] = []
        """With links: bytes [stages, bytes] of the rows, and of the vectors, in the memory of each local rank."""
        if gather.links:
            sent = [self._rows] if self._vectors is None else [self._rows, self._vectors]
            self._regions = [[rank.view(gather.stages, -1) for rank in memory.of_all(own)] for own in sent]
        for index in range(len(gather.links) if gather.stage == 0 else 0):
            reader = threading.Thread(target=self._read, args=(index,), name="asyncengine-stage", daemon=True)
            gather.readers.append(reader)
            reader.start()

    @staticmethod
    def nbytes(size: int, tokens: int, width: int, vectors: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of the buffers of `size` stages."""
        return size * tokens * (width + math.prod(vectors) * bool(vectors)) * dtype.itemsize + 2**16

    def take(self, count: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Wait for the next pass of the stage before: (its rows [count, width], the pass's layer inputs), valid until
        this stage hands on. Raises `RuntimeError` if a stage is gone."""
        if self._gather.links:
            self._receive(0, self._gather.stage - 1, self._passed, self._passed + 1 - self._gather.stages)
        self._gather.reach(self._gather.stage - 1, self._passed + 1)
        turn = self._passed % self._gather.stages
        rows = self._rows[turn, : count * self._width].view(count, self._width)
        return rows, None if self._vectors is None else self._vectors[turn, :count]

    def hand_on(self, rows: torch.Tensor, vectors: torch.Tensor | None = None) -> None:
        """Give the next stage this one's rows of the pass; the first stage gives its `vectors` to all others."""
        turn = self._passed % self._gather.stages
        self._rows[turn, : rows.numel()].view(rows.shape).copy_(rows)
        if vectors is not None and self._vectors is not None:
            self._vectors[turn, : len(vectors)] = vectors
        self._passed += 1
        self._gather.arrive()
        if self._gather.links:
            self._send(turn, rows)

    def _send(self, turn: int, rows: torch.Tensor) -> None:
        """Send the rows of buffer `turn`, and the pass's vectors, to the next stage on another machine."""
        gather = self._gather
        counts = [rows.nbytes]
        if self._vectors is not None and gather.stage < gather.stages - 1:
            counts.append(self._vectors[turn, : len(rows)].nbytes)
        gone = (OSError,) if gather.stage == 0 else ()
        with suppress(*gone):  # in the first stage `Ranks` watches the others, and reports which one is gone, and why
            for regions, count in zip(self._regions, counts, strict=False):
                gather.links[0].send_bytes(regions[gather.rank][turn, :count].numpy().data)

    def _receive(self, link: int, sender: int, passed: int, read: int) -> None:
        """Receive the next pass of a stage on another machine, and write it to this machine's ranks, once all of these
        have handed on `read` passes and no longer read the buffer."""
        gather, turn = self._gather, passed % self._gather.stages
        for rank in range(gather.size):
            gather.reach(gather.stage, read, rank)
        for regions in self._regions if gather.stage else self._regions[:1]:
            count = gather.links[link].recv_bytes_into(regions[0][turn].numpy())
            for other in regions[1:]:
                other[turn, :count] = regions[0][turn, :count]
        for rank in range(gather.size):
            gather.arrive(sender, rank)

    def _read(self, link: int) -> None:
        """In the first stage: forward the rows of one stage to the next one, or those of the last one to `collect`."""
        links, passed = self._gather.links, 0
        # errors mean that a stage is gone, or that the model is closed: either way this thread ends
        with torch.inference_mode(), suppress(OSError, EOFError, RuntimeError):
            while link + 1 < len(links):
                links[link + 1].send_bytes(links[link].recv_bytes())
            while True:
                self._receive(link, self._gather.stages - 1, passed, passed + 1)
                passed += 1

    def collect(self, count: int, width: int) -> torch.Tensor:
        """In the first stage: wait for the hidden rows [count, width] of the oldest pass that has not been collected.
        They are valid until that pass ends. Raises `RuntimeError` if a stage is gone."""
        turn = self._collected % self._gather.stages
        self._collected += 1
        self._gather.reach(self._gather.stages - 1, self._collected)
        return self._rows[turn, : count * width].view(count, width)


class StagedRunner(ModelRunner):
    """A `ModelRunner` of one stage. Steps are launched by one thread and ended by one, which may be another."""

    def __init__(self, model: LoadedModel, backend: AttentionBackend, *rest: Any, relay: StageRelay, **more: Any):
        super().__init__(model, backend, *rest, **more)
        assert isinstance(model.model, Decoder)
        self._decoder, self._relay = model.model, relay
        self._turn = threading.Lock()  # the cores compute one thing at a time
        self._begun: deque[tuple[StepContext, StepInputs]] = deque()
        """Passes that this rank has begun, if it is another rank of the first stage; rank 0 says when to end them."""

    def launch(self, batch: Batch) -> StepHandle:
        with self._turn:
            return super().launch(batch)

    def forward(self, inputs: StepInputs, traces: Traces | None = None) -> torch.Tensor:
        """The hidden rows that this stage has handed on."""
        context, hidden = self._begin(inputs)
        if self._decoder.plan.run.start == 0:
            self._begun.append((context, inputs))
        return hidden

    def end(self) -> None:
        """Compute this rank's shard of the logits of the oldest pass that it has begun."""
        if self._begun:
            context, inputs = self._begun.popleft()
            hidden = self._relay.collect(len(inputs.logit_rows), self._decoder.config.width)
            self._logits(hidden, context, _wanted(inputs) is None)

    def _begin(self, inputs: StepInputs) -> tuple[StepContext, torch.Tensor]:
        """Run this stage's layers in a pass, and hand on their output."""
        context, ids, rows = self.context_of(inputs), inputs.ids, _wanted(inputs)
        first = self._decoder.plan.run.start == 0
        stream, vectors = self._decoder.embedded(ids, context) if first else self._relay.take(len(ids))
        hidden = self._decoder.run_layers(stream, vectors, context, rows)
        self._relay.hand_on(hidden, vectors if first else None)
        return context, hidden

    def _run(self, pending: PendingStep, masks: StepMasks | None) -> None:
        """Begin the step's pass."""
        rows = pending.batch.rows
        self._write_adapters([row.adapter_slot for row in rows])
        step = self.buffers.build(pending.batch, self.last_token)
        step = replace(step, sample_logits=step.sample_logits.copy())  # the next step is built in the same memory
        pictured = any(row.spec.images for row in rows)
        inputs, pending.failed = inputs_of(step, rows, self.image_store if pictured else None)
        assert self.ranks is not None
        with self.ranks.computing(inputs):
            context, _ = self._begin(inputs)
        every = _wanted(inputs) is None
        pending.rest = partial(self._end, pending, step, masks, context, len(inputs.logit_rows), every)

    def _end(
        self, pending: PendingStep, step: Step, masks: StepMasks | None, context: StepContext, count: int, every: bool
    ) -> None:
        """End the step's pass, of which `count` rows are wanted, `every` one of its tokens or some."""
        try:
            x = self._relay.collect(count, self._decoder.config.width)
        except RuntimeError as error:  # a kept error would keep its frames' shared memory
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
    """(constructor of this process's runner; memory of `room` bytes for its caches, shared by the processes of a CPU,
    or None). Every process of a model calls this once.

    Each stage lays out the caches of all layers; those of other stages' layers are never written: they cost nothing."""
    if gather is None:
        return ModelRunner, None
    if gather.stages == 1:
        return ModelRunner, gather.pools(room)
    assert isinstance(model.model, Decoder)
    assert isinstance(gather, SharedGather)
    sizes = max_num_batched_tokens, *model.model.carried, model.dtype
    memory = gather.pools(room + StageRelay.nbytes(gather.stages, *sizes))
    return partial(StagedRunner, relay=StageRelay(gather, memory, *sizes)), memory

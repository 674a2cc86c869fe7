"""Running one batch of whole texts through an encoder. Implements `step.Executor`; keeps nothing between steps."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np
import torch

from asyncengine.config import EngineConfig
from asyncengine.device.cores import Cores
from asyncengine.device.memory import is_out_of_memory, release_cached
from asyncengine.device.transfer import Readback, copy_stream, on_device, upload
from asyncengine.layers.fused import MOST_TOKENS
from asyncengine.models.encoder import Encoder
from asyncengine.models.encoder_loading import LoadedEncoder
from asyncengine.models.progress import LoadProgress
from asyncengine.pooling.pool import NON_FINITE, Pooler, Span
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.runner.model_runner import OUT_OF_MEMORY, SMALL
from asyncengine.runner.pending import SplitStep
from asyncengine.sampling_params import SamplingParams
from asyncengine.stats import ThreadStats
from asyncengine.step import Batch, FinishedStep, Row, StepHandle, StepResult

logger = logging.getLogger("asyncengine")

_NARROW, _LONG_TEXT = 2**26, 513
"""Bytes of a model that may be narrow, and the tokens of a text that is long for the narrowest (`building`)."""


@dataclass(slots=True, eq=False)
class PendingVectors:
    """A `step.StepHandle` of a launched step of an encoder."""

    batch: Batch
    readback: Readback
    numbers: torch.Tensor
    """On the host once `readback` has arrived: hidden states [T, width], or scores [rows, labels]."""
    pooler: Pooler | None
    """None: these are scores."""
    began: float = field(default_factory=time.perf_counter)

    @property
    def ready(self) -> bool:
        return self.readback.ready

    def wait(self) -> StepResult:
        self.readback.wait()
        rows = self.batch.rows
        result = StepResult(self.batch.step, [-1] * len(rows))
        if self.pooler is None:
            for index, scores in enumerate(self.numbers.float().numpy()):
                if np.isfinite(scores).all():
                    result.vectors[index] = scores
                else:
                    result.errors[index] = NON_FINITE
        else:
            self.pooler.read(rows, _spans(rows), self.numbers, result)
        result.seconds = time.perf_counter() - self.began
        return result


class EncoderRunner:
    """Holds the weights of one encoder. One step at a time, on any one thread."""

    num_pages, page_size, num_states = 2, 16, 0
    """No page is ever asked for; a cache without any is not to be had."""
    kv_bytes = state_bytes = 0
    no_speculation = "texts are given and none is written"
    step_costs = draft_costs = None
    windows: tuple[tuple[int, int], ...] = ()

    def __init__(self, loaded: LoadedEncoder, pooler: Pooler | None, cores: Cores | None = None) -> None:
        """`pooler`: None for a classifier, whose head gives scores."""
        self.cores = Cores(device=loaded.device) if cores is None else cores
        self.weights_bytes = loaded.weights_bytes
        self.fused, self.stored = loaded.fused, loaded.stored
        self._model: Encoder | None = loaded.model
        self._device = loaded.device
        self._copies = copy_stream(loaded.device)
        self._pooler = pooler
        self._small = loaded.weights_bytes <= SMALL
        self._compiled = loaded.model.unsteady is None

    def launch(self, batch: Batch) -> StepHandle:
        """Start one step. One that does not fit in memory is launched in halves; a text that does not fit alone ends
        with an error. Raising means the runner is broken."""
        try:
            return self._launch(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release_cached(self._device)  # not above: the error's traceback would hold what the step had taken
        if len(batch.rows) == 1:
            return FinishedStep(StepResult(batch.step, [-1], errors={0: OUT_OF_MEMORY}))
        half = len(batch.rows) // 2
        logger.warning("step %d does not fit in memory: its %d texts are halved", batch.step, len(batch.rows))
        first = self.launch(Batch(batch.step, batch.rows[:half]))
        return SplitStep(batch.step, (first, self.launch(Batch(batch.step, batch.rows[half:]))), half)

    def _launch(self, batch: Batch) -> PendingVectors:
        assert self._model is not None
        counts = [row.num_scheduled for row in batch.rows]
        tokens: list[int] = []
        for row in batch.rows:
            if row.start or len(row.tokens) != row.num_scheduled:
                raise ValueError(f"row of slot {row.slot}: a part of a text, and an encoder needs all of it")
            tokens += row.tokens
        with torch.inference_mode(), on_device(self._device), self._threads():
            ids = upload(np.array(tokens, dtype=np.int64), self._device)
            numbers = self._model.forward(ids, counts, self._segments(batch))
            if self._pooler is None:
                numbers = self._model.classify(numbers, counts)
            readback = Readback(self._copies)
            pending = PendingVectors(batch, readback, readback.fetch(numbers), self._pooler)
            readback.send()
        return pending

    def _segments(self, batch: Batch) -> torch.Tensor | None:
        """Token types: 1 from where the second text of a pair begins. None: there are no pairs."""
        begins = [0 if row.spec.pooled is None else row.spec.pooled.second for row in batch.rows]
        if not any(begins):
            return None
        types = [
            np.arange(row.num_scheduled) >= begin if begin else np.zeros(row.num_scheduled, dtype=bool)
            for row, begin in zip(batch.rows, begins, strict=True)
        ]
        return upload(np.concatenate(types).astype(np.int64), self._device)

    def _threads(self) -> AbstractContextManager[None]:
        return self.cores.step(torch_alone=self._compiled, small=self._small)

    def threads(self) -> ThreadStats:
        """What computes steps, from any thread."""
        return self.cores.stats

    def warm_up(self, most: int) -> None:
        """Run first steps, so that no request's step waits for a compiler. `most`: tokens of a text."""
        greedy = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0)
        long = MOST_TOKENS + 1 if self.weights_bytes > _NARROW else _LONG_TEXT
        for count in sorted({1, min(2, most), min(long, most)}):
            spec = RequestSpec(0, (0,) * count, greedy, count, pooled=Pooled(whole=True, every=True))
            self._launch(Batch(0, (Row(spec, 0, 0, count, [0] * count, False, [], True),))).wait()
        self.cores.forget()  # compiling is in what they took

    def close(self) -> None:
        """Let go of the weights. Idempotent."""
        if self._model is None:
            return
        self._model = self._pooler = None
        self.cores.close()
        if self._device.type != "cpu":  # Python does not know when memory is short there
            gc.collect()
            release_cached(self._device)


def build_encoder_runner(
    loaded: LoadedEncoder, config: EngineConfig, pooler: Pooler | None, cores: Cores, progress: LoadProgress
) -> EncoderRunner:
    """A runner that has run its first steps."""
    runner = EncoderRunner(loaded, pooler, cores)
    with progress:
        progress.stage("running a first step")
        runner.warm_up(loaded.max_model_len)
    return runner


def _spans(rows: tuple[Row, ...]) -> list[Span]:
    spans, end = [], 0
    for index, row in enumerate(rows):
        spans.append(Span(index, end, end + row.num_scheduled))
        end += row.num_scheduled
    return spans

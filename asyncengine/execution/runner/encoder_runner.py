"""Running one batch of whole texts through an encoder. Implements `seams.Executor`; keeps nothing between steps."""

from __future__ import annotations

import gc
import time
from itertools import accumulate, pairwise

import numpy as np
import torch

from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.memory import release_cached
from asyncengine.execution.device.transfer import Readback, copy_stream, is_plain_thread, on_device, upload
from asyncengine.execution.layers.recorded import GREEDY, MOST_TOKENS, first_lengths
from asyncengine.execution.models.encoder import Encoder
from asyncengine.execution.models.loading import LoadedEncoder
from asyncengine.execution.models.progress import LoadProgress
from asyncengine.execution.pooling.pool import Pooler, Span
from asyncengine.execution.runner.building import BuiltRunner
from asyncengine.execution.runner.model_runner import SMALL
from asyncengine.execution.runner.pending import PendingStep, launch_split
from asyncengine.request_spec import Pooled, RequestSpec
from asyncengine.seams import Executor, StepHandle
from asyncengine.stats import ThreadStats
from asyncengine.step import Batch, FinishedStep, Row, StepResult

_BRIEF = 2**30
"""Bytes of the layers' matrices times tokens of a brief step: some milliseconds."""


class EncoderRunner(Executor):
    """Holds the weights of one encoder. One step at a time, on any one thread."""

    num_pages, page_size, num_states, num_window_pages = 2, 16, 0, 0
    """Pages are never used, but the scheduler's cache needs at least one beside page 0."""
    attention_backend = "of whole texts"
    mtp = ranks = None
    windows: tuple[tuple[int, int], ...] = ()

    def __init__(self, loaded: LoadedEncoder, pooler: Pooler, cores: Cores, *, scores: bool) -> None:
        """`scores`: the model is a classifier, whose head gives each text one row of scores."""
        self.cores, self._scores = cores, scores
        self.weights_bytes, self.stored = loaded.weights_bytes, loaded.stored
        self._model: Encoder | None = loaded.model
        self._device = loaded.device
        self._copies = copy_stream(loaded.device)
        self._pooler: Pooler | None = pooler
        self._small = loaded.weights_bytes <= SMALL
        steady = loaded.device.type == "cpu" and loaded.model.recorded is not None
        products = sum(linear.nbytes for layer in loaded.model.layers for linear in layer.linears())
        self._brief = min(MOST_TOKENS, _BRIEF // products) if steady else 0
        self._compiled = loaded.model.unsteady is None

    def launch(self, batch: Batch) -> StepHandle:
        """Start one step, in halves if it does not fit in memory (`pending`). Exceptions mean the runner is broken."""
        return launch_split(batch, self._launch, self._device)

    def _launch(self, batch: Batch) -> StepHandle:
        began = time.perf_counter()
        assert self._model is not None
        assert self._pooler is not None
        counts = [row.num_scheduled for row in batch.rows]
        tokens: list[int] = []
        for row in batch.rows:
            if row.start or len(row.tokens) != row.num_scheduled:
                raise ValueError(f"row of slot {row.slot}: a part of a text, and an encoder needs all of it")
            tokens += row.tokens
        cores = self.cores.step(torch_alone=self._compiled, small=self._small)
        with torch.inference_mode(), on_device(self._device), cores:
            ids = upload(np.array(tokens, dtype=np.int64), self._device)
            numbers = self._model.forward(ids, counts, self._segments(batch))
            if self._scores:
                numbers, counts = self._model.classify(numbers, counts), [1] * len(counts)
            spans = [Span(row, *ends) for row, ends in enumerate(pairwise(accumulate(counts, initial=0)))]
            if self._copies is None:
                result = StepResult(batch.step, [-1] * len(batch.rows))
                self._pooler.read(batch.rows, spans, numbers, result)
                result.seconds = time.perf_counter() - began
                return FinishedStep(result)
            readback = Readback(self._copies)
            pending = PendingStep(batch, readback, False, pooling=(self._pooler, spans, readback.fetch(numbers)))
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

    @property
    def brief_tokens(self) -> int:
        return self._brief if is_plain_thread(self._device) else 0

    def is_brief(self, batch: Batch) -> bool:
        return batch.num_tokens <= self.brief_tokens

    def threads(self) -> ThreadStats:
        return self.cores.stats

    def warm_up(self, most: int) -> None:
        """Run first steps, so that no request's step waits for a compiler. `most`: tokens of a text."""
        for count in first_lengths(self.weights_bytes, most):
            spec = RequestSpec(0, (0,) * count, GREEDY, count, pooled=Pooled(whole=True, every=True))
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
    loaded: LoadedEncoder, pooler: Pooler, cores: Cores, progress: LoadProgress, *, scores: bool
) -> BuiltRunner:
    """A runner that has run its first steps."""
    runner = EncoderRunner(loaded, pooler, cores, scores=scores)
    with progress:
        progress.stage("running a first step")
        runner.warm_up(loaded.max_model_len)
    return BuiltRunner(
        runner, loaded.weights_bytes, 0, 0, loaded.fused, one_pool="nothing is kept of a text",
        no_speculation="texts are given and none is written", batch_variance=loaded.model.unsteady,
    )  # fmt: skip

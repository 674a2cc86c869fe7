"""Running one batch: flatten, forward, sample. Implements `seams.Executor` on CPU and CUDA alike."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import AttentionBackend
from asyncengine.execution.attention.flashinfer import FlashInferBackend
from asyncengine.execution.device.cores import Cores
from asyncengine.execution.device.memory import release_cached
from asyncengine.execution.device.transfer import Int64Array, Readback, copy_stream, is_plain_thread, on_device, upload
from asyncengine.execution.layers.recorded import MOST_TOKENS
from asyncengine.execution.layers.states import LoneTokens, StatePools, StateSegments, state_step
from asyncengine.execution.layers.step import CausalLM, StepContext, Traces
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import LoadedModel, expert_type
from asyncengine.execution.models.memory.caches import state_bytes
from asyncengine.execution.pooling.pool import Pooler
from asyncengine.execution.runner.draft_model import DraftModel, MTPGuesser
from asyncengine.execution.runner.graphs import Capture, DecodeGraphs
from asyncengine.execution.runner.model_memory import CpuPageMemory, ModelMemory
from asyncengine.execution.runner.pending import PendingStep, launch_split, rows_of_samples
from asyncengine.execution.runner.prompt_graphs import Pieces, PromptGraphs
from asyncengine.execution.runner.ranks import Ranks
from asyncengine.execution.runner.step_buffers import NEXT, SLOT, FlatStep, Step, StepBuffers
from asyncengine.execution.runner.step_inputs import ImageStore, StepInputs, inputs_of
from asyncengine.execution.sampling.masks import AwaitedToken, FilledMasks, MaskFiller, StepMasks, UnreadStep
from asyncengine.execution.sampling.sampler import Sampled, Sampler
from asyncengine.kernels.api import elsewhere
from asyncengine.lora.layers.slots import LoraLayers, StepAdapters
from asyncengine.options import WeightSource
from asyncengine.seams import Executor, Guesser, StepHandle
from asyncengine.stats import ThreadStats
from asyncengine.step import Batch, Row, StepResult

SMALL = 2**25
"""Bytes of weights up to which a step's loops are too short to gain from several threads."""
_BRIEF = 2**17
"""Most query-key pairs of a brief step of such a model: a few milliseconds of attention."""
_HELD = (
    "backend", "graphs", "_prompt_graphs", "_lora", "_unwritten", "sampler", "last_token", "_awaited",
    "_unfinished", "states", "image_store", "memory",
)  # fmt: skip
"""Attributes that refer to weights, adapters or device memory; deleted when the runner is closed."""


class ModelRunner(Executor):
    """Holds weights, KV memory and per-slot state of one model. One step at a time, on any one thread."""

    traced_parts = ("forward", "_run_pieces", "_replay", "_sample", "_keep")
    """Parts of a step that a profile shows (`engine.profiling`)."""

    def __init__(
        self, model: LoadedModel, backend: AttentionBackend, max_num_seqs: int, *,
        jump_forward: bool = True, lora: LoraLayers | None = None, cores: Cores | None = None, num_states: int = 0,
        pooler: Pooler | None = None, images: ImageStore | None = None, ranks: Ranks | None = None,
        draft: DraftModel | None = None,
    ) -> None:  # fmt: skip
        """`num_states`: slots for recurrent states, slot 0 included. `pooler`: of an embedding or scoring model, whose
        forward returns hidden states as logits. `images`: encoded pictures of a multimodal model. `ranks`: other
        processes that compute each pass together with this one. `draft`: for a model without an MTP head."""
        self.num_pages, self.num_states, self.page_size = backend.num_pages, num_states, backend.page_size
        self.num_window_pages = backend.num_window_pages
        self.windows = tuple(dict.fromkeys((each.window or 0, each.chunk or 0) for each in model.layers))
        self.kv_bytes, self.attention_backend = backend.kv_bytes, backend.name
        self.state_bytes = state_bytes(model.states, model.dtype) if num_states else 0
        self.weights_bytes = model.weights_bytes
        self.fused, self.stored, self.vocab_size = model.fused, model.stored, model.vocab_size
        self.pooler = pooler
        head = model.model if isinstance(model.model, Decoder) and model.model.mtp is not None else None
        self.mtp = None if head is None else MTPGuesser(self, head, max_num_seqs)
        self.draft_model: Guesser | None = self.mtp or draft
        """Fills in the drafts that rows leave open (`step.OPEN`)."""
        self.model: CausalLM | None = model.model
        self.backend, self.device = backend, model.device
        self._copies, self._used = copy_stream(model.device), list[torch.Tensor]()
        self.buffers = StepBuffers(max_num_seqs, backend.page_size, model.device)
        self._jump = jump_forward
        self.cores = Cores(device=model.device) if cores is None else cores
        self.memory = ModelMemory(model, self.page_memory, self.cores, images is not None, lora, ranks, draft)
        self._expert_type, self.small = expert_type(model.model), model.weights_bytes <= SMALL
        self.graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        # adapter slot -> weights to write before a row uses it: not at once, as there may be no memory for them yet
        self._unwritten: dict[int, Any] = {}
        self._lora, self.image_store = lora, images
        self.ranks = ranks
        self._masks = MaskFiller(model.vocab_size, model.device)
        self._unfinished: UnreadStep | None = None  # its reader launches the rest of the step after it
        self._awaited: dict[int, AwaitedToken] = {}  # slot -> token of the last constrained row launched for it
        self.sampler = Sampler(max_num_seqs, model.vocab_size, model.device)
        shape = model.states, num_states, model.dtype, model.device
        self.states = StatePools(*shape, padding=backend.graphs, shared=backend.shared) if num_states else None
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=model.device)
        self._inference = torch.inference_mode()  # making one takes longer than to begin and end it

    def launch(self, batch: Batch) -> StepHandle:
        """Start one step; nothing here waits for the device. The failure of a single row is reported in the result's
        `errors`; an exception means that the runner is broken.

        A step that does not fit in memory is launched in halves (`pending`), with the guesses made for it."""
        if self.draft_model is not None:
            batch = self.draft_model.guess(batch)
        if batch.copies:
            self.page_memory().copy(batch.copies)
        for swap in batch.swaps:
            self._unwritten[swap.slot] = swap.weights
        if batch.encode is not None and self.image_store is not None:
            with self._inference, on_device(self.device), self.cores.step():
                self.image_store.encode(batch.encode)
        return launch_split(batch, self.launch_once, self.device)

    def stop_guessing(self) -> None:
        """Compute steps without the model's MTP head from now on, as speculation is impossible."""
        self.draft_model = self.mtp = None

    @property
    def asynchronous(self) -> bool:
        return self.device.type != "cpu"

    def is_brief(self, batch: Batch) -> bool:
        """Whether `launch` takes milliseconds and waits for no other thread, so that the event loop's own thread may
        call it. On a CPU that is a short step of a small model."""
        if batch.swaps or batch.encode is not None or elsewhere or self.ranks is not None:
            return False  # while kernels are compiled by other processes, a step may wait for one
        if any((row.drafts and row.awaits_drafts) or row.spec.one_by_one for row in batch.rows):
            return False  # guesses take long, and so may the caller's own functions
        if any(row.grammar is not None for row in batch.rows) and not self._masks_later(batch.rows):
            return False
        if self.asynchronous:
            return is_plain_thread(self.device)
        if not self.small or self.model is None or not self.model.compiled:
            return False
        pairs = sum(row.num_scheduled * (row.start + row.num_scheduled) for row in batch.rows)
        return batch.num_tokens <= MOST_TOKENS and pairs <= _BRIEF

    def _masks_later(self, rows: Sequence[Row]) -> bool:
        """Whether a launch of these rows, some of which have masks, does not wait for the masks: the rest of the step
        is then launched by the reader of the step before. It needs a graph for the step and for processed rows, and no
        other step whose rest is still to be launched."""
        if self.graphs is None or self.graphs.processed is None or self._unfinished is not None:
            return False
        if any(row.spec.params.logprobs or (row.state is not None and row.state.saves) for row in rows):
            return False
        return len(rows) <= self.graphs.sizes[-1] and all(row.num_scheduled == 1 and row.samples for row in rows)

    def prepare_update(self, weights: WeightSource | None, config: EngineConfig, partial: bool) -> Callable[[], None]:
        return self.memory.prepare_update(weights, config, partial)

    def prepare_release(self, weights: bool, cache: bool) -> Callable[[], None]:
        return self.memory.prepare_release(weights, cache)

    def page_memory(self) -> CpuPageMemory:
        """Pages and states as bytes, for a store of prefixes. On a CPU."""
        pools, layout = self.backend.page_pools(), f"{self.backend.name} {self.page_size}"
        return CpuPageMemory(pools, self.states, layout, self.backend.shared)

    def threads(self) -> ThreadStats:
        return self.cores.stats

    def profile_run(self, batch: Batch) -> StepResult:
        """Run one whole step, to measure it. Raises `torch.OutOfMemoryError` if it does not fit."""
        return self.launch_once(batch).wait()

    def launch_once(self, batch: Batch) -> PendingStep:
        if self._unfinished is not None:
            self._unfinished.wait()
        pending = PendingStep(batch, Readback(self._copies, self._used), self._jump)
        # torch's own operators do little beside compiled kernels, and their idle threads would spin on the cores of
        # the kernels' helpers
        assert self.model is not None
        cores = self.cores.step(torch_alone=self.model.compiled, small=self.small)
        with self._inference, on_device(self.device), cores:
            masks = self._masks.start(batch, self._awaited)
            if self.graphs is None or not self._replay(pending, masks, self.graphs):
                self._run(pending, masks)
                pending.readback.send()
        return pending

    def _run(self, pending: PendingStep, masks: StepMasks | None) -> None:
        batch = pending.batch
        step: Step | FlatStep
        if self._unwritten:
            self._write_adapters([row.adapter_slot for row in batch.rows])
        pictured = self.image_store is not None and any(row.spec.images for row in batch.rows)
        if not pictured and self._prompt_graphs is not None and self._prompt_graphs.hold(batch):
            step, logits = self._run_pieces(batch, self._prompt_graphs)
        else:
            step = self.buffers.build(batch, self.last_token)
            params_of = [row.spec.params for row in batch.rows]
            traced = [params for params in params_of if params.traced_from is not None or params.steering_vectors]
            if traced:
                routed = any(params.return_routed_experts for params in traced)
                layers = {layer for params in traced for layer in params.return_hidden_states}
                pending.traces = Traces(layers, [] if routed else None, self._expert_type)
            inputs, pending.failed = inputs_of(step, batch.rows, self.image_store if pictured else None)
            if pending.traces is not None:
                pending.traces.steer(batch.rows, inputs.view.qo_indptr.tolist())
            with nullcontext() if self.ranks is None else self.ranks.computing(inputs):
                forward = self.forward if self.mtp is None else partial(self.mtp.forward, batch.rows)
                logits = forward(inputs, pending.traces)
        self._conclude(pending, step, logits, masks)

    def _conclude(
        self, pending: PendingStep, step: Step | FlatStep, logits: torch.Tensor, masks: StepMasks | None
    ) -> None:
        """Pool, sample and score as the step's rows ask, from its logits [N, vocab]."""
        if self.pooler is not None:
            pending.pooling = self.pooler, step.pool_spans, pending.readback.fetch(logits)
        sampled = None
        if step.sampling:
            pending.sampling = step.sampling
            every = len(step.sample_logits) == logits.shape[0]
            chosen = logits if every else logits[upload(step.sample_logits, self.device)]
            sampled = self._sample(pending, chosen, masks)
        for index, first, last in step.prompt_spans:
            pending.score_prompt(index, logits[first:last])
        if sampled is not None:
            self._keep(pending, sampled)

    def _replay(self, pending: PendingStep, masks: StepMasks | None, graphs: DecodeGraphs) -> bool:
        """Run the step as a graph. False: no graph can run it, and nothing was done."""
        rows = pending.batch.rows
        if self.image_store is not None and self.image_store.axes and any(row.spec.images for row in rows):
            return False  # graphs have positions of one axis
        step = self.buffers.decodes(rows) if 0 < len(rows) <= graphs.sizes[-1] else None
        if step is None:
            return False
        self._write_adapters(step.adapters)
        slots, positions = step.numbers[SLOT], step.numbers[NEXT]
        processed, scored = self.sampler.begin(rows, slots, positions)
        if masks is not None:
            constrained = [index for index, row in enumerate(rows) if row.grammar is not None]
            processed = np.union1d(processed, constrained)
        logits = graphs.run(step)
        if logits is None:
            return False
        pending.sampling, pending.sample_rows = range(len(rows)), rows
        before: UnreadStep | None = None
        if graphs.processed is None:
            self._keep(pending, self._sample(pending, logits, masks))
        else:
            finish = partial(self._choose_and_read, pending, graphs, logits, step.numbers, processed, scored, masks)
            before = None if masks is None or scored.size else masks.unread
            if before is None:
                finish()
        pending.readback.send()
        if before is not None:  # matchers wait for the tokens of the step before, and this thread should not
            self._unfinished = before
            before.then(partial(self._finish, pending, finish))
        return True

    def _finish(self, pending: PendingStep, finish: Callable[[], None]) -> None:
        """Launch the rest of a step: its processed rows, and the copy of all tokens to the host. On any thread."""

        def run() -> None:
            try:
                with torch.inference_mode(), on_device(self.device):
                    finish()
                    pending.readback.send()
            except BaseException as error:
                pending.failure = error
            self._unfinished = None

        if is_plain_thread(self.device):
            run()
        else:  # the reading thread has entered a stream, or a mode of torch, that must not apply to the step
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    def _choose_and_read(
        self, pending: PendingStep, graphs: DecodeGraphs, logits: torch.Tensor, numbers: Int64Array,
        processed: Int64Array, scored: Int64Array, masks: StepMasks | None,
    ) -> None:  # fmt: skip
        """Sample again for the rows with processed logits of a graph's step, and begin to read all tokens."""
        rows = pending.sample_rows
        try:
            if processed.size:
                assert graphs.processed is not None
                pending.filled = graphs.processed.choose(rows, numbers, processed, masks)
            changed = None if graphs.processed is None else graphs.processed.changed
            drawn = Sampled(graphs.sampled, graphs.sampled, processed.tolist(), changed)
            pending.score(scored.tolist(), logits, drawn, self.sampler)
            pending.keep_choices(drawn)
            arrived = pending.readback.fetch_now(graphs.sampled)
            pending.sampled = Sampled(*graphs.split(arrived, len(rows)), processed.tolist())
        except BaseException:  # out of memory: the step is launched again, and must find the tokens it began with
            graphs.restore()
            for slot in numbers[SLOT, processed].tolist():  # their tokens may or may not have been counted by now
                self.sampler.forget(slot)
            raise
        self._settle(pending)

    def _write_adapters(self, adapters: Sequence[int]) -> None:
        """Write the adapters that these slots wait for."""
        if self._lora is None:
            return
        for slot in [slot for slot in self._unwritten if slot in adapters]:
            self._lora.write(slot, self._unwritten[slot])
            if self.ranks is not None:
                self.ranks.send("adapter", slot, self._unwritten[slot])
            del self._unwritten[slot]

    def forward(self, inputs: StepInputs, traces: Traces | None = None) -> torch.Tensor:
        """Logits [N, vocab] of a pass. `traces`: see `StepContext`. To be called within the runner's `cores`."""
        assert self.model is not None
        return self.model.forward(inputs.ids, self.context_of(inputs, traces), inputs.logit_rows)

    def context_of(self, inputs: StepInputs, traces: Traces | None = None) -> StepContext:
        """Plan the backend for a pass, and return the pass's context."""
        view, _, positions, rows, slots, segments, pictures = inputs
        self.backend.plan(view)
        adapters = (None, None) if self._lora is None else self._lora.begin(slots, view.counts, rows)
        traced = () if traces is None else (traces.experts, traces)
        return self._context(positions, adapters, segments, pictures, *traced)

    def _context(
        self, positions: torch.Tensor, adapters: StepAdapters, moves: StateSegments | LoneTokens | None, *more: Any
    ) -> StepContext:
        states = None if self.states is None or moves is None else state_step(self.states, moves, self.device)
        return StepContext(positions, self.backend, *adapters, states, *more)

    def _run_pieces(self, batch: Batch, graphs: PromptGraphs) -> tuple[FlatStep, torch.Tensor]:
        """Run a step with prompts as graphs in pieces. Returns the step, and logits [N, vocab] of its wanted rows."""
        assert isinstance(self.model, Decoder)
        step = self.buffers.flatten(batch.rows)
        hidden = graphs.run(step)
        adapters: StepAdapters = (None, None)
        if not step.wanted:
            hidden = hidden[:0]
        elif len(step.wanted) < len(hidden) or any(step.adapters):
            wanted = upload(np.array(step.wanted, dtype=np.int64), self.device)
            hidden = hidden.index_select(0, wanted)
            if self._lora is not None:
                adapters = self._lora.begin(step.adapters, step.counts, wanted)
        return step, self.model.logits(hidden, StepContext(self.last_token, self.backend, *adapters))

    def _compute(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, adapters: StepAdapters,
        moves: StateSegments | LoneTokens | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert self.model is not None
        return self.model.forward(input_ids, self._context(positions, adapters, moves), logit_rows)

    def use_graphs(
        self, sizes: Sequence[int], capture: Capture, report: Callable[[], None] = lambda: None
    ) -> DecodeGraphs:
        """Run decode steps of up to the largest of `sizes` rows as graphs, captured now; `report` after each."""
        with torch.inference_mode(), on_device(self.device):
            backend, slots = cast(FlashInferBackend, self.backend), len(self.last_token) - 1
            graphs = DecodeGraphs(
                self._compute, backend, self._lora, sizes, slots, capture, self.sampler, self.num_states
            )
            graphs.capture_all(report)
        self.graphs, self.last_token = graphs, graphs.last_token
        self._masks.threaded = graphs.processed is None
        return graphs

    def use_prompt_graphs(
        self, sizes: Sequence[int], capture: Pieces, report: Callable[[], None] = lambda: None
    ) -> PromptGraphs:
        """Run steps with prompts of up to the largest of `sizes` tokens as graphs in pieces, captured now; `report`
        after each. To be called after `use_graphs`, and only if `may_be_cut`."""
        assert isinstance(self.model, Decoder)
        backend = cast(FlashInferBackend, self.backend)
        graphs = PromptGraphs(self.model, backend, self.last_token, sizes, capture, self._lora)
        with torch.inference_mode(), on_device(self.device):
            graphs.capture_all(report)
        self._prompt_graphs = graphs
        return graphs

    def close(self) -> None:
        """Free KV memory and let go of the weights and of everything on the device. Idempotent."""
        if self.model is None:
            return
        try:
            if self.draft_model is not None:
                self.draft_model.close()
            self._let_go()
        finally:
            self.cores.close()
            if self.ranks is not None:
                self.ranks.close()
        if self.device.type != "cpu":  # Python does not know when memory is short there
            gc.collect()  # fused modules refer to themselves
            release_cached(self.device)

    def _let_go(self) -> None:
        for graphs in (self.graphs, self._prompt_graphs):
            if graphs is not None:
                graphs.close()
        self.backend.close()
        self._masks.close()
        if self._lora is not None:
            self._lora.close()
        assert self.model is not None
        self.model.unbind()
        self.model = None
        for name in _HELD:
            delattr(self, name)

    def _sample(self, pending: PendingStep, logits: torch.Tensor, masks: StepMasks | None) -> torch.Tensor:
        """Sample a token for each sampling row: int64 [S] on the device, from logits [S, vocab]. Scores, masks and
        copies to the host go into `pending`."""
        rows = rows_of_samples(pending.batch, pending.sampling)
        filled = FilledMasks.none() if masks is None else masks.wait(pending.sampling)
        sampled = self.sampler.sample(rows, logits, filled, self.last_token)
        pending.filled, pending.sample_rows = filled, rows
        pending.sampled = sampled.fetch(pending.readback)
        wanted = [index for index, row in enumerate(rows) if row.spec.params.logprobs]
        pending.score(wanted, logits, sampled, self.sampler)
        pending.keep_choices(sampled)
        return sampled.tokens

    def _keep(self, pending: PendingStep, tokens: torch.Tensor) -> None:
        """Store each slot's last token for later steps. It comes last, when this step needs no more memory: a step that
        runs out of memory is launched again, and must find what was there before it."""
        slots = [pending.batch.rows[index].slot for index in pending.sampling]
        # a matcher may replace a token later: rows that were launched with the sampled one are discarded then
        if self.device.type == "cpu":
            last = self.last_token.numpy()
            for slot, token in zip(slots, tokens.tolist(), strict=True):  # with drafts, a row's last sample wins
                last[slot] = token
        else:
            self.last_token.index_copy_(0, upload(np.array(slots, dtype=np.int64), self.device), tokens)
        self._settle(pending)

    def _settle(self, pending: PendingStep) -> None:
        """Note which of the step's tokens wait for their matchers, and drop the counts of discarded ones."""
        rows, sampling, filled = pending.batch.rows, pending.sampling, pending.filled
        for index in filled.discarded:  # penalties have counted a token that is not part of the output
            self.sampler.forget(rows[sampling[index]].slot)
        for index in filled.samples:
            token = AwaitedToken(pending)
            pending.awaited[index] = self._awaited[rows[sampling[index]].slot] = token

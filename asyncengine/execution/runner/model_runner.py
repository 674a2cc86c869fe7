"""Running one batch: flatten, forward, sample. Implements `step.Executor` on CPU and CUDA alike."""

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
from asyncengine.execution.runner.pending import PendingStep, every_place, launch_in_parts
from asyncengine.execution.runner.prompt_graphs import Pieces, PromptGraphs, may_be_cut
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
"""Bytes of weights up to which the loops of a step are too short to be shared among threads."""
_BRIEF = 2**17
"""Pairs of a query and a key in a step of such a model that takes a few milliseconds."""
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
        """`num_states`: slots for recurrent states, slot 0 included. `pooler`: of a model that is asked for vectors,
        whose logits are hidden states. `images`: of one that reads pictures. `ranks`: other processes that compute its
        passes with this one. `draft`: guesses for it, if it has no head that does."""
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
        self.draft_model: Guesser | None = self.mtp or draft  # it makes guesses that are left open
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
        self._unwritten: dict[int, Any] = {}  # by adapter slot, what no row has used yet: it may not fit in memory
        self._lora, self.image_store = lora, images
        self.ranks = ranks
        self._masks = MaskFiller(model.vocab_size, model.device)
        self._unfinished: UnreadStep | None = None  # whose reader launches what is left of the step behind it
        self._awaited: dict[int, AwaitedToken] = {}  # by slot, of the last constrained row that was launched for it
        self.sampler = Sampler(max_num_seqs, model.vocab_size, model.device)
        kept = model.states, num_states, model.dtype, model.device
        self.states = StatePools(*kept, padding=backend.graphs, shared=backend.shared) if num_states else None
        self.last_token = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=model.device)
        self._inference = torch.inference_mode()  # making one takes longer than to begin and end it

    def launch(self, batch: Batch) -> StepHandle:
        """Start one step; nothing here waits for the device. A row that fails by itself is reported in `errors`;
        raising means the runner is broken.

        A step that does not fit in memory is launched in parts (`pending`), with the guesses that were made for it.
        """
        if self.draft_model is not None:
            batch = self.draft_model.guess(batch)
        if batch.copies:
            self.page_memory().copy(batch.copies)
        for swap in batch.swaps:
            self._unwritten[swap.slot] = swap.weights
        if batch.encode is not None and self.image_store is not None:
            with self._inference, on_device(self.device), self.cores.step():
                self.image_store.encode(batch.encode)
        return launch_in_parts(batch, self.launch_part, self.device)

    def stop_guessing(self) -> None:
        """Compute steps without the model's own head, as nothing can be guessed."""
        self.draft_model = self.mtp = None

    @property
    def asynchronous(self) -> bool:
        return self.device.type != "cpu"

    def is_brief(self, batch: Batch) -> bool:
        """True: `launch` takes milliseconds of one thread, which waits for no other: that of the event loop may be the
        one. Where the device is the CPU that is a short step of a small model."""
        if batch.swaps or batch.encode is not None or elsewhere or self.ranks is not None:
            return False  # while kernels are compiled by other processes, a step may wait for one
        if any((row.drafts and row.awaits_drafts) or row.spec.one_by_one for row in batch.rows):
            return False  # guesses take long, and who knows what the caller's functions do
        if any(row.grammar is not None for row in batch.rows) and not self._masks_later(batch.rows):
            return False
        if self.asynchronous:
            return is_plain_thread(self.device)
        if not self.small or self.model is None or not self.model.compiled:
            return False
        pairs = sum(row.num_scheduled * (row.start + row.num_scheduled) for row in batch.rows)
        return batch.num_tokens <= MOST_TOKENS and pairs <= _BRIEF

    def _masks_later(self, rows: Sequence[Row]) -> bool:
        """Whether a launch does not wait for the masks of these rows, some of which have one: a graph's forward does
        not, and nothing of another step is left to be launched."""
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
        """Run one whole step, to see what it takes. Raises `torch.OutOfMemoryError` if it does not fit."""
        return self.launch_part(batch).wait()

    def launch_part(self, batch: Batch) -> PendingStep:
        if self._unfinished is not None:
            self._unfinished.wait()
        pending = PendingStep(batch, Readback(self._copies, self._used), self._jump)
        # what torch computes beside kernels is little, and its threads wait where the kernels' helpers should run
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
            asked = [each for each in params_of if each.traced_from is not None or each.steering_vectors]
            if asked:
                routed = any(params.return_routed_experts for params in asked)
                layers = {layer for params in asked for layer in params.return_hidden_states}
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
        """Make of a step's logits all that was asked for."""
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
        """Run the step as a graph; False: none holds it, and nothing was done."""
        rows = pending.batch.rows
        if self.image_store is not None and self.image_store.axes and any(row.spec.images for row in rows):
            return False  # positions of one axis are all that a graph has
        step = self.buffers.decodes(rows) if 0 < len(rows) <= graphs.sizes[-1] else None
        if step is None:
            return False
        self._write_adapters(step.adapters)
        slots, positions = step.numbers[SLOT], step.numbers[NEXT]
        processed, scored = self.sampler.begin(rows, slots, positions)
        if masks is not None:
            constrained = [place for place, row in enumerate(rows) if row.grammar is not None]
            processed = np.union1d(processed, constrained)
        logits = graphs.run(step)
        if logits is None:
            return False
        pending.sampling, pending.places = range(len(rows)), rows
        before: UnreadStep | None = None
        if graphs.processed is None:
            self._keep(pending, self._sample(pending, logits, masks))
        else:
            finish = partial(self._choose_and_read, pending, graphs, logits, step.numbers, processed, scored, masks)
            before = None if masks is None or scored.size else masks.unread
            if before is None:
                finish()
        pending.readback.send()
        if before is not None:  # matchers wait for the tokens of the step before: this thread need not
            self._unfinished = before
            before.then(partial(self._finish, pending, finish))
        return True

    def _finish(self, pending: PendingStep, finish: Callable[[], None]) -> None:
        """Launch the rest of a step, on any thread."""

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
        else:  # whoever reads has entered a stream, or a mode of torch, since the step was launched
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()

    def _choose_and_read(
        self, pending: PendingStep, graphs: DecodeGraphs, logits: torch.Tensor, numbers: Int64Array,
        processed: Int64Array, scored: Int64Array, masks: StepMasks | None,
    ) -> None:  # fmt: skip
        """Choose for the rows of a graph's step whose logits are processed, and have all tokens read."""
        rows = pending.places
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
        except BaseException:  # for want of memory: the step is launched again, with the tokens it had
            graphs.restore()
            for slot in numbers[SLOT, processed].tolist():  # who knows whether tokens have been counted
                self.sampler.forget(slot)
            raise
        self._settle(pending)

    def _write_adapters(self, adapters: Sequence[int]) -> None:
        """Put into their slots what these rows are the first to use."""
        if self._lora is None:
            return
        for slot in [slot for slot in self._unwritten if slot in adapters]:
            self._lora.write(slot, self._unwritten[slot])
            if self.ranks is not None:
                self.ranks.send("adapter", slot, self._unwritten[slot])
            del self._unwritten[slot]

    def forward(self, inputs: StepInputs, traces: Traces | None = None) -> torch.Tensor:
        """Logits [N, vocab] of a pass. `traces`: see `StepContext`. Within the runner's `cores`."""
        assert self.model is not None
        return self.model.forward(inputs.ids, self.context_of(inputs, traces), inputs.logit_rows)

    def context_of(self, inputs: StepInputs, traces: Traces | None = None) -> StepContext:
        """The context of a pass, for which the backend is planned."""
        view, _, positions, rows, slots, segments, pictures = inputs
        self.backend.plan(view)
        own = (None, None) if self._lora is None else self._lora.begin(slots, view.counts, rows)
        return self._context(positions, own, segments, pictures, *(() if traces is None else (traces.experts, traces)))

    def _context(
        self, positions: torch.Tensor, adapters: StepAdapters, moves: StateSegments | LoneTokens | None, *more: Any
    ) -> StepContext:
        states = None if self.states is None or moves is None else state_step(self.states, moves, self.device)
        return StepContext(positions, self.backend, *adapters, states, *more)

    def _run_pieces(self, batch: Batch, graphs: PromptGraphs) -> tuple[FlatStep, torch.Tensor]:
        """The step, and logits [N, vocab] of its wanted rows."""
        assert isinstance(self.model, Decoder)
        step = self.buffers.flatten(batch.rows)
        hidden = graphs.run(step)
        own: StepAdapters = (None, None)
        if not step.wanted:
            hidden = hidden[:0]
        elif len(step.wanted) < len(hidden) or any(step.adapters):
            wanted = upload(np.array(step.wanted, dtype=np.int64), self.device)
            hidden = hidden.index_select(0, wanted)
            if self._lora is not None:
                own = self._lora.begin(step.adapters, step.counts, wanted)
        return step, self.model.logits(hidden, StepContext(self.last_token, self.backend, *own))

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

    @property
    def may_cut(self) -> bool:
        """Whether there can be graphs for steps with prompts."""
        return may_be_cut(self.model, self.backend)

    def use_prompt_graphs(
        self, sizes: Sequence[int], capture: Pieces, report: Callable[[], None] = lambda: None
    ) -> PromptGraphs:
        """Run steps with prompts of up to the largest of `sizes` tokens as graphs in pieces, captured now; `report`
        after each. Graphs of decode steps are there already, and it `may_cut`."""
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
        """int64 tokens of the sampling rows, from the logits of each, on the device. Everything that is made of them
        goes into `pending`."""
        rows = every_place(pending.batch, pending.sampling)
        filled = FilledMasks.none() if masks is None else masks.wait(pending.sampling)
        sampled = self.sampler.sample(rows, logits, filled, self.last_token)
        pending.filled, pending.places = filled, rows
        pending.sampled = sampled.fetch(pending.readback)
        wanted = [place for place, row in enumerate(rows) if row.spec.params.logprobs]
        pending.score(wanted, logits, sampled, self.sampler)
        pending.keep_choices(sampled)
        return sampled.tokens

    def _keep(self, pending: PendingStep, tokens: torch.Tensor) -> None:
        """Store the state that later steps build on, once all memory for this one is taken: a step that is launched
        again must find what was there before it."""
        slots = [pending.batch.rows[index].slot for index in pending.sampling]
        # what a matcher puts in the place of a token is not here: rows launched for this one are discarded then
        if self.device.type == "cpu":
            last = self.last_token.numpy()
            for slot, token in zip(slots, tokens.tolist(), strict=True):  # a row's last one stands
                last[slot] = token
        else:
            self.last_token.index_copy_(0, upload(np.array(slots, dtype=np.int64), self.device), tokens)
        self._settle(pending)

    def _settle(self, pending: PendingStep) -> None:
        """Know of what matchers have to say of the step's tokens."""
        rows, sampling, filled = pending.batch.rows, pending.sampling, pending.filled
        for place in filled.discarded:  # tokens that were not to be have been counted
            self.sampler.forget(rows[sampling[place]].slot)
        for place in filled.places:
            token = AwaitedToken(pending)
            pending.awaited[place] = self._awaited[rows[sampling[place]].slot] = token

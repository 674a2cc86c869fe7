"""Running one batch: flatten, forward, sample. Implements `protocols.Executor` on CPU and CUDA alike."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from asyncengine.attention.base import AttentionBackend
from asyncengine.attention.factory import make_backend, num_pages_for
from asyncengine.batch import Batch, Row, StepResult
from asyncengine.config import EngineConfig
from asyncengine.models.attention_function import LayerAttention, attach
from asyncengine.models.loading import LoadedModel
from asyncengine.models.memory import free_bytes
from asyncengine.runner.logprobs import token_logprobs
from asyncengine.runner.lora import LoraLayers
from asyncengine.runner.masks import FilledMasks, MaskFiller, StepMasks, grammar_failed
from asyncengine.runner.sampler import NON_FINITE, Sampler
from asyncengine.runner.step_buffers import Step, StepBuffers


class ModelRunner:
    """Holds weights, KV memory and per-slot state of one model. One step at a time, on any one thread."""

    def __init__(
        self,
        model: LoadedModel,
        backend: AttentionBackend,
        page_size: int,
        max_num_seqs: int,
        *,
        jump_forward: bool = True,
        lora: LoraLayers | None = None,
    ) -> None:
        self.num_pages = backend.num_pages
        self.page_size = page_size
        self.kv_bytes = backend.kv_bytes
        self.weights_bytes = model.weights_bytes
        self.attention_backend = backend.name
        self.fused = model.fused
        self.vocab_size = model.vocab_size
        self._module: Any = model.module
        self._attention_modules = model.attention_modules
        self._backend = backend
        self._device = model.device
        self._buffers = StepBuffers(max_num_seqs, page_size, model.device)
        self._jump = jump_forward
        self._lora = lora
        self._masks = MaskFiller(model.vocab_size, model.device)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, model.device)
        self._last_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
        for index, module in enumerate(model.attention_modules):
            attach(module, LayerAttention(index, backend))

    def execute(self, batch: Batch) -> StepResult:
        """Run one step. A row that fails by itself is reported in `errors`; raising means the runner is broken."""
        began = time.perf_counter()
        result = StepResult(batch.step, [-1] * len(batch.rows))
        with torch.inference_mode():
            masks = self._masks.start(batch)
            step = self._buffers.build(batch, self._last_token)
            self._backend.plan(step.view)
            if self._lora is not None:
                for swap in batch.swaps:
                    self._lora.write(swap.slot, swap.weights)
                self._lora.begin([row.adapter_slot for row in batch.rows], step.view.counts, step.logit_rows)
            output = self._module(
                input_ids=step.input_ids,
                position_ids=step.positions,
                use_cache=False,
                logits_to_keep=step.logit_rows,
            )
            logits = output.logits[0]
            if step.sampling:
                self._sample(batch, step, logits, masks, result)
            for index, first, last in step.prompt_spans:
                self._score_prompt(batch.rows[index], index, logits[first:last], result)
        result.seconds = time.perf_counter() - began
        return result

    def close(self) -> None:
        """Free KV memory and let go of the weights. Idempotent."""
        for module in self._attention_modules:
            attach(module, None)
        self._attention_modules = []
        self._backend.close()
        self._masks.close()
        if self._lora is not None:
            self._lora.close()
        self._module = None

    def _sample(
        self, batch: Batch, step: Step, logits: torch.Tensor, masks: StepMasks | None, result: StepResult
    ) -> None:
        rows = [batch.rows[index] for index in step.sampling]
        if len(step.sample_logits) != logits.shape[0]:
            logits = logits[torch.from_numpy(step.sample_logits).to(self._device)]
        filled = FilledMasks.none() if masks is None else masks.wait(step.sampling)
        sampled = self._sampler.sample(rows, logits, filled, self._last_token)
        tokens = sampled.tokens.tolist()
        errors = {**sampled.errors, **filled.errors}
        if filled.places:
            self._accept(rows, step, tokens, errors, result)
            sampled.tokens.copy_(torch.tensor(tokens, dtype=torch.int64))
        slots = torch.from_numpy(np.array([row.slot for row in rows], dtype=np.int64)).to(self._device)
        self._last_token.index_copy_(0, slots, sampled.tokens)
        for place, token in enumerate(tokens):
            if place in errors:
                result.errors[step.sampling[place]] = errors[place]
            else:
                result.tokens[step.sampling[place]] = token
        wanted = [place for place, row in enumerate(rows) if row.spec.params.logprobs and place not in errors]
        if wanted:
            index = torch.tensor(wanted, device=self._device)
            num_top = max(rows[place].spec.params.top_logprobs for place in wanted)
            found = token_logprobs(logits[index], sampled.tokens[index], num_top)
            for place, entry in zip(wanted, found, strict=True):
                top = entry.top[: rows[place].spec.params.top_logprobs]
                result.logprobs[step.sampling[place]] = entry._replace(top=top)

    def _accept(
        self, rows: list[Row], step: Step, tokens: list[int], errors: dict[int, str], result: StepResult
    ) -> None:
        """Hand constrained rows their sampled tokens; `tokens` gets what they make of them."""
        for place, row in enumerate(rows):
            if row.grammar is None or place in errors:
                continue
            try:
                # the log-probability of a token that was not sampled would be missing: no jumps then
                taken, *forced = row.grammar.accept(tokens[place], self._jump and not row.spec.params.logprobs)
            except Exception as error:  # a foreign matcher may raise anything; it ends its own request only
                errors[place] = grammar_failed(error)
                continue
            tokens[place] = taken
            if forced:
                result.forced[step.sampling[place]] = forced

    def _score_prompt(self, row: Row, index: int, logits: torch.Tensor, result: StepResult) -> None:
        if index in result.errors:
            return
        if not bool(torch.isfinite(logits.amax(dim=-1)).all()):
            result.tokens[index] = -1
            result.errors[index] = NON_FINITE
            return
        following = row.tokens[row.start + 1 : row.start + 1 + logits.shape[0]]
        targets = torch.tensor(following, dtype=torch.int64, device=self._device)
        result.prompt_logprobs[index] = token_logprobs(logits, targets, row.spec.params.top_logprobs)


def build_runner(model: LoadedModel, config: EngineConfig, *, lora: LoraLayers | None = None) -> ModelRunner:
    """Size the KV pool and make the runner. Raises `OutOfMemory` if the pool cannot hold one modest request.

    What `lora` has allocated by now is not counted as free; `LoraLayers.allocate` takes it in advance.

    The only torch-wide setting touched is the number of threads, and only when `num_threads` is given.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    pages = num_pages_for(
        model.layers, config, model.max_model_len, model.dtype, model.device, free_bytes(model.device)
    )
    backend = make_backend(config, model.layers, pages, model.dtype, model.device)
    return ModelRunner(
        model, backend, config.page_size, config.max_num_seqs, jump_forward=config.jump_forward, lora=lora
    )

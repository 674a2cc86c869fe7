"""What the largest step takes of a device's memory, found out by running it once before the KV pool is sized."""

from __future__ import annotations

import torch

from asyncengine.attention.factory import make_backend
from asyncengine.batch import Batch, Row, RowSpec
from asyncengine.config import EngineConfig
from asyncengine.models.loading import LoadedModel
from asyncengine.models.memory import release_cached
from asyncengine.runner.model_runner import ModelRunner
from asyncengine.sampling_params import SamplingParams

_SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=0, repetition_penalty=1.0, min_tokens=1)
"""What makes the sampler keep the most copies of a step's logits."""


def working_bytes(model: LoadedModel, config: EngineConfig) -> int:
    """Bytes that a step of `max_num_seqs` rows and `max_num_batched_tokens` tokens takes beside weights and KV memory.

    Kernels are compiled and libraries allocate on their first call, so that it also pays for what later steps find
    done. Raises `torch.OutOfMemoryError` if not even that fits.
    """
    batch, pages = largest_step(config, model.max_model_len)
    backend = make_backend(config, model.layers, pages, model.dtype, model.device, model.max_model_len)
    runner = ModelRunner(model, backend, config.page_size, config.max_num_seqs)
    try:
        before = torch.cuda.memory_allocated(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        runner.rehearse(batch)
        torch.cuda.synchronize(model.device)
        return torch.cuda.max_memory_allocated(model.device) - before
    finally:
        runner.close()
        del runner, backend
        release_cached(model.device)


def largest_step(config: EngineConfig, max_model_len: int) -> tuple[Batch, int]:
    """The step, and the pages of a pool that holds it, page 0 included."""
    budget = config.max_num_batched_tokens
    count = min(config.max_num_seqs, budget)
    size = config.page_size
    rows: list[Row] = []
    page = 1
    for slot in range(count):
        left = budget - (count - slot - 1)  # the others need one token each
        length = min(left, max_model_len - 1)
        budget -= length
        pages = list(range(page, page + -(-length // size)))
        page += len(pages)
        spec = RowSpec(slot + 1, _SAMPLED, slot, length, (0,))
        rows.append(Row(spec, slot, 0, length, [0] * length, False, pages, True))
    return Batch(0, tuple(rows)), page

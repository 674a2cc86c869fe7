"""Names of the compiled kernels that a decoder or an encoder calls, known before its weights are read.

For `kernels.compile_ahead`, which compiles them while the model loads. The layers run once over uninitialized weights
under a `recording.KernelList`, which notes each kernel. The sampler's kernels are listed by hand, as it is created
after the model and chooses them by the parameters of requests. A kernel that is not listed is compiled at its first
call, which `tests/execution/models` would find.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from asyncengine.execution.attention.base import StepView
from asyncengine.execution.device.arena import Arena
from asyncengine.execution.layers.states import StatePools, StateSegments, StateStep
from asyncengine.execution.layers.step import StepContext
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.encoder import Encoder

_LONG = 513
"""Tokens of a prompt that is long enough for the kernels of many rows, whatever the model's sizes."""
_BY_TORCH = 2
"""Tokens of that prompt if torch updates recurrent states, which takes time in proportion to the tokens."""


class FirstKernels(NamedTuple):
    """Names of kernels for `calls.compile_named`, the slowest to compile first. Empty if nothing is compiled."""

    needed: Sequence[str] = ()
    """Kernels of a first answer to a prompt."""
    later: Sequence[str] = ()
    """Kernels of long contexts, and of requests that sample in another way than the model's own defaults."""


_MAX_LISTED = 64
_listed: dict[Hashable, FirstKernels] = {}
"""Kernels of the decoders that this process has loaded, cached because making a list takes as long as several steps."""


def kernels_of(decoder: Decoder, page_size: int, kv_dtype: torch.dtype, defaults: Mapping[str, Any]) -> FirstKernels:
    """The kernels that a decoder's first answer calls. `page_size`: tokens per page. `kv_dtype`: type of the KV cache.
    `defaults`: the model's default sampling parameters, by name."""
    options = decoder.options
    if options.kernels.name != "compiled":
        return FirstKernels()
    if options.ranks is not None:  # a collective would wait for the other processes, which do not run this step
        alone = replace(options, ranks=None, memory=Arena())
        decoder = Decoder(decoder.config, alone, decoder.max_model_len)
    pages = page_size, kv_dtype
    key = decoder.key, pages
    if key not in _listed:
        if len(_listed) >= _MAX_LISTED:
            _listed.clear()
        _listed[key] = _list(decoder, pages)
    (needed, later), (sampled, others) = _listed[key], _sampling(defaults)
    first = dict.fromkeys((*needed, *sampled))
    return FirstKernels(list(first), [name for name in (*others, *later) if name not in first])


def _list(decoder: Decoder, pages: tuple[int, torch.dtype]) -> FirstKernels:
    """The kernels of the decoder, without the sampler's. `pages`: tokens per page, and the type of the KV cache."""
    from asyncengine.kernels.api import KernelList

    moved = all(layer.state is None or layer.state.kernel is not None for layer in decoder.layers)
    needed, later = KernelList(), KernelList()
    with needed:
        for count in (1, min(_LONG if moved else _BY_TORCH, decoder.max_model_len)):
            _run(decoder, *pages, 0, count)
    with later:
        _run(decoder, *pages, decoder.max_model_len - 1, 1)
    return FirstKernels(needed.names, later.names)


@torch.inference_mode()
def _run(decoder: Decoder, page_size: int, kept: torch.dtype, start: int, count: int) -> None:
    """Run a step of `count` tokens from position `start` on, and if that is not 0, the kernels of long contexts."""
    from asyncengine.execution.attention.cpu import CompiledBackend

    backend = CompiledBackend(decoder.specs, 1, page_size, decoder.dtype, one_pool=True, kv_dtype=kept)
    starts, counts, bounds = (np.array(values, dtype=np.int64) for values in ([start], [count], [0, count]))
    tables = np.zeros((1, -(-(start + count) // page_size)), dtype=np.int32)
    positions, ids = torch.arange(start, start + count), torch.zeros(count, dtype=torch.int64)
    backend.plan(StepView(starts, counts, bounds, tables, ids))
    states = None
    if decoder.states:
        first, last, slot = np.zeros(1, dtype=np.int64), counts, np.ones(1, dtype=np.int64)
        segments = StateSegments(np.arange(2), first, last, first, slot)
        states = StateStep(StatePools(decoder.states, 2, decoder.dtype, decoder.device), segments)
    step = StepContext(positions, backend, states=states)
    rows = torch.tensor([count - 1])
    if decoder.plan.run.start:  # a later pipeline stage receives the output of the one before it
        width, vector_shape = decoder.carried
        vectors = torch.zeros(count, *vector_shape, dtype=decoder.dtype) if vector_shape else None
        decoder.run_layers(torch.zeros(count, width, dtype=decoder.dtype), vectors, step, rows, recorded=False)
    else:
        outputs = decoder.run_layers(*decoder.embedded(ids, step), step, rows, recorded=False)
        decoder.logits(decoder.projected(outputs[-1:, : decoder.config.width], step, rows), step)
    if start:
        backend.warm_up()


def _sampling(defaults: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(kernels of requests with the model's default sampling parameters, kernels of other requests)"""
    from asyncengine.kernels.api import SamplerKernel

    draws = defaults.get("do_sample", True) and defaults.get("temperature", 1.0) > 0
    top_k = draws and defaults.get("top_k", 0) > 0
    top_p = draws and not top_k and defaults.get("top_p", 1.0) < 1
    return SamplerKernel.names(draws=draws, top_k=top_k, top_p=top_p)


def encoder_kernels_of(encoder: Encoder) -> list[str]:
    """The kernels that an encoder calls."""
    if encoder.options.kernels.name != "compiled":
        return []
    from asyncengine.kernels.api import KernelList

    with KernelList() as kernels, torch.inference_mode():
        for count in (1, min(_LONG, encoder.max_model_len)):
            hidden = encoder.forward(torch.zeros(count, dtype=torch.int64), [count], recorded=False)
            if encoder.head is not None:
                encoder.classify(hidden, [count])
    return kernels.names

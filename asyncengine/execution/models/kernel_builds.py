"""FlashInfer's modules, compiled by several threads beside the reading of weights.

FlashInfer compiles a module when it is first called: a minute each, one after another. Every module has a build and a
lock of its own, so several threads may each wait for one. Called are the functions by which its own wrappers get their
modules; they are cached, and take the same arguments from 0.6.13 to 0.7.2 (what lies behind them does not). Compiled
once on a machine, a module takes a tenth of a second.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.attention.factory import kv_dtype
from asyncengine.execution.attention.flashinfer import load_flashinfer
from asyncengine.execution.attention.flashinfer_plan import LayerGroup, why_not
from asyncengine.execution.device.pinned import is_hopper
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.progress import LoadProgress

logger = logging.getLogger("asyncengine")

_CORES_EACH = 3
"""A build runs one compiler for each of its sources, and each compiler takes up to two GiB."""


def modules_of(decoder: Decoder, config: EngineConfig, dtype: torch.dtype) -> list[Callable[[], object]]:
    """Calls that each have one module built and loaded, those that take longest first: what this model calls."""
    flashinfer = load_flashinfer()
    gated = {getattr(layer.mlp, "activation", "") for layer in decoder.config.layers} & {"silu", "gelu", "gelu_tanh"}
    found: list[Callable[[], object]] = []
    if why_not(decoder.specs, dtype, config.page_size) is None:
        hopper, stored = is_hopper(decoder.device), kv_dtype(config, dtype)
        found = attention_modules(flashinfer, decoder.specs, dtype, stored, hopper=hopper)
    return [*found, *(partial(flashinfer.activation.get_act_and_mul_module, name) for name in sorted(gated))]


def attention_modules(
    flashinfer: Any, layers: Sequence[LayerSpec], dtype: torch.dtype, kv_dtype: torch.dtype, *, hopper: bool
) -> list[Callable[[], object]]:
    """The same of attention alone, which runs on FlashInfer in all of these layers. `hopper`: the device is of compute
    capability 9."""
    found: dict[tuple[Any, ...], Callable[[], object]] = {}
    for group in map(LayerGroup.of, layers):
        # types of queries, keys, results and indices, dimensions, pos_encoding_mode NONE, and which masks there are
        kind = (dtype, kv_dtype, dtype, torch.int32, group.head_dim, group.head_dim, 0,
                group.window is not None, bool(group.softcap))  # fmt: skip
        if hopper and group.hopper(dtype, kv_dtype):
            found["long", *kind] = partial(flashinfer.prefill.get_batch_prefill_module, "fa3", *kind, False)
        found["prefill", *kind] = partial(flashinfer.prefill.get_batch_prefill_module, "fa2", *kind, False)
        if not group.decodes_on_tensor_cores:
            found["decode", *kind] = partial(flashinfer.decode.get_batch_decode_module, *kind)
    return [*found.values(), *([flashinfer.page.get_page_module] if found else [])]


@contextmanager
def building(works: Sequence[Callable[[], object]], bar: LoadProgress) -> Iterator[None]:
    """Do these in threads while the block runs, and wait for them behind it. What fails fails again, with its reason,
    where the kernel is first called."""
    if not works:
        yield
        return
    pool = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // _CORES_EACH), "asyncengine-build")
    try:
        futures = [pool.submit(work) for work in works]
        yield
        bar.stage("compiling attention kernels", len(futures))
        for future in as_completed(futures):
            if (error := future.exception()) is not None:
                logger.debug("a module of FlashInfer's was not built ahead: %s", error)
            bar.advance()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
